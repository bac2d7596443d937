"""Peaks per rank and losses of the distributed strategies: predicted on fake tensors beside real ranks (gloo, CPU).

    python benchmarks/ranks.py [--models bert,gpt_neo] [--sizes 2,4] [--strategies all] [--output FILE]

For every network and number of ranks, processes on this machine run each strategy for three steps; the third one's
tensors are counted, and each process predicts its own rank beforehand. "error" is the worst rank's, "loss" the largest
relative difference of the mean loss to that of one process with the whole batch. Dropout is off, so that all compute
the same. Two sizes are not the gate's: zero3 keeps only parameters below 1000 elements whole (at DeepSpeed's 100000,
small networks would not be sharded at all), and gpt_neo has 4 heads (its 3 cannot be shared by 2 ranks).

Strategies "all": those that the number of ranks allows, in float32; names may be given, "amp+..." too.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from lib.program import arguments, head, printed

PERSISTENT = 1000
SECONDS = 600  # for all strategies of one network and number of ranks
TINY = "tiny-bert"  # with a cheaper update than Adam's
TINY_BUDGET = 200  # plans that a rank of magis+ddp evaluates there


def main() -> int:
    """Print the table; 1 where a prediction is off by more than 2% or a float32 loss by more than rounding."""
    parser = arguments(__doc__, models="bert,gpt_neo", sizes="2,4", strategies="all", output=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # model:size:rank:port of one process
    asked = parser.parse_args()
    if asked.rank:
        model, size, rank, port = asked.rank.split(":")
        work_as_rank(model, int(size), int(rank), int(port), asked.strategies.split(","))
        return 0
    pairs = product(asked.models.split(","), map(int, asked.sizes.split(",")))
    found = chain.from_iterable(lines(model, size, asked.strategies) for model, size in pairs)
    columns = "model     strategy     ranks  predicted B   measured B    error     loss"
    every = printed(chain(head("gloo"), (columns,), found), asked.output)
    return int(any(line.endswith(OUT) for line in every))


OUT = "OUT OF BOUNDS"


def lines(model: str, size: int, strategies: str) -> Iterator[str]:
    """A line of the table for each strategy."""
    for row in rows(model, size, strategies):
        fine = abs(row["error"]) <= 0.02 and (row["amp"] or row["loss"] <= 1e-5)
        yield (
            f"{model:9} {row['name']:15} {size:3} {row['predicted']:12} {row['measured']:12} "
            f"{row['error']:+8.3%} {row['loss']:8.1e}{'' if fine else f'  {OUT}'}"
        )


def rows(model: str, size: int, strategies: str) -> list[dict[str, Any]]:
    """What all ranks together found, a row for each strategy. RuntimeError with their output where one fails."""
    from magis.strategies.distributed_names import DISTRIBUTED, distributed_strategy

    names = (
        [n for n in DISTRIBUTED if size % distributed_strategy(n).group == 0]
        if strategies == "all"
        else strategies.split(",")
    )
    reports = [json.loads(text.splitlines()[-1]) for text in started(model, size, names)]
    found = []
    for name in names:
        ranks = [report[name] for report in reports]
        worst = max(ranks, key=lambda rank: abs(rank["predicted"] - rank["measured"]) / rank["measured"])
        losses = [rank["losses"] for rank in ranks if None not in rank["losses"]]
        means = [sum(step) / len(step) for step in zip(*losses, strict=True)]
        alone = reports[0]["alone"]
        found.append(
            {
                "name": name,
                "amp": name.startswith(("amp+", "half+")),
                "predicted": max(rank["predicted"] for rank in ranks),
                "measured": max(rank["measured"] for rank in ranks),
                "error": worst["predicted"] / worst["measured"] - 1,
                "loss": max(abs(mean / one - 1) for mean, one in zip(means, alone, strict=True)),
            }
        )
    return found


def started(model: str, size: int, names: Sequence[str]) -> list[str]:
    """The ranks' outputs. None of them outlives this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--strategies", ",".join(names), "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, f"{model}:{size}:{rank}:{port}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(size)
    ]
    end = time.monotonic() + SECONDS
    try:
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > end or any(rank.poll() for rank in ranks):
                break
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate()[0] for rank in ranks]
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    if failed:
        raise RuntimeError(f"ranks {failed} of {model} failed:\n{outputs[failed[0]]}")
    return outputs


def work_as_rank(model: str, size: int, rank: int, port: int, names: Sequence[str]) -> None:
    """Predict and run this rank of every strategy; the last line printed is JSON."""
    import torch
    import torch.distributed as dist

    from magis.capture import OptimizerSpec, Workload
    from magis.extensions.models.building import REAL
    from magis.extensions.models.decoders import GptNeoConfig, gpt_neo
    from magis.extensions.models.encoders import BertConfig, bert
    from magis.extensions.ranks.plans.planned_ranks import PlannedRanks, factory_of
    from magis.extensions.ranks.strategies.zero import Zero
    from magis.models import get
    from magis.ops.optimizers import torch_optimizer
    from magis.predict import predict_rank, rank_peak
    from magis.strategies import World
    from magis.strategies.distributed_names import distributed_strategy
    from magis.strategies.rank_step import RankStrategy, without_dropout

    torch.set_num_threads(1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()

    def make() -> Workload:
        tiny = BertConfig(8, seq_len=16, layers=4, width=32, heads=4, vocab_size=64, max_positions=16)
        heads = GptNeoConfig(32, seq_len=64, layers=6, width=96, heads=4, window=16, vocab_size=512, max_positions=64)
        if model == TINY:
            work = bert(tiny, REAL, model, 0)
        else:
            work = gpt_neo(heads, REAL, model, 0) if model == "gpt_neo" else get(model).build("small", 0)
        without_dropout(work.module)
        rule = OptimizerSpec("momentum", lr=1e-2, momentum=0.9) if model == TINY else OptimizerSpec("adam", lr=1e-3)
        return replace(work, optimizer=rule)

    def named(name: str) -> RankStrategy:
        made = distributed_strategy(factory_of(name))
        if isinstance(made, PlannedRanks) and model == TINY:
            return replace(made, budget=TINY_BUDGET)
        return replace(made, persistent=PERSISTENT) if isinstance(made, Zero) else made

    report: dict[str, Any] = {
        name: {"predicted": predict_rank(named(name), make, size, rank).predicted.tensor_bytes}  # type: ignore[union-attr]
        for name in names
    }
    if rank == 0:
        work = make()
        optimizer = torch_optimizer(work.optimizer, dict(work.module.named_parameters()))
        report["alone"] = []
        for _ in range(3):
            loss = work.loss_fn(work.module(*work.inputs), *work.targets)
            loss.backward()
            optimizer.step()  # type: ignore[union-attr]
            work.module.zero_grad()
            report["alone"].append(loss.item())
    place = f"tcp://127.0.0.1:{port}"
    limit = dt.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=limit)
    for name in names:
        found = rank_peak(named(name), make, World(size, rank), warm_steps=2)  # for three losses
        report[name].update(measured=found.peak_bytes, losses=found.losses)
        if sum(term.nbytes for term in found.terms) != found.peak_bytes:
            raise RuntimeError(f"{name}: the terms do not sum up to the peak")
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(report))


def end_with(parent: int) -> None:
    """No rank outlives the process that started it, however that ends."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
