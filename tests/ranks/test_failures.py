"""Which rank is to blame, and what its line says; records survive their way through JSON."""

from __future__ import annotations

import json
from multiprocessing import Pipe
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import UsageError
from magis.extensions.ranks import RankError, RankJob, RankReport, mean_losses, slowest_ms
from magis.extensions.ranks.processes.pool import Rank, failure, silence
from magis.extensions.ranks.processes.records import last_words, read_message, stack, write_message
from magis.plain_records import from_plain, to_plain
from magis.results import Memory, Term


def raised(number: int, text: str, **facts: Any) -> Rank:
    told = {"error": text, "phase": "step 2", "usage": False, "exhausted": False, "frames": [], **facts}
    return Rank(number, phase="step 2", progress=5, error=told)


def died(number: int, how: str = "was killed by SIGSEGV", words: str = "") -> Rank:
    return Rank(number, phase="step 2", progress=5, death=how, words=words)


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def test_a_rank_that_lost_another_is_not_to_blame() -> None:
    for first in (died(1), raised(1, "ValueError: no")):
        error = failure([raised(0, LOST), first])
        assert isinstance(error, RankError)
        assert error.rank == 1
    alone = failure([Rank(0), raised(1, LOST)])
    assert isinstance(alone, RankError)
    assert alone.rank == 1


def test_one_rank_that_refuses_makes_a_usage_error() -> None:
    assert isinstance(failure([Rank(0), raised(1, "too many ranks", usage=True)]), UsageError)


def test_lines_of_failures() -> None:
    site = "/x/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 in forward"
    error = failure([Rank(0), raised(1, "ValueError: no", frames=[site, "/home/net.py:12 in forward"])])
    assert str(error) == "rank 1 of 2 failed during step 2: ValueError: no (in net.py:12 in forward)"
    assert str(failure([died(0, words="free(): invalid pointer")])) == (
        "rank 0 of 1 was killed by SIGSEGV during step 2: free(): invalid pointer"
    )


def test_the_rank_that_the_others_wait_for() -> None:
    waits = ("/site-packages/torch/distributed/distributed_c10d.py:3 in all_reduce", "/home/net.py:9 in run")
    works = ("/home/net.py:12 in forward",)
    equal = [Rank(0, phase="step 1", progress=3, frames=waits), Rank(1, phase="step 1", progress=3, frames=works)]
    assert str(silence(equal, "report", 5)) == (
        "rank 1 of 2 did not answer within 5 s during step 1 (in net.py:12 in forward)"
    )
    behind = [Rank(0, progress=2, frames=waits), Rank(1, progress=3, frames=works)]
    assert silence(behind, "report", 5).rank == 0
    done = [Rank(0, progress=2, answers={"report": {}}), Rank(1, progress=9, frames=None)]
    assert silence(done, "report", 5).rank == 1


def test_stacks_and_last_words() -> None:
    text = (
        "printed before\nCurrent thread 0x00007f (most recent call first):\n"
        '  File "/a/b.py", line 7 in inner\n  File "/a/c.py", line 9 in <module>\n'
    )
    assert stack(text) == ["/a/b.py:7 in inner", "/a/c.py:9 in <module>"]
    assert stack("nothing of that kind") == []
    assert last_words("first\n  second  \n\nUSDT: noise\n") == "second"
    assert last_words("") == ""


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), max_size=5))
def test_messages_come_whole_and_in_order(messages: list[dict[str, Any]]) -> None:
    one, other = Pipe()
    with one, other:
        for message in messages:
            write_message(one, message)
        one.close()
        assert [read_message(other) for _ in messages] == messages
        with pytest.raises(EOFError):
            read_message(other)


def test_a_message_of_more_bytes_than_expected_is_refused() -> None:
    one, other = Pipe()
    with one, other:
        write_message(one, {"rank": 1, "more": "x" * 100})
        with pytest.raises(OSError, match="bad message length"):
            read_message(other, 100)


numbers = st.floats(allow_nan=False)
memories = st.builds(Memory, st.integers(0), st.integers(0), st.none() | st.integers(0))
reports = st.builds(
    RankReport,
    rank=st.integers(0, 9),
    memory=memories,
    times_ms=st.lists(numbers, max_size=3).map(tuple),
    losses=st.lists(numbers | st.none(), max_size=3).map(tuple),
    samples=st.integers(0),
    terms=st.lists(st.builds(Term, st.text(), st.integers(), st.text()), max_size=3).map(tuple),
    identity=st.dictionaries(st.text(), st.text(), max_size=2),
)


@given(reports)
def test_reports_survive_json(report: RankReport) -> None:
    assert from_plain(RankReport, json.loads(json.dumps(to_plain(report)))) == report


def test_jobs_survive_json() -> None:
    job = RankJob("bert", "amp+zero1", "paper", "bfloat16", 3, 4, False)
    assert from_plain(RankJob, json.loads(json.dumps(to_plain(job)))) == job


def test_figures_of_the_world() -> None:
    memory = Memory(1, 2)
    ranks = [RankReport(0, memory, (1.0, 5.0), (None, None)), RankReport(1, memory, (2.0, 3.0), (4.0, 6.0))]
    assert slowest_ms(ranks) == (2.0, 5.0)
    assert mean_losses(ranks) == (4.0, 6.0), "only the last stage of a pipeline sees the loss"
    assert mean_losses([RankReport(0, memory, (), (1.0,)), RankReport(1, memory, (), (2.0,))]) == (1.5,)
    assert mean_losses([RankReport(0, memory, ())]) == ()
