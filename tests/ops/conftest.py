"""Small tensors: a second thread only waits, and waits long where tests run in parallel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracles import one_thread


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
