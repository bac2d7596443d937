"""`magis.checkpoint_policy`: eager's numbers, the predicted peak, what is refused, and the file."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from magis import MagisError, UsageError, checkpoint_policy
from magis.extensions.compile import RegionPolicies
from magis.extensions.compile.checkpointing.policy import LIBRARIES, REMAT, CheckpointedRegion
from magis.rewrite.realize import GENERATOR_BYTES
from magis.runtime.measure import window_peak


class Block(nn.Module):
    """A feed-forward layer, with a norm over the batch on request."""

    def __init__(self, width: int, *, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm: nn.Module = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks in a list, between two layers."""

    def __init__(self, depth: int = 3, width: int = 32, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width, norm=norm) for _ in range(depth))
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def made(*, norm: bool = False) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Net(norm=norm), (torch.randn(512, 32), torch.randn(512, 8))


def step(module: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients and buffers of one forward and backward, and the generator's state behind it."""
    torch.manual_seed(1)
    module.zero_grad(set_to_none=True)
    F.mse_loss(module(batch[0]), batch[1]).backward()
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return [*(each.clone() for each in found), *module.buffers(), torch.get_rng_state()]


def peak(module: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    module.zero_grad(set_to_none=True)
    held = sum(each.nbytes for each in (*module.parameters(), *module.buffers(), *batch))
    return held + window_peak(lambda: F.mse_loss(module(batch[0]), batch[1]).backward()).peak_bytes


@pytest.fixture(scope="module")
def planned() -> RegionPolicies:
    module, batch = made()
    return checkpoint_policy(module, batch, F.mse_loss, memory_ratio=0.8)


@pytest.mark.parametrize("norm", [False, True])
def test_numbers_are_eagers_and_the_peak_is_the_predicted_one(norm: bool) -> None:
    module, batch = made(norm=norm)
    twin = copy.deepcopy(module)
    policy = checkpoint_policy(module, batch, F.mse_loss, memory_ratio=0.75)
    assert peak(copy.deepcopy(module), batch) == policy.original_bytes
    assert policy.planned_bytes <= 0.75 * policy.original_bytes
    assert policy.latency_ratio > 1
    handle = policy.apply(module)
    for _ in range(2):  # statistics are updated once a step
        assert all(torch.equal(a, b) for a, b in zip(step(module, batch), step(twin, batch), strict=True))
    assert 0 <= policy.planned_bytes - peak(module, batch) <= GENERATOR_BYTES * len(policy.regions)
    handle.remove()
    assert not any("forward" in vars(each) for each in module.modules())


def test_a_context_fn_for_ones_own_calls(planned: RegionPolicies) -> None:
    module, batch = made()
    twin = copy.deepcopy(module)
    region = planned.regions[0]
    block = module.get_submodule(region.path)
    calls = []
    forward = block.forward

    def own(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return checkpoint(forward, x, use_reentrant=False, context_fn=planned.context_fn(region.path, block))  # type: ignore[no-any-return]

    block.forward = own  # type: ignore[method-assign]
    assert all(torch.equal(a, b) for a, b in zip(step(module, batch), step(twin, batch), strict=True))
    assert calls
    with pytest.raises(UsageError, match=r"'last' is no region of the policy.*layers\.0"):
        planned.context_fn("last", block)


def test_a_decoder_of_transformers_needs_its_cache_off() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.LlamaConfig(**sizes, vocab_size=200, bos_token_id=0, eos_token_id=1)
    module = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 200, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(UsageError, match=r"keep keys and values .*; set model\.config\.use_cache = False") as caught:
        checkpoint_policy(module, batch, memory_ratio=0.8)
    assert "\n" not in str(caught.value)
    module.config.use_cache = False
    twin = copy.deepcopy(module)
    policy = checkpoint_policy(module, batch, memory_ratio=0.8)
    assert policy.planned_bytes <= 0.8 * policy.original_bytes
    policy.apply(module)
    for each in (module, twin):
        each(**batch).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)  # noqa: TID251 (what users do)
    file.seek(0)
    return torch.load(file, weights_only=False)  # noqa: TID251


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "saved": saved_and_loaded,
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_a_module_under_a_policy_runs_its_own_weights_and_buffers(kind: str, library: str) -> None:
    if library == REMAT:
        pytest.importorskip("torch_remat")
    module, batch = made(norm=True)
    twin = copy.deepcopy(module)
    policy = RegionPolicies((CheckpointedRegion("layers.0"), CheckpointedRegion("layers.2")), 0, 0, 1.0, library)
    policy.apply(module)
    other = COPIES[kind](module)
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.zero_()
    module.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(step(other, batch), step(twin, batch), strict=True))
    assert all(each.grad is None for each in module.parameters())
    with torch.no_grad():
        assert torch.equal(other.eval()(batch[0]), twin.eval()(batch[0]))


class Remembering(nn.Module):
    """Reads a buffer and then changes it: a repetition would read what the first run left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.layer(x) - self.mean)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return out


def test_a_block_that_would_read_its_own_changes_stays_as_it_is() -> None:
    module = nn.Sequential(Remembering(), Remembering())
    with pytest.raises(UsageError, match="none of the blocks"):
        checkpoint_policy(module, (torch.randn(64, 8), torch.randn(64, 8)), F.mse_loss, memory_ratio=0.9)


def test_policies_are_kept_as_text(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    policy = RegionPolicies(
        (CheckpointedRegion("layers.0", frozenset({("aten.mm.default", 1)})), CheckpointedRegion("a")), 100, 80, 1.5
    )
    policy.save(path)
    assert RegionPolicies.load(path) == policy
    assert json.loads(path.read_text(encoding="utf-8"))["regions"][0]["saved"] == [["aten.mm.default", 1]]
    with pytest.raises(UsageError, match="does not have"):
        policy.apply(nn.Linear(2, 2))


GOOD: dict[str, Any] = {
    "format": "magis checkpoint policy", "version": 1, "original_bytes": 2, "planned_bytes": 1,
    "latency_ratio": 1.0, "regions": [{"path": "a", "saved": [["aten.mm.default", 0]]}],
}  # fmt: skip


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted(GOOD)), value=_JSON)
def test_any_other_content_is_refused_or_a_policy(tmp_path_factory: Any, key: str, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({**GOOD, key: value}), encoding="utf-8")
    try:
        found = RegionPolicies.load(path)
    except MagisError:
        return
    found.save(path)
    assert RegionPolicies.load(path) == found
