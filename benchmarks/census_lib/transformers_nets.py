"""One network of every family of transformers, from configurations alone: the head that suits its kind of model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.census_lib.network import (
    Batch,
    Network,
    NotBuilt,
    NotRun,
    cannot_run_here,
    reason_of,
    squares,
    told_late,
    try_eagerly,
)
from benchmarks.census_lib.shrink import DIVISORS, PLAIN, plain, tiny
from benchmarks.census_lib.transformers_fields import COMPOSED, EXCEPTIONS
from benchmarks.census_lib.transformers_inputs import ROWS, Draw, combinations, drawers, labels, remedies

HEADS = (
    "MASKED_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MULTIMODAL_LM", "CTC",
    "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION",
    "OBJECT_DETECTION", "DEPTH_ESTIMATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "MASKED_IMAGE_MODELING",
    "AUDIO_CLASSIFICATION", "AUDIO_XVECTOR", "RNNT", "TDT", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM",
    "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "POSE_ESTIMATION", "IMAGE_TO_IMAGE", "IMAGE_MATTING", "MASK_GENERATION",
    "ZERO_SHOT_OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "TIME_SERIES_PREDICTION",
    "DOCUMENT_QUESTION_ANSWERING", "TEXT_RECOGNITION", "TABLE_RECOGNITION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "VISUAL_QUESTION_ANSWERING", "RETRIEVAL", "PRETRAINING",
)  # fmt: skip
"""What AutoModelFor* can be asked for, the most telling first; the bare model comes last."""

FEW, MOST = 4_000_000, 30_000_000
"""Parameters: wanted, and taken where nothing smaller runs."""
MOST_REMEDIES = 3
"""For one set of inputs."""
MOST_SECONDS = 40.0
"""Of processor time, to try configurations of one kind of head."""
SHARED = (
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
)
"""Loaded once, before processes are split off."""


def families() -> list[str]:
    """Model types: in every package those with a head of their own, else its bare model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    packages = defaultdict(list)
    for kind in CONFIG_MAPPING_NAMES:
        packages[model_type_to_module_name(kind)].append(kind)
    found = set()
    for package, kinds in packages.items():
        headed = [kind for kind in kinds if len(heads(kind)) > 1]
        found |= set(headed or sorted(kinds, key=lambda kind: (not heads(kind), kind != package, len(kind)))[:1])
    return sorted(found)


def heads(kind: str) -> list[str]:
    """The mappings that have a model type, the bare model's last."""
    from transformers.models.auto import modeling_auto

    names = [*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS), "MODEL_MAPPING_NAMES"]
    found = [name for name in names if kind in getattr(modeling_auto, name, {})]
    return found or [name for name in ("MODEL_FOR_BACKBONE_MAPPING_NAMES",) if kind in getattr(modeling_auto, name, {})]


def _class(kind: str, mapping: str) -> type:
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, mapping)[kind]
    return getattr(transformers, name[0] if isinstance(name, (tuple, list)) else name)


@dataclass(frozen=True)
class _Made:
    """A module from a class and a configuration; the configuration is made anew each time, since models change it."""

    model: type
    config: Callable[[], Any]

    def __call__(self) -> nn.Module:
        config = self.config()
        for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
            if hasattr(part, "use_cache"):
                part.use_cache = False
            if getattr(part, "decoder_start_token_id", 0) is None:
                part.decoder_start_token_id = 0
        return self.model(config)


@dataclass(frozen=True)
class _Drawn:
    draws: tuple[tuple[str, Draw], ...]

    def __call__(self) -> Batch:
        return {name: draw() for name, draw in self.draws}


def network(kind: str) -> Network:
    """Raises NotBuilt, or NotRun where what stands in the way is this machine."""
    if kind in COMPOSED:
        raise NotRun(COMPOSED[kind])
    if not heads(kind):
        raise NotRun("a configuration without a model that could be asked for by its type")
    reasons: list[NotBuilt] = []
    for mapping in heads(kind)[:4]:
        try:
            model = _class(kind, mapping)
        except Exception as error:  # noqa: BLE001  (imports raise anything)
            reasons.append((NotRun if cannot_run_here(error) else NotBuilt)(reason_of(error)))
            continue
        large = []
        for config in _configurations(kind, model):
            if time.process_time() > MOST_SECONDS:
                break
            try:
                return _running(_Made(model, config), mapping, FEW)
            except NotRun:
                raise
            except NotBuilt as error:
                reasons.append(error)
                if "parameters" in str(error):
                    large.append(config)
        for config in large:
            if time.process_time() > MOST_SECONDS:
                break
            try:
                return _running(_Made(model, config), mapping, MOST)
            except NotBuilt as error:
                reasons.append(error)
    raise min(reasons, key=told_late) if reasons else NotBuilt("no class")


def _configurations(kind: str, model: Any) -> Iterator[Callable[[], Any]]:
    config, own = model.config_class, EXCEPTIONS.get(kind, {})
    seen = []
    for options in (
        {"grouped": True},
        {"grouped": True, "sections": True},
        {"mended": True},
        *({"divisor": divisor} for divisor in DIVISORS),
        {"divisor": PLAIN},
        {"divisor": 32, "mended": True},
        {"divisor": PLAIN, "mended": True},
        {"lists": False},
        {"divisor": 1, "lists": False},
    ):
        make = partial(tiny, config, **{"divisor": DIVISORS[0], "own": own, **options})
        try:
            fields = plain(make())
        except Exception:  # noqa: BLE001  (said when the model is made)
            fields = None
        if fields is None or fields not in seen:
            seen.append(fields)
            yield make


def _running(make: _Made, mapping: str, most: int) -> Network:
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:
        kind = NotRun if cannot_run_here(error) else NotBuilt
        raise kind(f"configuration: {reason_of(error)}") from error
    count = sum(each.numel() for each in module.parameters())
    if count > most:
        raise NotBuilt(f"{count:,} parameters")
    first: NotBuilt | None = None
    for names in combinations(module):
        try:
            return _mended(make, module, mapping, names, {})
        except NotRun:
            raise
        except NotBuilt as error:
            first = first or error
    raise first or NotBuilt("no inputs")


def _mended(make: _Made, module: Any, mapping: str, names: tuple[str, ...], how: dict[str, Any]) -> Network:
    """With such inputs, or with what the error asks for; raises what was said to the inputs as they are."""
    try:
        return _with(make, module, mapping, names, **how)
    except NotRun:
        raise
    except NotBuilt as error:
        if len(how) < MOST_REMEDIES:
            for more, other in remedies(str(error), names, module):
                if more == names and other.keys() <= how.keys():
                    continue
                with suppress(NotBuilt):
                    return _mended(make, module, mapping, more, {**how, **other})
        raise


def _with(make: _Made, module: Any, mapping: str, names: tuple[str, ...], *, images: int = 0, **how: Any) -> Network:
    """A network on such inputs, with labels if it takes them; raises NotBuilt where eager does not run it."""
    how.pop("asked", None)
    known = drawers(module, images=images, **how)
    if any(name not in known for name in names):
        raise NotBuilt(f"inputs {', '.join(names)}")
    draws = tuple((name, known[name]) for name in names)
    what = f"{type(module).__name__}({', '.join(names)})"
    answers = labels(mapping, module.config)
    if answers is not None:
        if images:
            plain = answers
            answers = lambda: torch.cat([torch.full((ROWS, images), -100), plain()], dim=1)  # noqa: E731
        labelled = Network(f"{what} with labels", make, _Drawn((*draws, ("labels", answers))), None)
        try:
            try_eagerly(labelled)
        except NotBuilt:
            pass
        else:
            return labelled
    found = Network(what, make, _Drawn(draws), squares)
    try_eagerly(found)
    return found
