"""The classes of transformers with latent attention that compute what a gpt does: DeepseekV3 and DeepseekV2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.config_fields import Fields
from parallelrun.models.gpt.dense_families import Decoder, decoder_table
from parallelrun.models.gpt.expert_families import Glm4Moe, expert_table
from parallelrun.models.hugging_face import Field, FixedTensor, Piece
from parallelrun.models.transformer.latent_spec import KEYS
from parallelrun.planner.model.model_spec import ModelSpec

NORM_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others
LATENT_FIELDS = (*(Field(key, key, int) for key in KEYS), Field("q_lora_rank", "q_lora_rank", int, None))


class DeepseekV3(Glm4Moe):
    """DeepseekV3ForCausalLM: latent attention, experts in groups, selection biases. Its files may hold a layer more,
    which predicts several tokens."""

    model_type, architecture = "deepseek_v3", "DeepseekV3ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("kimi_k2",)
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight|model\.layers\.61\..*"
    table = (
        *decoder_table(eps=NORM_EPS, seq=4096),
        *LATENT_FIELDS,
        *expert_table(dense_layers=3, scaling=2.5),
        Field("n_group", "router.n_group", int, 8),
        Field("topk_group", "router.topk_group", int, 4),
        Field("aux_loss_alpha", "router.aux_coefficient", float, 1e-4),
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        **Decoder.fixed, "attention_bias": False, "rms_norm_eps": NORM_EPS, "rope_interleave": True
    }  # fmt: skip
    expected: ClassVar[Mapping[str, Any]] = {
        "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"
    }  # fmt: skip
    rotated, latent = 1.0, True
    routing: ClassVar[Mapping[str, Any]] = {"kind": "top_k", "score": "sigmoid", "bias_rate": 1e-3}

    implied: ClassVar[Mapping[str, Any]] = {**Glm4Moe.implied, "norm_eps": NORM_EPS}

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        model, problems = config.model, super().differences(config, spec)
        if spec.latent is None:
            message = f"model.kv_lora_rank=null: {self.architecture} of transformers has latent attention"
            problems.append(Problem(message, "model.kv_lora_rank"))
        both = bool(model.rope_mscale) == bool(model.rope_mscale_all_dim)
        if model.rope_scaling == "yarn" and not both and (model.rope_mscale, model.rope_mscale_all_dim) != (1.0, 0.0):
            message = (
                f"model.rope_mscale={model.rope_mscale:g} with rope_mscale_all_dim={model.rope_mscale_all_dim:g}: "
                f"{self.architecture} reads both of them, or neither"
            )
            problems.append(Problem(message, "model.rope_mscale"))
        router, ranks_by_two = spec.router, self.routing["score"] == "sigmoid"
        if router is not None and router.topk_group < router.n_group == model.experts and ranks_by_two:
            message = f"model.router.n_group={router.n_group}: {self.architecture} ranks groups by two experts of each"
            problems.append(Problem(message, "model.router.n_group"))
        return problems

    def head_dim(self, model: Mapping[str, Any]) -> int:
        return int(model["qk_rope_head_dim"])

    def head_values(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        fields.expect("head_dim", self.head_dim(values), None)
        return {}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        router, fields = spec.router, Decoder.fields(self, config, spec)
        assert router is not None
        groups = {"topk_group": min(router.topk_group, router.n_group)}
        return {**fields, **groups, "norm_topk_prob": router.renormalise != "none", "num_nextn_predict_layers": 0}

    def values(self, fields: Fields) -> dict[str, Any]:
        values = super().values(fields)
        fields.expect("qk_head_dim", values["qk_nope_head_dim"] + values["qk_rope_head_dim"], None)
        values["router"]["renormalise"] = self.renormalise(fields)
        return values

    def renormalise(self, fields: Fields) -> str:
        """Return our value for whether the weights of a token's experts are normalised."""
        return str(fields.translate("norm_topk_prob", {True: "before", False: "none"}, True))

    def attention_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        names = {"kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "out": "o_proj"}
        if config.model.q_lora_rank is None:
            names["q"] = "q_proj"
        else:
            names |= {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj"}
        for own, name in names.items():
            yield Piece(f"{ours}.attention.{own}.weight", f"{theirs}.self_attn.{name}.weight")


class DeepseekV2(DeepseekV3):
    """DeepseekV2ForCausalLM: softmax scores, groups by their best expert, no selection biases. transformers does not
    normalise weights, whatever config.json says."""

    model_type, architecture = "deepseek_v2", "DeepseekV2ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ()
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
    table = (
        *decoder_table(eps=NORM_EPS, seq=2048),
        *LATENT_FIELDS,
        *expert_table(dense_layers=0, scaling=1.0),
        Field("aux_loss_alpha", "router.aux_coefficient", float, 1e-3),
    )
    fixed: ClassVar[Mapping[str, Any]] = {
        **Decoder.fixed, "attention_bias": False, "rms_norm_eps": NORM_EPS, "mlp_bias": False
    }  # fmt: skip
    expected: ClassVar[Mapping[str, Any]] = {"moe_layer_freq": 1, "scoring_func": "softmax", "rope_interleave": True}
    routing: ClassVar[Mapping[str, Any]] = {
        "kind": "top_k", "score": "softmax", "bias_rate": 0.0, "renormalise": "none"
    }  # fmt: skip
    free: ClassVar[Set[str]] = {"router.n_group"}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        router = spec.router
        assert router is not None
        limited = router.topk_group < router.n_group
        return {
            **Decoder.fields(self, config, spec),
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy" if limited else "greedy",
            "n_group": router.n_group if limited else 1,
            "topk_group": router.topk_group if limited else 1,
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        values = super().values(fields)
        limited = fields.translate("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
        groups, used = fields.take("n_group", int, None) or 1, fields.take("topk_group", int, None) or 1
        values["router"] |= {"n_group": groups if limited else 1, "topk_group": used if limited else 1}
        return values

    def renormalise(self, fields: Fields) -> str:
        fields.expect("norm_topk_prob", False)
        return "none"

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        return {}
