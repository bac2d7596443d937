"""The entry point: options and hooks are declared; all else is loaded once models are asked for.

Every pytest session of an environment pays for this import, hence no torch, and none of the gate either.
"""

from __future__ import annotations

import pytest

from pytest_magis import flags, hookspecs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the gate."""
    flags.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that other projects implement."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(trylast=True)  # after other plugins had the chance to register theirs
def pytest_configure(config: pytest.Config) -> None:
    """Check everything that can be checked before a case runs; without models, change nothing."""
    config.addinivalue_line("markers", "magis: a case of the memory-regression gate (--magis-models)")
    if flags.is_active(config):
        from pytest_magis.session import start

        start(config)
