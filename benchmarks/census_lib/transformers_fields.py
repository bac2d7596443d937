"""What the names of fields do not tell: model types of transformers whose configurations need some of their own."""

from __future__ import annotations

from typing import Any

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "image_size": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "wav2vec2-bert": {"vocab_size": 128},
    "mimi": {"num_filters": 8, "hidden_size": 32, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16},
    "xlnet": {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "n_layer": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "autoformer": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 1},
    "informer": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 1},
    "time_series_transformer": {
        "prediction_length": 8,
        "context_length": 16,
        "lags_sequence": [1, 2, 3],
        "num_time_features": 1,
    },
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "granite_speech5_ctc": {"context_size": 16, "encoder_config": {"context_size": 16}},
    "reformer": {"axial_pos_embds": False},
    "pvt": {"image_size": 64},
    "tvp": {"max_img_size": 56},
    "moshi": {"num_codebooks": 4},
    "mgp-str": {"image_size": [32, 64]},
    "perceiver": {"d_latents": 32, "d_model": 32, "num_latents": 8, "max_position_embeddings": 64},
}
"""Fields of model types whose names say too little."""

COMPOSED: dict[str, str] = {
    "timm_backbone": "a wrapper of timm's models; no default names one",
    "timm_wrapper": "a wrapper of timm's models; no default names one",
    "rag": "a retriever with an index and two models; no default names them",
}
"""Model types that have no network of their own."""
