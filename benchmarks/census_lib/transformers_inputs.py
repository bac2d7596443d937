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


def drawers(
    module: Any,
    *,
    images: int = 0,
    in_time: bool = False,
    size: int = 0,
    mels_first: bool = False,
    channel: bool = False,
    pairs: bool = False,
    spectra: bool = False,
) -> dict[str, Draw]:
    """How to draw each input that may be given. `images`: tokens of each row that stand for its picture; `in_time`:
    pictures follow each other in a film; `mels_first`: features come before time; `channel`: sounds have a channel, or
    are `spectra`; `pairs`: pictures come in twos."""
    config = module.config
    size = size or _whole(field(config, "image_size", "img_size", "image_resolution", "crop_size"), 64)
    channels = _whole(field(config, "num_channels", "in_channels", "in_chans"), 3)
    channels = channels if channels in (1, 2, 3, 4) else 3
    frames = _whole(field(config, "num_frames", "frames_per_clip", "max_num_frames"), 4)
    frames = 2 if pairs else frames
    in_time = in_time or pairs
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
    mel_first = (
        mels_first or "whisper" in type(module).__name__.lower() or "Whisper" in str(inspect.getmro(type(module)))
    )
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
        "input_values": lambda: (
            torch.randn(ROWS, _whole(field(config, "max_length"), FRAMES), _whole(field(config, "num_mel_bins"), 80))
            if spectra
            else torch.randn(ROWS, *((1,) if channel else ()), SAMPLES)
        ),
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
        **_series(config),
        **_spoken(config, count),
        **_decisions(config),
        "decoder_input_values": lambda: torch.randn(ROWS, WORDS, mels),
        "mm_token_type_ids": lambda: torch.zeros(ROWS, count, dtype=torch.long),
        "token_type_ids": lambda: torch.zeros(ROWS, count, dtype=torch.long),
        "image_embeds_position_mask": lambda: (
            torch.arange(count).expand(ROWS, -1) < _whole(field(config, "latent_query_num"), 8)
        ),
        "visual_feats": lambda: torch.randn(ROWS, 4, _whole(field(config, "visual_feat_dim"), 2048)),
        "visual_pos": lambda: torch.rand(ROWS, 4, 4),
        "input_points": lambda: torch.rand(ROWS, 1, 2, 2) * size,
        "prompt_pixel_values": lambda: torch.randn(ROWS, channels, size, size),
        "prompt_masks": lambda: torch.randn(ROWS, channels, size, size),
        "inputs": lambda: torch.randint(*PLAIN_IDS, (ROWS, 64)),
        "inputs_embeds": lambda: torch.randn(ROWS, WORDS, _whole(field(config, "hidden_size", "d_model"), 32)),
    }


def _series(config: Any) -> dict[str, Draw]:
    """Of models that go on with series of numbers."""
    context, ahead = (_whole(getattr(config, name, None), 16) for name in ("context_length", "prediction_length"))
    lags = getattr(config, "lags_sequence", None)
    past = context + (max(lags) if isinstance(lags, (list, tuple)) and lags else 0)
    channels, features = getattr(config, "num_input_channels", 0), getattr(config, "num_time_features", 0)
    single = not channels and getattr(config, "input_size", 1) == 1
    wide = () if single else (channels or _whole(config.input_size, 1),)
    return {
        "past_values": lambda: torch.randn(ROWS, past, *wide),
        "past_observed_mask": lambda: torch.ones(ROWS, past, *wide),
        "past_time_features": lambda: torch.randn(ROWS, past, features),
        "future_values": lambda: torch.randn(ROWS, ahead, *wide),
        "future_time_features": lambda: torch.randn(ROWS, ahead, features),
    }


def _spoken(config: Any, count: int) -> dict[str, Draw]:
    """What a model that speaks is told of each sound; every sound lasts one frame."""
    mels = _whole(field(config, "num_mel_bins"), 80)
    return {
        "duration_labels": lambda: torch.ones(ROWS, count, dtype=torch.long),
        "pitch_labels": lambda: torch.randn(ROWS, count, 1),
        "energy_labels": lambda: torch.randn(ROWS, count, 1),
        "spectrogram_labels": lambda: torch.randn(ROWS, count, mels),
    }


def _decisions(config: Any) -> dict[str, Draw]:
    states, acts = (_whole(getattr(config, name, None), 4) for name in ("state_dim", "act_dim"))
    return {
        "states": lambda: torch.randn(ROWS, 8, states),
        "actions": lambda: torch.randn(ROWS, 8, acts),
        "rewards": lambda: torch.randn(ROWS, 8, 1),
        "returns_to_go": lambda: torch.randn(ROWS, 8, 1),
        "timesteps": lambda: torch.arange(8).expand(ROWS, -1),
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


LARGE = 224
"""Pixels, for what shrinks pictures many times."""
TOGETHER = {
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
    "past_values": ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
}
"""Inputs that only make sense with others, as far as a forward takes those."""


def remedies(text: str, names: tuple[str, ...], module: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Other inputs, or inputs drawn otherwise, that an error of eager asks for."""
    pictures, sounds = "pixel_values" in names, "input_features" in names
    if pictures and re.search(r"too small|larger than|greater than actual|out of range|must match the size", text):
        yield names, {"size": LARGE}
    if pictures and re.search(r"expected 5, got 4|dimension.{0,40}expected.{0,10}5|5D", text):
        yield names, {"pairs" if "2, num_channels" in text else "in_time": True}
    wanted = re.search(r"tokens?:? ?\D{0,12}(\d+),? (?:image )?features:?\D{0,12}(\d+)", text)
    if wanted:
        yield names, {"images": -(-int(wanted[2]) // ROWS)}
    if sounds and re.search(r"expected input\[.*to have \d+ channels", text):
        yield names, {"mels_first": True}
    if "input_values" in names and re.search(
        r"expected input\[.*to have 1 channels|expected 3, got 2|mono|unpack", text
    ):
        yield names, {"channel": True}
    if "input_values" in names and "Dimension out of range" in text:
        yield names, {"spectra": True}
    known, signature = drawers(module), inspect.signature(module.forward).parameters
    said = {each for each in re.findall(r"\w+", text) if each in signature}
    if "ll labels" in text:
        said |= {each for each in signature if each.endswith("_labels")}
    more = tuple(sorted(each for each in said if each in known and each not in names))
    if more:
        yield (*names, *more), {"asked": len(names)}


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
        also = [each for name in (*needed, *names) for each in TOGETHER.get(name, ()) if each in signature]
        whole = tuple(dict.fromkeys((*needed, *names, *also, *(extra if "input_ids" in names else ()))))
        if whole not in seen and all(name in signature for name in whole):
            seen.add(whole)
            yield whole
