"""Small configurations of families of transformers: of each, what `model=hf` trains in tests and in docs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.scratch import scratch

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MASKED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BLOOM = {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 5},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "qwen2": {**_GROUPED, "use_sliding_window": False},
    "qwen3": _GROUPED,
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "num_experts": 4},
    "gemma2": {**_GROUPED, "sliding_window": 5},
    "gemma3_text": {**_GROUPED, "sliding_window": 5},
    "phi3": _GROUPED,
    "olmo2": _GROUPED,
    "deepseek_v3": {**_SIZES, **_EXPERTS, **_LATENT, "num_key_value_heads": 4},
    "gpt_neox": _SIZES,
    "opt": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "bloom": _BLOOM,
    "falcon": {**_SIZES, "alibi": False},
    "mamba2": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
               "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "bert": {**_SIZES, **_MASKED},
    "roberta": {**_SIZES, **_MASKED, "max_position_embeddings": 70, "pad_token_id": 1},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
            "image_size": 16, "patch_size": 4},
    "t5": {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}  # fmt: skip
_CLASSES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "vit": "ViTForImageClassification",
    "t5": "T5ForConditionalGeneration",
}


@cache
def directory(family: str) -> Path:
    """A directory with the config.json of a small model of the family."""
    folder = scratch("parallelrun-hf-") / family
    folder.mkdir()
    classes = [_CLASSES[family]] if family in _CLASSES else []
    content = {"model_type": family, "architectures": classes, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def overrides(family: str) -> dict[str, Any]:
    """What trains it in a test."""
    data = {"dataset.name": "synthetic", "dataset.vocab": 96, "model.vocab": None}
    if family == "vit":
        data = {"dataset.name": "synthetic", "dataset.vocab": 10, "model.vocab": None}
    return {"model.name": "hf", "model.preset": "hf", "model.path": str(directory(family)), "dropout": 0.0, **data}
