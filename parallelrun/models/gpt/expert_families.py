"""The classes of transformers with experts on plain attention that compute what a gpt does: Mixtral and Glm4Moe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.gpt.dense_families import Decoder, decoder_table, gated, rope_fields
from parallelrun.models.hugging_face import Field, FixedTensor, Piece
from parallelrun.models.moe import spec as moe
from parallelrun.planner.model.model_spec import ModelSpec


class Mixtral(Decoder):
    """MixtralForCausalLM: experts in every layer, weights of the selected ones normalised to sum 1."""

    model_type, architecture = "mixtral", "MixtralForCausalLM"
    table = (
        *decoder_table(eps=1e-5, seq=131072),
        Field("num_local_experts", "experts", int, 8),
        Field("num_experts_per_tok", "router.top_k", int, 2),
        Field("router_aux_loss_coef", "router.aux_coefficient", float, 0.001),
        Field("router_jitter_noise", "router.jitter", float, 0.0),
    )
    fixed: ClassVar[Mapping[str, Any]] = {**Decoder.fixed, "sliding_window": None}
    theta = 1e6
    implied: ClassVar[Mapping[str, Any]] = {"bias": False, "expert_period": 1, "dense_layers": 0, "shared_experts": 0}
    routing: ClassVar[Mapping[str, Any]] = {"kind": "top_k", "score": "softmax", "renormalise": "before"}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        return {**super().fields(config, spec), "intermediate_size": moe.expert_ffn(config.model)}

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        block = f"{theirs}.block_sparse_moe"
        yield Piece(f"{ours}.router.weight", f"{block}.gate.weight")
        for expert in range(config.model.experts):
            for part, key in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                yield Piece(f"{ours}.experts.{part}", f"{block}.experts.{expert}.{key}.weight", index=expert)


def expert_table(dense_layers: int, scaling: float) -> tuple[Field, ...]:
    """Return the fields of experts under the names that DeepSeek gave them. The arguments are defaults of the class."""
    return (
        Field("n_routed_experts", "experts", int, 128),
        Field("moe_intermediate_size", "expert_ffn", int, 1408),
        Field("first_k_dense_replace", "dense_layers", int, dense_layers),
        Field("n_shared_experts", "shared_experts", int, 1),
        Field("num_experts_per_tok", "router.top_k", int, 8),
        Field("routed_scaling_factor", "router.scaling", float, scaling),
    )


class Glm4Moe(Decoder):
    """Glm4MoeForCausalLM with complete heads rotated: DeepSeek-V3's experts and routing, on plain attention.

    A file does not say how fast selection biases move: the rate is that of DeepSeek-V3; 0 would drop them.
    """

    model_type, architecture = "glm4_moe", "Glm4MoeForCausalLM"
    table = (*decoder_table(eps=1e-5, seq=131072), *expert_table(dense_layers=1, scaling=1.0))
    fixed: ClassVar[Mapping[str, Any]] = {
        **Decoder.fixed, "attention_bias": False, "use_qk_norm": False, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True,
    }  # fmt: skip
    rotated = 0.5
    implied: ClassVar[Mapping[str, Any]] = {"bias": False, "expert_period": 1}
    routing: ClassVar[Mapping[str, Any]] = {
        "kind": "top_k", "score": "sigmoid", "renormalise": "before", "bias_rate": 1e-3
    }  # fmt: skip
    free: ClassVar[Set[str]] = {"router.bias_rate"}

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        problems = super().differences(config, spec)
        if not config.model.shared_experts:
            message = f"model.shared_experts=0: {self.architecture} of transformers has a shared expert in every layer"
            problems.append(Problem(message, "model.shared_experts"))
        return problems

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        rotated = {"partial_rotary_factor": 1.0}
        more = {**rope_fields(config.model, rotated), **rotated, "num_nextn_predict_layers": 0}
        return {**super().fields(config, spec), **more}

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        yield Piece(f"{ours}.router.weight", f"{theirs}.mlp.gate.weight")
        if config.model.router.bias_rate > 0:
            yield Piece(f"{ours}.router.selection_bias", f"{theirs}.mlp.gate.e_score_correction_bias")
        yield from experts(config, ours, theirs)
        yield from gated(f"{ours}.shared", f"{theirs}.mlp.shared_experts")

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        if config.model.router.bias_rate > 0:
            return {}
        layers = (index for index in range(config.model.layers) if moe.has_experts(index, config.model))
        zeros = FixedTensor((config.model.experts,), 0.0)
        return {f"model.layers.{index}.mlp.gate.e_score_correction_bias": zeros for index in layers}


def experts(config: Config, ours: str, theirs: str) -> Iterator[Piece]:
    """The pieces of a layer's experts under the names that DeepSeek gave them."""
    for expert in range(config.model.experts):
        for part in ("gate", "up", "down"):
            key = f"{theirs}.mlp.experts.{expert}.{part}_proj.weight"
            yield Piece(f"{ours}.experts.{part}", key, index=expert)
