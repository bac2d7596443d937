"""What the census runs: a network, its batches and its loss, as a user would write them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | dict[str, Tensor]
"""(inputs, targets), or keywords of the module."""


class NotBuilt(Exception):  # noqa: N818  (a finding of the census)
    """No tiny configuration of a family was found that eager runs."""


class NotRun(NotBuilt):
    """Eager itself cannot run a family here: it needs a GPU or what is absent, or has no network of its own."""


@dataclass(frozen=True)
class Network:
    """One network of a family. `make` and `batch` draw from torch's generator, numpy's and Python's."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[..., Tensor] | None
    """Of the output and the targets; None: the module returns its loss."""


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (libraries draw from the global generator)
    random.seed(seed)


def floating(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returned, in order, each once."""
    if isinstance(output, Tensor):
        if output.is_floating_point() or output.is_complex():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floating(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from floating(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from floating(getattr(output, field.name))


def squares(output: Any, *_targets: Tensor) -> Tensor:
    """Sum of the mean squares of all that a module returned and that can be trained."""
    found = [tensor for tensor in floating(output) if tensor.requires_grad and tensor.numel()]
    if not found:
        raise NotBuilt("the output depends on no parameter")
    total = torch.zeros(())
    for tensor in found:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        total = total + real.float().square().mean()
    return total


def loss_of(network: Network, module: nn.Module, batch: Batch) -> Tensor:
    """Forward and loss of a plain loop."""
    if isinstance(batch, dict):
        output, targets = module(**batch), ()
    else:
        inputs, targets = batch
        output = module(*inputs)
    if network.loss is not None:
        return network.loss(output, *targets)
    return output if isinstance(output, Tensor) else output["loss"] if isinstance(output, Mapping) else output.loss


ABSENT = (
    "torchvision::", "no kernel", "not implemented for 'cpu'", "cuda", "gpu", "no module named", "requires the",
    "library but it was not found", "xformers", "not installed", "requires natten", "flash",
    "only supports", "could not run 'aten", "needs to be installed", "pip install", "custom c++ ops",
)  # fmt: skip


def reason_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def cannot_run_here(error: BaseException) -> bool:
    """Whether an error of eager says that something is missing here, rather than that the census asked wrongly."""
    text = str(error).lower()
    return isinstance(error, (ImportError, NotRun)) or any(word in text for word in ABSENT)


def told_late(reason: NotBuilt) -> tuple[bool, bool]:
    """Sorts reasons: what a forward said tells more than what a constructor said, or a size."""
    text = str(reason)
    return "parameters" in text, text.startswith("configuration")


def try_eagerly(network: Network, most_parameters: int = 30_000_000) -> None:
    """One step of a plain loop. Raises NotBuilt (or NotRun) where that is impossible."""
    try:
        seeded(0)
        module = network.make().train()
        count = sum(parameter.numel() for parameter in module.parameters())
        if count > most_parameters:
            raise NotBuilt(f"{count:,} parameters")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise NotBuilt("no trained parameters")
        loss = loss_of(network, module, network.batch())
        if loss.numel() != 1 or not loss.requires_grad:
            raise NotBuilt("no loss to train with")
        loss.backward()
        torch.optim.AdamW(module.parameters(), lr=1e-3).step()
    except NotBuilt:
        raise
    except Exception as error:
        kind = NotRun if cannot_run_here(error) else NotBuilt
        raise kind(reason_of(error)) from error
