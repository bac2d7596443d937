"""Networks of diffusers (U-Nets, transformers, autoencoders, control nets), one of every class that a network is.

Constructors' defaults are made small by what their arguments are called; inputs are made by what forward takes. What
wants more than that (positions of packed frames, several modalities) is listed as not built.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.census_lib.network import Batch, Network, NotBuilt, reason_of, squares, told_late, try_eagerly

SHARED = ("diffusers", "diffusers.models.unets.unet_2d_condition", "diffusers.models.transformers.transformer_flux")
"""Loaded once, before processes are split off."""

ROWS, WORDS, SIDE, FRAMES, WIDTH, HEADS, HEAD = 2, 8, 16, 5, 32, 2, 16
MOST_PARAMETERS = 30_000_000

EXACT: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 1, "num_refiner_layers": 1, "num_attention_heads": HEADS,
    "attention_head_dim": HEAD, "num_key_value_heads": HEADS, "num_kv_heads": HEADS, "norm_num_groups": 8,
    "layers_per_block": 1, "sample_size": SIDE, "depth": 2, "num_double_layers": 1, "n_layers": 1, "num_heads": HEADS,
    "sample_height": SIDE, "sample_width": SIDE, "sample_frames": FRAMES, "num_cross_attention_heads": HEADS,
    "cross_attention_head_dim": HEAD, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "num_dit_layers": 2,
    "pos_embed_max_size": SIDE, "latent_channels": 4, "n_refiner_layers": 1, "encoder_num_layers": 1,
    "decoder_num_layers": 1, "num_encoder_blocks": 1, "num_decoder_blocks": 1, "num_blocks": 1, "vocab_size": 64,
}  # fmt: skip
WIDE = re.compile(r"dim|channels|hidden|width|ffn|inner|embed|size|features|feat")
KEPT = re.compile(
    r"^in_channels|^out_channels|patch|sample_rate|kernel|position|seq_len|max_|freq_dim|num_|stride|scale"
)


def families() -> list[str]:
    import diffusers

    found = []
    for name in dir(diffusers):
        each = getattr(diffusers, name, None)
        if (
            inspect.isclass(each)
            and issubclass(each, diffusers.ModelMixin)
            and not name.startswith(("ModelMixin", "Multi"))
        ):
            found.append(name)
    return sorted(found)


def network(name: str) -> Network:
    import diffusers

    kind = getattr(diffusers, name)
    reasons: list[NotBuilt] = []
    for keywords in _arguments(kind):
        try:
            with torch.device("meta"):
                module = kind(**keywords)
        except Exception as error:  # noqa: BLE001  (constructors raise anything)
            reasons.append(NotBuilt(f"configuration: {reason_of(error)}"))
            continue
        count = sum(each.numel() for each in module.parameters())
        if count > MOST_PARAMETERS:
            reasons.append(NotBuilt(f"{count:,} parameters"))
            continue
        for drawn in _inputs(module):
            found = Network(f"{name}({', '.join(drawn.names)})", partial(kind, **keywords), drawn, _loss)
            try:
                try_eagerly(found)
            except NotBuilt as error:
                reasons.append(error)
            else:
                return found
    raise min(reasons, key=told_late) if reasons else NotBuilt("no arguments")


def _loss(output: Any, *_targets: Tensor) -> Tensor:
    return squares(
        dict(output)
        if hasattr(output, "items")
        else vars(output)
        if hasattr(output, "__dict__") and not isinstance(output, (Tensor, tuple))
        else output
    )


def _arguments(kind: Any) -> Iterator[dict[str, Any]]:
    signature = inspect.signature(kind.__init__).parameters
    plain = {name: each.default for name, each in signature.items() if each.default is not inspect.Parameter.empty}
    small = {name: _small(name, value) for name, value in plain.items()}
    yield small
    yield {name: value for name, value in small.items() if not isinstance(value, (tuple, list))}
    yield {name: value for name, value in small.items() if name in EXACT}
    yield {}


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if name in EXACT:
            return min(value, EXACT[name]) if name != "attention_head_dim" or value > HEAD else value
        if re.search(r"(num|n)_.*layers$|_layers$|_depth$", name):
            return min(value, 1)
        if value >= 64 and WIDE.search(name) and not KEPT.search(name):
            return WIDTH
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(each, int) for each in value):
        if re.search(r"axes|rope", name) and len(value) == 3 and sum(value) > HEAD:
            return type(value)((4, 6, 6))
        if re.search(r"block_out_channels|block_channels|_dims?$|channels$", name):
            return type(value)(16 * 2 ** min(index, 1) if each > WIDTH else each for index, each in enumerate(value))
        if re.search(r"layers_per_block|num_layers|depth", name):
            return type(value)(1 for _ in value)
    return value


@dataclass(frozen=True)
class _Drawn:
    """Draws the inputs called `names`, those with several possible forms in the forms chosen."""

    config: Any
    names: tuple[str, ...]
    form: str
    whole: bool
    """Whether time steps are whole numbers."""

    def __call__(self) -> Batch:
        return {name: self._tensor(name) for name in self.names}

    def _field(self, *names: str, default: int = WIDTH) -> int:
        for name in names:
            value = self.config.get(name)
            value = value[0] if isinstance(value, (tuple, list)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def _tensor(self, name: str) -> Tensor:
        if name in ("sample", "hidden_states", "x", "latents", "controlnet_cond"):
            return self._picture(
                3 if name == "controlnet_cond" else self._field("in_channels", "out_channels", default=4)
            )
        if name in ("timestep", "t", "timestep_r", "r_timestep"):
            return torch.randint(1, 1000, (ROWS,)) if self.whole else torch.rand(ROWS) * 1000
        if name == "pooled_projections":
            return torch.randn(ROWS, self._field("pooled_projection_dim"))
        if name == "guidance":
            return torch.rand(ROWS)
        if name == "img_ids":
            return _grid(SIDE * SIDE if self.form == "packed" else SIDE)
        if name == "txt_ids":
            return torch.zeros(WORDS, 3)
        if name == "class_labels":
            return torch.randint(0, 10, (ROWS,))
        if name.endswith("mask"):
            return torch.ones(ROWS, WORDS, dtype=torch.long)
        if name == "proj_embedding":
            return torch.randn(ROWS, self._field("embedding_dim"))
        if name == "input_ids":
            return torch.randint(0, 32, (ROWS, SIDE, SIDE))
        if name == "conditioning_scale":
            return torch.ones(())
        width = self._field(
            "cross_attention_dim", "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim",
            "caption_dim", "encoder_hid_dim", "cap_feat_dim", "caption_projection_dim", "in_channels_t",
            "context_in_dim", "text_hidden_dim",
        )  # fmt: skip
        return torch.randn(ROWS, WORDS, width)

    def _picture(self, channels: int) -> Tensor:
        shapes: dict[str, tuple[int, ...]] = {
            "picture": (ROWS, channels, SIDE, SIDE), "video": (ROWS, channels, FRAMES, SIDE, SIDE),
            "frames": (ROWS, FRAMES, channels, SIDE, SIDE), "packed": (ROWS, SIDE * SIDE, channels),
            "sound": (ROWS, channels, 256), "rows": (ROWS, 64, channels), "large": (ROWS, channels, 64, 64),
        }  # fmt: skip
        return torch.randn(shapes[self.form])


def _grid(count: int) -> Tensor:
    side = int(count**0.5)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([torch.zeros(side * side), rows.flatten().float(), columns.flatten().float()], dim=1)


WANTED = ("encoder_hidden_states", "timestep", "pooled_projections", "img_ids", "txt_ids", "proj_embedding")


def _inputs(module: nn.Module) -> Iterator[_Drawn]:
    signature = inspect.signature(module.forward).parameters
    needed = [
        name
        for name, each in signature.items()
        if each.default is inspect.Parameter.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    usual = [name for name in signature if name in needed or name in WANTED]
    forms = ("video", "frames") if "3D" in type(module).__name__ or "Video" in type(module).__name__ else ()
    forms = tuple(dict.fromkeys((*forms, "picture", "packed", "video", "frames", "sound", "rows", "large")))
    for form, names, whole in itertools.product(forms, dict.fromkeys((tuple(usual), tuple(needed))), (True, False)):
        yield _Drawn(dict(module.config), names, form, whole)  # type: ignore[attr-defined]
