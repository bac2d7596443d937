"""Tiny configurations of transformers' models, made of the default ones by what fields are called.

Widths are divided by one number, so that the relations between them hold (hidden size = heads x head size, the width of
a projector = that of the encoder); depths, vocabularies, positions, pictures and experts get numbers of their own.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY, POSITIONS, PIXELS, LAYERS = 128, 64, 56, 2
SPECIAL = 100
"""Special tokens are numbered from here on; plain ones stay below."""

DIVISORS = (16, 8, 32, 4)
PLAIN = 0
"""In place of a divisor: every width becomes `WIDTH`."""
WIDTH = 32

WIDE = re.compile(
    r"hidden|dim|size|channel|n_embd|embed|d_model|d_ff|d_kv|d_inner|width|units|rank|ffn|intermediate|proj|feature|lru"
)
NARROW = re.compile(
    r"vocab|image|img|patch|window|kernel|position|max_|min_|batch|chunk|codebook_size|grid|pool|stride|token|resolution"
    r"|crop|pretrain|mask_size|context|block_size|segment|input_size|state_size|d_state|num_|group|tubelet|_act|rate"
    r"|feat_per|n_mels|mel_dim|feature_size|frame|layers|sample|step_rank|quant|theta|factor|divisible|multiple|dims$|_dim_max"
)
LISTED = re.compile(r"dims?$|channels?$|hidden_sizes|embed|widths?$|units|conv_dim|feature_dims|embds|_sizes$")
DEPTH = re.compile(r"(^|_)(num_)?(hidden_)?layers?$|^depth$|^n_layers?$|num_blocks$|_blocks$|^layers$|_depth$")
NOT_DEPTH = re.compile(r"max_window|shared|dense|first|skip|feature|mtp|nextn|ahead|back|conv|feat|adapter|max_depth")
EXPERTS = re.compile(r"(num|n)_?(routed|local|moe)?_?experts$|moe_num_experts$|^num_experts$|n_routed_experts")
CHOSEN = re.compile(r"experts_per_tok(en)?$|moe_topk?$|top_k_experts|moe_k$|experts_per_token|num_selected_experts")
POSITIONAL = re.compile(
    r"position_embeddings$|n_positions|_positions$|^n_ctx$|context_length|max_seq(uence)?_len|^seq_len"
)
PICTURE = re.compile(
    r"image_size$|img_size$|^image_resolution$|^resolution$|input_resolution|^crop_size|pretrain_img_size"
)
TOKEN = re.compile(r"token_id$|token_index$|_id$|token_ids$|_tokens?$|_token_idx$")
INDEXES = re.compile(r"ind(ex|ice)e?s$|indexe?s$|idxs?$|_layers$|layer_ids$|hook_ids|block_ind|_blocks$|feature_layer$")
IMAGE_TOKEN = re.compile(r"^(image|video|audio)_token_(id|index)$")
STAGED = ("depths", "hidden_sizes", "stage_out_channels", "embed_dims", "stage_channels", "blocks_per_stage")
"""Lists that have an item for each stage of a pyramid."""
HEADED = (
    ("hidden_size", "num_attention_heads", "num_key_value_heads"),
    ("hidden_size", "num_heads", ""),
    ("d_model", "encoder_attention_heads", ""),
    ("d_model", "decoder_attention_heads", ""),
    ("d_model", "num_attention_heads", ""),
    ("embed_dim", "num_heads", ""),
    ("n_embd", "n_head", ""),
)
"""Fields of widths, of the heads that divide them, and of those that share keys and values."""
EXACT: dict[str, int] = {
    "num_queries": 8, "num_denoising": 4, "train_num_points": 64, "num_negatives": 8, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "num_codevectors_per_group": 8, "num_kv_shared_layers": 0, "n_group": 1,
    "num_group": 1, "num_expert_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "full_attention_interval": 2, "sliding_window_pattern": 2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "max_window_layers": 1, "num_dense_layers": 1, "num_nextn_predict_layers": 0, "window_size": 4, "num_hash": 2,
    "two_stage_num_proposals": 8, "sliding_window": 8, "attention_window": 8, "local_attention": 8,
    "mamba_chunk_size": 16, "chunk_size": 16, "num_detection_tokens": 8, "ngram_vocab_size_base": 200,
    "entity_vocab_size": 64, "encoder_hash_byte_group_vocab": 64, "attention_window_size": 8, "window": 8,
    "attention_chunk_size": 16, "num_query_tokens": 8, "num_object_labels": 16, "num_attr_labels": 16,
    "num_qa_labels": 16, "mem_len": 0, "num_latents": 8, "num_decoder_layers": 2, "n_mtp_modules": 0,
    "num_quantizers": 4, "num_embeddings": 64, "codebook_size": 64, "index_topk": 8,
}  # fmt: skip


def tiny(
    config_class: type,
    divisor: int,
    own: Mapping[str, Any],
    *,
    lists: bool = True,
    grouped: bool = False,
    sections: bool = False,
    mended: bool = False,
) -> Any:
    """A configuration of a class, its widths divided; `own` fields are given. `grouped`: heads share keys and values
    where a field says how many there are of them; `sections`: positions have time, height and width. `mended`: stages
    are all kept, with what looks at them, and tokens that stand for pictures have a number. Raises whatever the class
    raises."""
    fields = _with_neck(shrunken(_startable(config_class, own, mended), divisor, lists=lists, staged=mended))
    fields = _with_states(fields) if mended else fields
    fields = merged(_grouped(fields) if grouped else fields, own)
    return config_class(**_with_sections(fields, sections))


def _startable(config_class: Any, own: Mapping[str, Any], mended: bool) -> dict[str, Any]:
    """Fields of the default configuration, or of the one with `own` fields where there is no default."""
    try:
        fields = plain(config_class(), looked_at=mended)
    except Exception:
        if not own:
            raise
        fields = plain(config_class(**own), looked_at=mended)
    return _with_tokens(fields) if mended else fields


def _with_states(fields: dict[str, Any]) -> dict[str, Any]:
    """Heads of state spaces that make up their width."""
    found = {name: _with_states(value) if isinstance(value, dict) else value for name, value in fields.items()}
    hidden, times, heads = (found.get(name) for name in ("hidden_size", "mamba_expand", "mamba_n_heads"))
    if isinstance(hidden, int) and isinstance(times, int) and isinstance(heads, int):
        found.update(mamba_n_heads=4, mamba_d_head=hidden * times // 4)
    return found


def _with_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    """Special tokens for pictures, which some defaults leave out."""
    found = {name: _with_tokens(value) if isinstance(value, dict) else value for name, value in fields.items()}
    for name, value in found.items():
        if value is None and IMAGE_TOKEN.search(name):
            found[name] = VOCABULARY - 1
    return found


def merged(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields, those of configurations within too, replaced by one's own."""
    found = dict(fields)
    for name, value in own.items():
        old = found.get(name)
        nested = isinstance(value, dict) and isinstance(old, dict) and "model_type" in old
        found[name] = merged(old, value) if nested and isinstance(old, dict) else value
    return found


def _with_neck(fields: dict[str, Any]) -> dict[str, Any]:
    """As many layers of a backbone as the neck above it takes results."""
    sizes, backbone = fields.get("neck_hidden_sizes"), fields.get("backbone_config")
    if not isinstance(sizes, (list, tuple)) or not isinstance(backbone, dict) or "num_hidden_layers" not in backbone:
        return fields
    kept = {name: value for name, value in backbone.items() if name not in ("stage_names", "out_features")}
    count = len(sizes)
    return {**fields, "backbone_config": {**kept, "num_hidden_layers": count, "out_indices": [*range(1, count + 1)]}}


def _grouped(fields: dict[str, Any]) -> dict[str, Any]:
    found = {name: _grouped(value) if isinstance(value, dict) else value for name, value in fields.items()}
    heads = found.get("num_attention_heads")
    if isinstance(heads, int) and heads % 2 == 0 and found.get("num_key_value_heads", 0) in (heads, None):
        found["num_key_value_heads"] = heads // 2
    return found


def _with_sections(fields: dict[str, Any], everywhere: bool) -> dict[str, Any]:
    found = {
        name: _with_sections(value, everywhere) if isinstance(value, dict) else value for name, value in fields.items()
    }
    heads, hidden, rope = found.get("num_attention_heads"), found.get("hidden_size"), found.get("rope_parameters")
    if (
        isinstance(heads, int)
        and isinstance(hidden, int)
        and isinstance(rope, dict)
        and (everywhere or "mrope_section" in rope)
    ):
        head = found.get("head_dim") or hidden // heads
        half = int(head * (rope.get("partial_rotary_factor") or found.get("partial_rotary_factor") or 1.0)) // 2
        third = half // 3
        found["rope_parameters"] = {**rope, "mrope_section": [half - 2 * third, third, third]}
    return found


NOISE = ("transformers_version", "architectures", "torch_dtype", "dtype", "ignore_keys_at_rope_validation")


def plain(config: Any, *, looked_at: bool = False) -> dict[str, Any]:
    """Fields and their values, those of configurations within too, without what is only noise in a constructor."""
    found = {}
    for name, value in copy.deepcopy(vars(config)).items():
        if name.startswith("_") or name in NOISE:
            continue
        found[name] = (
            {**plain(value, looked_at=looked_at), "model_type": value.model_type}
            if hasattr(value, "model_type")
            else value
        )
    if looked_at and getattr(config, "_out_indices", None):
        found["out_indices"] = list(config.out_indices)
    return found


def shrunken(
    fields: dict[str, Any],
    divisor: int,
    *,
    lists: bool = True,
    ids: Iterator[int] | None = None,
    staged: bool = False,
) -> Any:
    """Fields with smaller numbers. `staged`: where lists tell of stages, what is as long as they are stays so."""
    ids = iter(range(SPECIAL, VOCABULARY)) if ids is None else ids
    depths = [value for name, value in fields.items() if _is_depth(name, value)]
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or fields.get("block_types") or ()
    keep = _first_of_each(kinds) if isinstance(kinds, (list, tuple)) and len(kinds) in depths else list(range(LAYERS))
    looked_at = fields.get("out_indices")
    if isinstance(looked_at, (list, tuple)) and depths and max(depths) > len(looked_at) > len(keep):
        keep = list(range(len(looked_at)))  # a neck takes the results of so many layers
    stages = [len(fields[each]) for each in STAGED if staged and isinstance(fields.get(each), (list, tuple))]
    found = {}
    for name, value in fields.items():
        if stages and (name.startswith(("out_", "stage_names")) or (_is_depth(name, value) and value == stages[0])):
            found[name] = value
        elif isinstance(value, dict) and "model_type" in value:
            found[name] = shrunken(value, divisor, lists=lists, ids=ids, staged=staged)
        elif isinstance(value, (list, tuple)) and len(value) in depths and len(value) > len(keep) and _by_layer(name):
            found[name] = [value[index] for index in keep]
        elif isinstance(value, (list, tuple)):
            found[name] = _shorter(name, value, divisor, len(keep), ids) if lists else value
        elif _is_depth(name, value):
            found[name] = min(value, len(keep))
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = _number(name, value, divisor, ids)
        else:
            found[name] = value
    _pictures(found)
    _fit_heads(found)
    return found


def _fit_heads(fields: dict[str, Any]) -> None:
    """As many heads as divide the width; their size where the configuration leaves that to the model."""
    for width, heads, shared in HEADED:
        hidden, count = fields.get(width), fields.get(heads)
        if not isinstance(hidden, int) or not isinstance(count, int) or count < 1 or isinstance(count, bool):
            continue
        if not fields.get("head_dim") and hidden % count:
            fields[heads] = count = math.gcd(hidden, count)
            if isinstance(fields.get(shared), int):
                fields[shared] = math.gcd(fields[shared], count)
        if shared in fields and fields[shared] is None:
            fields[shared] = count
        if "head_dim" in fields and fields["head_dim"] is None:
            fields["head_dim"] = hidden // count


def _by_layer(name: str) -> bool:
    """Whether a list has an item for each layer, not for each stage of a pyramid."""
    return not re.search(
        r"stage|upsample|sizes|channels|strides|heads$|kernel|ratios|depths|embed|dims|factors|levels|feat", name
    )


def _is_depth(name: str, value: object) -> bool:
    counts = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return counts and bool(DEPTH.search(name)) and not NOT_DEPTH.search(name)


def _first_of_each(kinds: Any) -> list[int]:
    firsts = {str(kind): index for index, kind in reversed(list(enumerate(kinds)))}
    keep = sorted(firsts.values())
    return keep if len(keep) >= LAYERS else list(range(LAYERS))


def _number(name: str, value: int, divisor: int, ids: Iterator[int]) -> int:
    if name in EXACT:
        return min(value, EXACT[name])
    if CHOSEN.search(name):
        return min(value, 2)
    if TOKEN.search(name):
        return value if value < 0 or value < SPECIAL - 10 else next(ids, SPECIAL - 1)
    if EXPERTS.search(name):
        return min(value, 4)
    if "vocab" in name:
        return min(value, VOCABULARY)
    if POSITIONAL.search(name):
        return min(value, POSITIONS)
    if value >= 32 and WIDE.search(name) and not NARROW.search(name):
        return _divided(value, divisor)
    return value


def _divided(value: int, divisor: int) -> int:
    return WIDTH if divisor == PLAIN else max(2, value // divisor)


def _shorter(name: str, value: Any, divisor: int, layers: int, ids: Iterator[int]) -> Any:
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    if not value or not whole:
        return value
    if TOKEN.search(name):
        return [_number(name, each, divisor, ids) for each in value]
    if name in ("depths", "num_block_repeats", "blocks_per_stage", "stage_numb_of_layers", "layers", "block_sizes"):
        return [1 for _ in value]
    if INDEXES.search(name) and not re.search(r"stage|proj_layers", name) and max(value) >= layers:
        first = max(0, layers - len(value))  # as many as there were, where there are so many layers
        return [*range(first, layers)]
    if LISTED.search(name) and not re.search(r"kernel|patch|window|image|pool|stride|block_sizes", name):
        return [_divided(each, min(divisor or 8, 8)) if each >= 64 else each for each in value]
    return value


def _pictures(fields: dict[str, Any]) -> None:
    """Pictures of a few patches."""
    patch = fields.get("patch_size", fields.get("patch_sizes"))
    patch = max(patch) if isinstance(patch, (list, tuple)) and patch and isinstance(patch[0], int) else patch
    patch = patch if isinstance(patch, int) and patch > 0 else 8
    size = patch * max(4, math.ceil(PIXELS / patch))
    for name, value in fields.items():
        if not PICTURE.search(name):
            continue
        if isinstance(value, int) and value > size:
            fields[name] = size
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, int) for each in value):
            fields[name] = [min(size, each) for each in value]
        elif isinstance(value, Mapping):
            fields[name] = {key: min(size, each) if isinstance(each, int) else each for key, each in value.items()}
