"""Ranks run jobs together, one after the other, and a rank that fails ends its job and nothing else."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from magis.errors import MagisError, UsageError
from magis.extensions.ranks import RankError, RankJob, RankPool, mean_losses, slowest_ms
from magis.extensions.ranks.strategies.distributed import make_optimizer, trained
from magis.models import model_specs
from magis.strategies.rank_step import without_dropout
from tests.ranks.processes import SIGN, alive, gone_within

HERE = "tests.ranks.own_strategies"
NET = f"{HERE}:small_net"
SILENCE_S, PATIENT_S = 2, 300.0


@pytest.fixture(scope="module")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks") / "sign"


@pytest.fixture(scope="module")
def pool(sign: Path) -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGN, str(sign))
        with RankPool(2, timeout_s=PATIENT_S) as made:
            yield made
        assert alive(sign).keys() <= {os.getpid()}, "closing left processes behind"


def job(strategy: str = "ddp", *, losses: bool = False) -> RankJob:
    return RankJob(NET, strategy if strategy == "ddp" else f"{HERE}:{strategy}", rounds=2, losses=losses)


@pytest.fixture
def silence_s(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Seconds after which the pool takes ranks for hung ones: many times those of a whole job on this machine."""
    pool.run(job())  # starts ranks, should there be none
    start = time.monotonic()
    pool.run(job())
    seconds = math.ceil(SILENCE_S + 5 * (time.monotonic() - start))
    monkeypatch.setattr(pool, "_timeout_s", float(seconds))
    return seconds


def test_ranks_report_what_one_rank_alone_computes(pool: RankPool) -> None:
    reports = pool.run(job(losses=True))
    assert [report.rank for report in reports] == [0, 1]
    for report in reports:
        assert report.samples == 8
        assert len(report.times_ms) == 2
        assert min(report.times_ms) > 0
        assert report.identity["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert sum(term.nbytes for term in report.terms) == report.memory.tensor_bytes
        assert report.memory.peak_bytes >= report.memory.tensor_bytes
    assert len(slowest_ms(reports)) == 2

    work = model_specs.get(NET).build("small", 0)
    without_dropout(work.module)
    optimizer = make_optimizer(work, trained(work.module), "one rank")
    expected = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = work.loss_fn(work.module(*work.inputs), *work.targets)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert mean_losses(reports) == pytest.approx(expected, rel=1e-5)


def test_a_peak_holds_what_outlives_the_step(pool: RankPool) -> None:
    """Weights, gradients, buckets of gradients and the batch: all of them are there when the weights are updated."""
    (report, _) = pool.run(job())
    weights = sum(parameter.nbytes for parameter in model_specs.get(NET).build("small", 0).module.parameters())
    share = (4 * 64 + 4 * 10) * 4
    assert report.memory.tensor_bytes >= 3 * weights + share
    assert report.memory.tensor_bytes < 4 * weights


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_job_leaves_no_tensor_behind(pool: RankPool, strategy: str) -> None:
    pool.run(RankJob(NET, strategy, rounds=1))
    before = pool.pids
    pool.run(job("finds_nothing_left"))
    assert pool.pids == before


def test_the_next_job_starts_clean_in_the_same_processes(pool: RankPool) -> None:
    first = pool.run(job())
    before = pool.pids
    second = pool.run(job())
    assert pool.pids == before
    assert len(set(before)) == 2
    assert [r.memory.tensor_bytes for r in second] == [r.memory.tensor_bytes for r in first]
    assert [r.terms for r in second] == [r.terms for r in first]
    # peaks with scratch are not the same: threads of gloo allocate when they come to it
    assert all(report.memory.peak_bytes >= report.memory.tensor_bytes for report in (*first, *second))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_scratch_is_the_same_in_every_run(strategy: str) -> None:
    """What a collective's thread lets go of last was scratch from then on, in one of twenty runs."""
    with RankPool(2) as pool:
        runs = [pool.run(RankJob("bert", strategy, rounds=1)) for _ in range(30)]
    assert len({tuple(report.memory.peak_bytes for report in reports) for reports in runs}) == 1


@pytest.mark.parametrize(
    ("strategy", "rank", "says"),
    [
        (
            "raises_on_rank_1",
            1,
            r"rank 1 of 2 failed during step 2: ValueError: the second half is missing \(in own_strategies.py:\d+ in",
        ),
        ("killed_on_rank_1", 1, r"rank 1 of 2 was killed by SIGKILL during step 3; the system kills a process so"),
        ("exits_on_rank_0", 0, r"rank 0 of 2 failed during step 1: SystemExit: done here \(in own_strategies.py"),
        ("aborts_on_rank_1", 1, r"rank 1 of 2 was killed by SIGABRT during step 1: these are my last words$"),
        ("hangs_on_rank_1", 1, r"rank 1 of 2 did not answer within {} s during step 2 \(in own_strategies.py:\d+ in "),
        ("leaves_collective_out", None, r"rank [01] of 2 did not answer within {} s during step [23]"),
    ],
)
def test_a_rank_that_fails_ends_the_job(
    pool: RankPool, sign: Path, silence_s: int, strategy: str, rank: int | None, says: str
) -> None:
    before, start = set(pool.pids), time.monotonic()
    with pytest.raises(RankError, match=says.replace("{}", str(silence_s))) as caught:
        pool.run(job(strategy))
    assert time.monotonic() - start < 120 + silence_s  # and not as long as a collective waits
    assert "\n" not in str(caught.value)
    assert rank is None or caught.value.rank == rank
    assert not caught.value.out_of_memory
    assert not before & alive(sign).keys()
    assert pool.pids == ()


def test_running_out_of_memory_is_told_apart(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed during step 1: RuntimeError: .*allocate memory") as caught:
        pool.run(job("out_of_memory"))
    assert caught.value.out_of_memory


def test_a_job_that_all_ranks_refuse_costs_no_process(pool: RankPool) -> None:
    pool.run(job())
    before = pool.pids
    for refused, says in (
        (job("refuses"), r"^this needs 16 ranks, and there are 2; use 16$"),
        (RankJob("nonesuch", "ddp"), "nonesuch"),
        (RankJob("no_such_module:net", "ddp"), "no_such_module"),
        (RankJob(NET, "nonesuch"), "no distributed strategy"),
        (RankJob(NET, f"{HERE}:groups_of_four"), "tp4"),
    ):
        with pytest.raises(UsageError, match=says):
            pool.run(refused)
    pool.run(job())
    assert pool.pids == before


def test_what_ranks_have_started_is_killed_with_them(pool: RankPool, sign: Path, silence_s: int) -> None:
    with pytest.raises(RankError, match=f"rank 0 of 2 did not answer within {silence_s} s"):
        pool.run(job("starts_processes"))
    assert sign.exists(), "the rank did not come as far as to start any"
    left = [line for line in alive(sign).values() if "sleep" in line]
    assert left == []


def test_ctrl_c_in_a_job_ends_its_ranks(pool: RankPool, sign: Path) -> None:
    if not pool.pids:
        pool.run(job())
    before = set(pool.pids)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(job("hangs_on_rank_1"))
    timer.join()
    assert not before & alive(sign).keys()


def test_a_keeper_that_is_killed_ends_the_job(pool: RankPool, sign: Path) -> None:
    pool.run(job())
    before = set(pool.pids)
    keepers = [
        pid
        for pid, line in alive(sign).items()
        if "magis.extensions.ranks.processes.fork_server" in line and pid not in before
    ]
    assert len(keepers) == 1
    os.kill(keepers[0], signal.SIGKILL)
    with pytest.raises(MagisError, match=r"the process that keeps the ranks was killed by SIGKILL"):
        pool.run(job())
    assert gone_within(sign, but=os.getpid()) == {}


def test_too_few_ranks() -> None:
    with pytest.raises(UsageError, match="0 ranks are too few"):
        RankPool(0)


def test_elsewhere_than_on_linux_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(
        UsageError, match=r"^ranks run on Linux only, this is Darwin; leave .* --magis-device=sim:h100$"
    ):
        RankPool(2)


@pytest.mark.cuda
def test_a_rank_on_a_gpu() -> None:
    with RankPool(1, "cuda") as pool:
        (report,) = pool.run(RankJob(NET, "ddp", rounds=2))
        assert report.memory.peak_bytes >= report.memory.tensor_bytes
        assert report.memory.reserved_bytes is not None
        assert report.memory.reserved_bytes >= report.memory.peak_bytes
    if torch.cuda.device_count() < 8:
        with RankPool(8, "cuda") as pool, pytest.raises(UsageError, match="at most one rank per GPU"):
            pool.run(RankJob(NET, "ddp"))
