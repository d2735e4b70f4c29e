"""The classes of transformers whose layers have windows in turn, and compute what a gpt does: Gemma2, Gemma3Text and
GptOss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.config_fields import Fields
from parallelrun.models.gpt.dense_families import Decoder, decoder_table
from parallelrun.models.gpt.expert_families import Mixtral
from parallelrun.models.hugging_face import Field, Piece, options
from parallelrun.models.moe import spec as moe
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.model_spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


class Windowed(Decoder):
    """A class with the fields sliding_window and layer_types: by default every `period`-th layer has no window."""

    default_window: ClassVar[int] = 4096
    period: ClassVar[int] = 2
    free: ClassVar[Set[str]] = frozenset({"window", "global_period"})

    def window_fields(self, model: ModelConfig) -> dict[str, Any]:
        """sliding_window and layer_types of a model."""
        windows = [transformer.window_of(index, model) for index in range(model.layers)]
        return {
            "sliding_window": model.window or self.default_window,
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }

    def window_values(self, fields: Fields) -> dict[str, Any]:
        """The values of `model.window` and `model.global_period`."""
        window = fields.take("sliding_window", int, self.default_window, nullable=True)
        fields.drop("_sliding_window_pattern")
        period = fields.take("sliding_window_pattern", int, self.period)
        types = fields.take("layer_types", list, None)
        if types:
            period = types.index(FULL) + 1 if FULL in types else None
            if types != [FULL if period and (index + 1) % period == 0 else SLIDING for index in range(len(types))]:
                fields.note(f"layer_types is {types!r:.200}, and only every n-th layer of {FULL} is built")
        return {"window": window, "global_period": period}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        return {**super().fields(config, spec), **self.window_fields(config.model)}

    def values(self, fields: Fields) -> dict[str, Any]:
        return {**self.window_values(fields), **super().values(fields)}


class Gemma2(Windowed):
    """Gemma2ForCausalLM: norms of inputs and results, whose stored weights are ours - 1; GeGLU; soft caps."""

    model_type, architecture = "gemma2", "Gemma2ForCausalLM"
    table = decoder_table(eps=1e-6, seq=8192, vocab=256000, hidden=2304, layers=26, heads=8, kv_heads=4, tied=True)
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    implied: ClassVar[Mapping[str, Any]] = {
        "bias": False, "norm_position": "both", "activation": "geglu", "scaled_embedding": True
    }  # fmt: skip
    norms: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm",
        "attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    norm_offset = 1.0
    head_size: ClassVar[int | None] = 256
    caps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)
    free: ClassVar[Set[str]] = Windowed.free | {"attention_softcap", "logit_softcap", "query_pre_attn_scalar"}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model = config.model
        return {
            **super().fields(config, spec),
            "attn_logit_softcapping": model.attention_softcap,
            "final_logit_softcapping": model.logit_softcap,
            "query_pre_attn_scalar": int(model.query_pre_attn_scalar or self.head_dim(vars(model))),
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.drop("hidden_act", "cache_implementation")  # of older files
        fields.expect("use_bidirectional_attention", False, None)
        attention, logit = self.caps
        own = {
            "attention_softcap": fields.take("attn_logit_softcapping", float, attention, nullable=True),
            "logit_softcap": fields.take("final_logit_softcapping", float, logit, nullable=True),
            "query_pre_attn_scalar": fields.take("query_pre_attn_scalar", float, 256.0),
        }
        return {**own, **super().values(fields)}


class Gemma3(Gemma2):
    """Gemma3ForCausalLM, the text model: norms of heads in place of soft caps, five layers of six with a window, whose
    rotary frequencies are their own."""

    model_type, architecture = "gemma3_text", "Gemma3ForCausalLM"
    table = decoder_table(eps=1e-6, seq=131072, vocab=262208, hidden=2304, layers=26, heads=8, kv_heads=4, tied=True)
    implied: ClassVar[Mapping[str, Any]] = {**Gemma2.implied, "qk_norm": "head"}
    caps: ClassVar[tuple[float | None, float | None]] = (None, None)
    free: ClassVar[Set[str]] = Gemma2.free | {"local_rope_theta"}
    theta, period = 1e6, 6

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        problems = super().differences(config, spec)
        if config.model.local_rope_theta is None and config.model.rope_scaling != "none":  # layers with a window: none
            problems += options(config.model, "model", self.architecture, {"local_rope_theta": ()})
        return problems

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        fields, model = super().fields(config, spec), config.model
        local = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
        of_local = {"rope_type": "default", "rope_theta": local}
        both = {FULL: fields["rope_parameters"], SLIDING: of_local}
        return {**fields, "rope_parameters": both, "rope_local_base_freq": local}

    def values(self, fields: Fields) -> dict[str, Any]:
        return {"local_rope_theta": fields.local_rotary(10000.0, SLIDING, FULL), **super().values(fields)}


class GptOss(Windowed):
    """GptOssForCausalLM: sinks; experts with biases, whose gate and up are stored in turn, transposed."""

    model_type, architecture = "gpt_oss", "GptOssForCausalLM"
    table = (
        *decoder_table(eps=1e-5, seq=131072, vocab=201088, hidden=2880, layers=36, heads=64, kv_heads=8),
        Field("attention_bias", "bias", bool, True),
        Field("num_local_experts", "experts", int, 128),
        Field("num_experts_per_tok", "router.top_k", int, 4),
        Field("router_aux_loss_coef", "router.aux_coefficient", float, 0.001),
    )
    fixed: ClassVar[Mapping[str, Any]] = {**Decoder.fixed, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    implied: ClassVar[Mapping[str, Any]] = {
        "activation": "swiglu_clamped", "sinks": True, "expert_bias": True, "expert_period": 1, "dense_layers": 0,
        "shared_experts": 0,
    }  # fmt: skip
    routing: ClassVar[Mapping[str, Any]] = Mixtral.routing
    default_window, theta = 128, 150000.0
    head_size: ClassVar[int | None] = 64

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        return {**super().fields(config, spec), "intermediate_size": moe.expert_ffn(config.model)}

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.drop("experts_per_token", "initial_context_length")  # said by others too
        values = super().values(fields)
        if "rope_scaling" not in values:
            fields.note("there is no scaling of rotary frequencies, which the class has by default")
        return values

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        for part in ("weight", "bias"):
            yield Piece(f"{ours}.router.{part}", f"{theirs}.mlp.router.{part}")
        for own, key, start in (("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", 0)):
            name, stored = f"{ours}.experts.{own}", f"{theirs}.mlp.experts.{key}_proj"
            step = 1 if own == "down" else 2
            for expert in range(config.model.experts):
                yield Piece(name, stored, expert, transposed=True, start=start, step=step, stacked=True)
                yield Piece(f"{name}_bias", f"{stored}_bias", expert, start=start, step=step, stacked=True)
