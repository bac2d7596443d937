"""What slow work says meanwhile: on a terminal, and in a log."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

import pytest
import torch
from torch import nn

import magis
from magis import progress
from magis.progress import ERASE, ProgressPlace, on_stderr, shown_if_slow

AT_ONCE, NEVER = 0.0, 1e6


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets the seconds of silence, and those between two lines."""

    def set_to(silence_s: float, between_s: float) -> None:
        monkeypatch.setattr(progress, "SILENCE_S", silence_s)
        monkeypatch.setattr(progress, "REWRITTEN_S", between_s)
        monkeypatch.setattr(progress, "LOGGED_S", between_s)

    return set_to


@pytest.mark.parametrize("columns", [None, 80])
def test_what_is_quick_says_nothing(patience: Callable[[float, float], None], columns: int | None) -> None:
    patience(NEVER, AT_ONCE)
    written: list[str] = []
    with shown_if_slow(ProgressPlace(written.append, columns), "net") as tell:
        tell("searching")
    assert written == []


def test_a_terminal_has_one_line_which_goes(patience: Callable[[float, float], None]) -> None:
    """Under the line in which others will go on; the cursor is back there in the end."""
    patience(AT_ONCE, NEVER)
    written: list[str] = []
    place = ProgressPlace(written.append, 40, lambda: 5)
    with shown_if_slow(place, "net") as tell:
        tell("searching\nplans")
        tell("too soon")
    assert written == [f"\n{ERASE}net: searching plans (0 s)", f"{ERASE}\x1b[A\x1b[5C"]


def test_of_a_long_name_the_beginning_is_cut(patience: Callable[[float, float], None]) -> None:
    patience(AT_ONCE, NEVER)
    written: list[str] = []
    with shown_if_slow(ProgressPlace(written.append, 40), "package.tests.test_memory.test_net[eager]") as tell:
        tell("capturing")
    assert written == [f"{ERASE}...ory.test_net[eager]: capturing (0 s)", ERASE]


def test_a_log_has_lines_of_its_own_and_not_many(patience: Callable[[float, float], None]) -> None:
    patience(AT_ONCE, NEVER)
    written: list[str] = []
    place = ProgressPlace(written.append, column=lambda: 5)
    for name in ("net", "other"):
        with shown_if_slow(place, name) as tell:
            tell("searching")
    assert written == ["\nmagis: net: searching (0 s)\n"]


def test_who_says_nothing_for_long_is_spoken_for(patience: Callable[[float, float], None]) -> None:
    patience(0.01, 0.01)
    written: list[str] = []
    twice = Event()

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 2:
            twice.set()

    with shown_if_slow(ProgressPlace(write), "net") as tell:
        tell("searching")
        assert twice.wait(60)
    assert all(text.startswith("magis: net: searching (") for text in written)


def test_a_command_without_a_standard_error_says_nothing(
    patience: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(AT_ONCE, NEVER)
    monkeypatch.setattr("sys.stderr", None)
    with shown_if_slow(on_stderr(), "net") as tell:
        tell("searching")


def test_an_interrupt_while_the_thread_starts_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), shown_if_slow(ProgressPlace([].append), "net") as tell:
        tell("capturing")


@pytest.mark.parametrize("way", ["magis.optimize", "torch.compile, backend magis"])
def test_planning_under_a_users_call_is_seen(
    patience: Callable[[float, float], None], capsys: pytest.CaptureFixture[str], way: str
) -> None:
    patience(AT_ONCE, AT_ONCE)
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())))
    x = torch.randn(64, 16)
    if way == "magis.optimize":
        magis.optimize(net, (x, x), nn.functional.mse_loss, memory_ratio=0.9)
    else:
        torch.compiler.reset()
        torch.compile(net, backend="magis", options={"memory_ratio": 0.9})(x).sum().backward()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"magis: {way}: capturing (0 s)\n")
    assert f"magis: {way}: searching" in err


def test_quick_planning_under_a_users_call_says_nothing(
    patience: Callable[[float, float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    patience(NEVER, AT_ONCE)
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    magis.optimize(net, (x, x), nn.functional.mse_loss, memory_ratio=1.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_of_several_ranks_the_first_alone_speaks(
    patience: Callable[[float, float], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    speaks: bool,
) -> None:
    patience(AT_ONCE, AT_ONCE)
    monkeypatch.setenv("RANK", rank)
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    magis.optimize(net, (x, x), nn.functional.mse_loss, memory_ratio=1.0)
    assert bool(capsys.readouterr().err) == speaks
