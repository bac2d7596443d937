"""Batches for transformers' models, by what their forward takes and what their configuration says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ROWS, WORDS, FRAMES, SAMPLES = 2, 24, 64, 4000
PLAIN_IDS = (10, 90)
"""Ids of tokens without a meaning of their own."""

Draw = Callable[[], Tensor]


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those within it."""
    yield config
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and not name.startswith("_"):
            yield from parts(value)


def field(config: Any, *names: str) -> Any:
    """The first of such fields that the configuration, or one within it, has."""
    for part in parts(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _whole(value: Any, default: int) -> int:
    if isinstance(value, (list, tuple)):
        value = value[-1] if value and isinstance(value[-1], int) else default
    if isinstance(value, dict):
        value = value.get("height", default)
    return value if isinstance(value, int) else default


def words() -> Tensor:
    return torch.randint(*PLAIN_IDS, (ROWS, WORDS))


def drawers(module: Any, *, images: int = 0, in_time: bool = False, size: int = 0) -> dict[str, Draw]:
    """How to draw each input that may be given. `images`: tokens of each row that stand for its picture; `in_time`:
    pictures follow each other in a film."""
    config = module.config
    size = size or _whole(field(config, "image_size", "img_size", "image_resolution", "crop_size"), 64)
    channels = _whole(field(config, "num_channels", "in_channels", "in_chans"), 3)
    channels = channels if channels in (1, 2, 3, 4) else 3
    frames = _whole(field(config, "num_frames", "frames_per_clip", "max_num_frames"), 4)
    mels = _whole(
        field(
            config,
            "feature_projection_input_dim",
            "num_mel_bins",
            "feature_size",
            "input_dim",
            "input_feat_per_channel",
            "n_mels",
        ),
        80,
    )
    longest = field(config, "max_source_positions")
    length = 2 * longest if isinstance(longest, int) else FRAMES
    mel_first = "whisper" in type(module).__name__.lower() or "Whisper" in str(inspect.getmro(type(module)))
    token = field(config, "image_token_id", "image_token_index")

    most = [part.max_position_embeddings for part in parts(config) if hasattr(part, "max_position_embeddings")]
    count = min([WORDS, *(each for each in most if isinstance(each, int) and each >= 8)])

    def ids() -> Tensor:
        found = words()[:, :count]
        if images and isinstance(token, int):
            found = torch.cat([torch.full((ROWS, images), token), found], dim=1)
        return found

    def boxes() -> Tensor:
        corner = torch.randint(0, 30, (ROWS, WORDS, 2))
        return torch.cat([corner, corner + torch.randint(1, 30, (ROWS, WORDS, 2))], dim=-1)

    return {
        "input_ids": ids,
        "decoder_input_ids": words,
        "pixel_values": lambda: torch.randn(ROWS, *((frames,) if in_time else ()), channels, size, size),
        "pixel_values_videos": lambda: torch.randn(ROWS, frames, channels, size, size),
        "clip": lambda: torch.randn(ROWS, frames, channels, size, size),
        "input_values": lambda: torch.randn(ROWS, SAMPLES),
        "input_features": lambda: torch.randn(ROWS, *((mels, length) if mel_first else (length, mels))),
        "spectrogram": lambda: torch.randn(ROWS, FRAMES, mels),
        "bbox": boxes,
        "attention_mask": lambda: torch.ones(ROWS, WORDS, dtype=torch.long),
        "qformer_input_ids": words,
        "task_inputs": words,
        "flattened_patches": lambda: torch.cat(
            [
                torch.ones(ROWS, WORDS, 2),
                torch.randn(ROWS, WORDS, _whole(field(config, "patch_embed_hidden_size"), 768)),
            ],
            dim=-1,
        ),
        "state": lambda: torch.randn(ROWS, _whole(field(config, "max_state_dim"), 32)),
        "inputs": lambda: torch.randint(*PLAIN_IDS, (ROWS, 64)),
        "inputs_embeds": lambda: torch.randn(ROWS, WORDS, _whole(field(config, "hidden_size", "d_model"), 32)),
    }


def labels(head: str, config: Any) -> Draw | None:
    """Labels as a head of this kind takes them; None where it takes none, or only what depends on data."""
    count = _whole(getattr(config, "num_labels", None), 2)
    size = _whole(field(config, "image_size"), 64)
    if re.search(r"CAUSAL_LM|MASKED_LM|SEQ_TO_SEQ|SPEECH_SEQ|IMAGE_TEXT|MULTIMODAL|VISION_2|PRETRAINING", head):
        return words
    if "SEMANTIC" in head or "IMAGE_SEGMENTATION" in head:
        return lambda: torch.randint(0, count, (ROWS, size, size))
    if "TOKEN_CLASS" in head or "FRAME_CLASS" in head:
        return lambda: torch.randint(0, count, (ROWS, WORDS))
    if "CTC" in head:
        return lambda: torch.randint(*PLAIN_IDS, (ROWS, 4))
    if re.search(r"CLASSIFICATION|XVECTOR", head) and "ZERO" not in head:
        return lambda: torch.randint(0, count, (ROWS,))
    return None


MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "pixel_values_videos", "spectrogram", "inputs")


def combinations(module: Any) -> Iterator[tuple[str, ...]]:
    """Sets of inputs worth trying, the best first."""
    signature = inspect.signature(module.forward).parameters
    needed = tuple(
        name
        for name, each in signature.items()
        if each.default is inspect.Parameter.empty and each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    main = module.main_input_name if isinstance(module.main_input_name, str) else "input_ids"
    taken = [name for name in MAIN if name in signature]
    extra = ("bbox",) if "bbox" in signature else ()
    tried = [(main,), ("input_ids", "pixel_values"), ("input_ids",), ("pixel_values",), *((name,) for name in taken)]
    tried.append(("input_features", "decoder_input_ids"))
    tried.append(("input_values", "decoder_input_ids"))
    tried.append(("input_ids", "decoder_input_ids"))
    tried.append(("input_ids", "input_features"))
    tried.append(("input_ids", "input_values"))
    seen = set()
    if "pixel_values" in taken and "input_ids" in taken and "image_grid_thw" not in signature:
        tried.insert(0, ("input_ids", "pixel_values"))
    for names in tried:
        whole = tuple(dict.fromkeys((*needed, *names, *(extra if "input_ids" in names else ()))))
        if whole not in seen and all(name in signature for name in whole):
            seen.add(whole)
            yield whole
