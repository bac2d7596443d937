"""Entry point of the plugin: declares options and hooks, and loads the gate when models or gated tests are found.

Every pytest session in the environment imports this module, so it loads neither torch nor the gate.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS
from collections.abc import Callable, Generator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_magis import flags, hookspecs
from pytest_magis.lazy_activation import LazyActivation

if TYPE_CHECKING:
    from magis.api import BlockPeak
    from pytest_magis.live.fixture import MagisFixture


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register every option of the gate on the command line and in the ini file."""
    group = parser.getgroup("magis", "memory-regression gate (magis)")
    experts = parser.getgroup("magis-expert", "memory-regression gate (magis, expert)")
    for each in flags.OPTIONS:
        shown = f"{each.help} (default: {each.shown_default})"
        if not each.kind.metavar:
            how = {"action": "store_const", "const": "true"}
        else:
            how = {"action": "append" if each.kind.is_list else "store", "metavar": each.kind.metavar}
        (experts if each.expert else group).addoption(each.flag, dest=each.key, default=None, help=shown, **how)
        ini: Literal["linelist", "string"] = "linelist" if each.kind.is_list else "string"
        parser.addini(each.key, shown, type=ini, default=None)
    for key, left in flags.GONE.items():
        group.addoption(f"--{key.replace('_', '-')}", dest=key, default=None, help=SUPPRESS)
        parser.addini(key, f"gone; give {left}", default=None)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that other projects implement."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None, Any, Any]:
    """Refuse misspelt options, and those of pytest-benchmark where it is not installed, in one line."""
    result = yield
    asked = any(word.startswith(("--magis-", "--benchmark-")) for word in args)
    for word in parser.parse_known_and_unknown_args(args)[1] if asked else ():  # those of a conftest.py are known
        flag = word.partition("=")[0]
        if flag.startswith("--magis-"):
            from magis.errors import nearest

            raise pytest.UsageError(f"unknown option {flag}; {nearest(flag, [each.flag for each in flags.OPTIONS])}")
        if flag.startswith("--benchmark-") and find_spec("pytest_benchmark") is None:
            hint = "pip install 'pytest-magis[benchmark]'"
            raise pytest.UsageError(f"{flag} is an option of pytest-benchmark, which is not installed; {hint}")
    return result


@pytest.hookimpl(tryfirst=True)  # before a session is made: only rank 0 has one
def pytest_cmdline_main(config: pytest.Config) -> pytest.ExitCode | None:
    """In a multi-process job (torchrun, srun), run the session on rank 0 and serve its commands on the other ranks."""
    if flags.COMPARED_WITH in os.environ:  # these files of results are another run's, too
        vars(config.option).update(dict.fromkeys({"xmlpath", "benchmark_json"} & vars(config.option).keys()))
    if not flags.is_active(config) or config.option.help or hasattr(config, "workerinput"):
        return None
    from pytest_magis.session import take_place

    return take_place(config)


@pytest.hookimpl(trylast=True)  # after other plugins had the chance to register theirs
def pytest_configure(config: pytest.Config) -> None:
    """Check options and models before any case runs; without models, wait for a gated test."""
    config.addinivalue_line(
        "markers",
        f"magis(*, {', '.join(flags.MARK_ARGUMENTS)}): the test returns (module, batch, loss_fn), whose training "
        "step is gated; each argument is optional, and means what the option of its name means",
    )
    version = (flags.given(config, "against") or [""])[0]
    if version or flags.COMPARED_WITH in os.environ:
        from magis import registry

        if flags.COMPARED_WITH in os.environ:
            config.pluginmanager.register(registry.load("against", "guard")(), "magis-guard")
        elif not (config.option.help or config.option.collectonly or hasattr(config, "workerinput")):
            registry.load("against", "compare")(config, version)  # measures it first
    if flags.is_active(config):
        from pytest_magis.session import start

        start(config)
    elif flags.any_given(config):
        from pytest_magis.session import check_options

        check_options(config)
    config.pluginmanager.register(LazyActivation(config), "magis-dormant")


@pytest.fixture
def magis(request: pytest.FixtureRequest) -> MagisFixture:
    """Gate the memory of networks that a test builds: `magis.check(module, batch, loss=...)`."""
    from pytest_magis.live.fixture import MagisFixture

    return MagisFixture(request.node)


@pytest.fixture
def magis_peak() -> Callable[..., BlockPeak]:
    """Measure and gate the peak memory of any code: `with magis_peak() as p: ...`, then `p.gate()`."""
    from magis import peak

    return peak
