"""The classes of transformers of the Qwen models that compute what a gpt does: Qwen2, Qwen2Moe, Qwen3 and
Qwen3Moe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from parallelrun.config.schema.run_schema import Config
from parallelrun.models.config_fields import Fields
from parallelrun.models.gpt.dense_families import Decoder, decoder_table, gated
from parallelrun.models.gpt.expert_families import experts
from parallelrun.models.hugging_face import Field, Piece
from parallelrun.models.moe import spec as moe
from parallelrun.planner.model.model_spec import ModelSpec

BASE = {"hidden_act": "silu", "use_sliding_window": False}


class Qwen2(Decoder):
    """Qwen2ForCausalLM (Qwen2, Qwen2.5): Llama with biases of queries, keys and values alone."""

    model_type, architecture = "qwen2", "Qwen2ForCausalLM"
    table = decoder_table(eps=1e-6, seq=32768, vocab=151936, kv_heads=32)
    fixed: ClassVar[Mapping[str, Any]] = BASE
    implied: ClassVar[Mapping[str, Any]] = {"bias": False, "qkv_bias": True}

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.drop("sliding_window", "max_window_layers")  # read by use_sliding_window alone
        kinds = fields.take("layer_types", list, None) or []
        if any(kind != "full_attention" for kind in kinds):
            fields.note(f"layer_types is {kinds!r:.200}, and only full_attention is built")
        return super().values(fields)


class Qwen3(Qwen2):
    """Qwen3ForCausalLM: no biases, and a norm of the queries and keys of every head."""

    model_type, architecture = "qwen3", "Qwen3ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {**BASE, "attention_bias": False}
    implied: ClassVar[Mapping[str, Any]] = {"bias": False, "qk_norm": "head"}
    head_size: ClassVar[int | None] = 128


def expert_table(experts: int, ffn: int, top_k: int) -> tuple[Field, ...]:
    """Return the fields of experts. The arguments are defaults of the class."""
    return (
        Field("num_experts", "experts", int, experts),
        Field("moe_intermediate_size", "expert_ffn", int, ffn),
        Field("decoder_sparse_step", "expert_period", int, 1),
        Field("num_experts_per_tok", "router.top_k", int, top_k),
        Field("norm_topk_prob", "router.renormalise", {True: "before", False: "none"}, False),
        Field("router_aux_loss_coef", "router.aux_coefficient", float, 0.001),
    )


class Qwen2Moe(Qwen2):
    """Qwen2MoeForCausalLM (Qwen1.5-MoE, Qwen2-57B): Qwen2 with experts, and with shared ones behind a gate."""

    model_type, architecture = "qwen2_moe", "Qwen2MoeForCausalLM"
    table = (
        *decoder_table(eps=1e-6, seq=32768, vocab=151936, hidden=2048, layers=24, heads=16, kv_heads=16),
        *expert_table(experts=60, ffn=1408, top_k=4),
    )
    fixed: ClassVar[Mapping[str, Any]] = {**BASE, "qkv_bias": True}
    implied: ClassVar[Mapping[str, Any]] = {**Qwen2.implied, "dense_layers": 0, "shared_gate": True}
    routing: ClassVar[Mapping[str, Any]] = {"kind": "top_k", "score": "softmax"}
    free: ClassVar[Set[str]] = {"shared_experts"}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        shared = {"shared_expert_intermediate_size": moe.shared_ffn(config.model)}
        return {**super().fields(config, spec), **shared}

    def values(self, fields: Fields) -> dict[str, Any]:
        shared = fields.take("shared_expert_intermediate_size", int, 5632)
        values = super().values(fields)
        if not shared or shared % values["expert_ffn"]:
            fields.note(f"shared_expert_intermediate_size is {shared}, no multiple of {values['expert_ffn']}")
        return {**values, "shared_experts": shared // values["expert_ffn"]}

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        yield Piece(f"{ours}.router.weight", f"{theirs}.mlp.gate.weight")
        yield Piece(f"{ours}.shared_gate.weight", f"{theirs}.mlp.shared_expert_gate.weight")
        yield from experts(config, ours, theirs)
        yield from gated(f"{ours}.shared", f"{theirs}.mlp.shared_expert")


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM: Qwen3 with experts, without shared ones."""

    model_type, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    table = (
        *decoder_table(eps=1e-6, seq=32768, vocab=151936, hidden=2048, layers=24, kv_heads=4),
        *expert_table(experts=128, ffn=768, top_k=8),
    )
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    implied: ClassVar[Mapping[str, Any]] = {**Qwen3.implied, "dense_layers": 0, "shared_experts": 0}
    head_size: ClassVar[int | None] = None
    routing: ClassVar[Mapping[str, Any]] = {"kind": "top_k", "score": "softmax"}

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        yield Piece(f"{ours}.router.weight", f"{theirs}.mlp.gate.weight")
        yield from experts(config, ours, theirs)
