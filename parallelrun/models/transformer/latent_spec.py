"""Sizes and checks of multi-head latent attention (DeepSeek-V2, 2024; DeepSeek-V3, 2024).

Keys and values of all heads are products of one latent of each token, queries of another. Positions turn only some
features of a query, and a key of their own, which all heads share.
"""

from __future__ import annotations

from math import log

from parallelrun.base.errors import Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.planner.model.model_spec.attention import LatentSpec

KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # all of them, or none

OF_PLAIN = {
    "head_dim": "the heads of latent attention have sizes of their own",
    "query_pre_attn_scalar": "rope_mscale_all_dim scales the scores of latent attention",
    "qk_norm": "latent attention normalises latents, not heads",
    "norm_position": "norms of results are not built beside latent attention",
    "qkv_bias": "the layers that give heads have no biases in latent attention",
}


def latent_sizes(model: ModelConfig) -> LatentSpec | None:
    """The sizes of a model without problems; None: it has plain attention."""
    kv_rank, nope, rope, value = (getattr(model, key) for key in KEYS)
    return None if kv_rank is None else LatentSpec(model.q_lora_rank, kv_rank, nope, rope, value)


def yarn_growth(factor: float, scale: float) -> float:
    """0.1 x scale x ln(factor) + 1 (Peng et al. 2023): by how much features grow when frequencies are divided."""
    return 0.1 * scale * log(factor) + 1.0 if factor > 1.0 else 1.0


def rotary_growth(model: ModelConfig) -> float:
    """The factor on rotated features of queries and keys, without what `score_growth` does for all features. Plain
    attention has the same factor, as transformers computes it, and no growth of scores."""
    if model.rope_scaling != "yarn":
        return 1.0
    of_all = yarn_growth(model.rope_factor, model.rope_mscale_all_dim)
    return yarn_growth(model.rope_factor, model.rope_mscale) / of_all


def score_growth(model: ModelConfig) -> float:
    """The factor on scores of latent attention."""
    return yarn_growth(model.rope_factor, model.rope_mscale_all_dim) ** 2 if model.rope_scaling == "yarn" else 1.0


def check(model: ModelConfig) -> list[Problem]:
    """Problems of the keys of latent attention, and of those that exclude it or need it."""
    present = [key for key in (*KEYS, "q_lora_rank") if getattr(model, key) is not None]
    if not present:
        return []
    missing = [key for key in KEYS if getattr(model, key) is None]
    if missing:
        message = f"latent attention needs all of {', '.join(f'model.{key}' for key in KEYS)}; not given: "
        fix = f"model.{missing[0]}=N or leave {' and '.join(f'model.{key}' for key in present)} out"
        return [Problem(message + ", ".join(missing), f"model.{missing[0]}", fix, kind="contradiction")]
    sizes, problems = latent_sizes(model), []
    assert sizes is not None
    if sizes.rope % 2:
        message = f"model.qk_rope_head_dim={sizes.rope} is odd: positions turn pairs of features"
        fix = f"model.qk_rope_head_dim={sizes.rope + 1}"
        problems.append(Problem(message, "model.qk_rope_head_dim", fix, kind="arithmetic"))
    if sizes.value > sizes.head_dim:  # zeros would have to stand behind queries and keys; no published model needs it
        message = f"model.v_head_dim={sizes.value} is above qk_nope_head_dim + qk_rope_head_dim = {sizes.head_dim}"
        problems.append(Problem(message, "model.v_head_dim", f"model.v_head_dim={sizes.head_dim}", kind="not_built"))
    if model.position != "rope":
        message = f"model.position={model.position}: latent attention has rotary positions"
        problems.append(Problem(message, "model.position", "model.position=rope", kind="contradiction"))
    for key, why in OF_PLAIN.items():
        if getattr(model, key) not in (None, False, "pre", "both"):
            message = f"model.{key}={getattr(model, key)}: {why}"
            problems.append(Problem(message, f"model.{key}", f"leave model.{key} out", kind="contradiction"))
    if model.kv_heads not in (None, model.heads):
        message = f"model.kv_heads={model.kv_heads}: under latent attention every head has a key and value of its own"
        fix = f"model.kv_heads={model.heads} or leave model.kv_heads out"
        problems.append(Problem(message, "model.kv_heads", fix, kind="contradiction"))
    return problems
