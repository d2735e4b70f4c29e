"""The classes of transformers with latent attention that compute what a gpt does: DeepseekV3 and DeepseekV2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.gpt.dense_families import LLAMA_KEYS, decoder_fields, decoder_values
from parallelrun.models.gpt.expert_families import Glm4Moe, routing_differences
from parallelrun.models.hugging_face import Fields, FixedTensor, Piece, options
from parallelrun.models.transformer.latent_spec import KEYS
from parallelrun.planner.model.model_spec import ModelSpec

NORM_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others
LATENT_KEYS = (*KEYS, "q_lora_rank")


class DeepseekV3(Glm4Moe):
    """DeepseekV3ForCausalLM: latent attention, experts in groups, selection biases. Its files may hold a layer more,
    which predicts several tokens."""

    model_type, architecture = "deepseek_v3", "DeepseekV3ForCausalLM"
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight|model\.layers\.61\..*"
    default_eps, default_theta, default_seq = NORM_EPS, 10000.0, 4096
    default_groups, default_dense_layers, default_scaling, default_aux = (8, 4), 3, 2.5, 1e-4
    score = "sigmoid"
    renormalises: ClassVar[tuple[bool, ...]] = (True, False)  # whether weights are; the first is the default
    routers = {"kind": ("top_k",), "score": ("sigmoid",), "capacity_factor": (None,),
               "eval_capacity_factor": (None,), "jitter": (0.0,)}  # fmt: skip

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        model = config.model
        allowed = {**LLAMA_KEYS, "bias": (False,), "expert_period": (1,), "norm_eps": (NORM_EPS,)}
        problems = options(config, self.architecture, {key: allowed[key] for key in allowed if key not in LATENT_KEYS})
        if spec.latent is None:
            message = f"model.kv_lora_rank=null: {self.architecture} of transformers has latent attention"
            problems.append(Problem(message, "model.kv_lora_rank"))
        if not model.shared_experts:
            message = f"model.shared_experts=0: {self.architecture} of transformers has a shared expert in every layer"
            problems.append(Problem(message, "model.shared_experts"))
        both = bool(model.rope_mscale) == bool(model.rope_mscale_all_dim)
        if model.rope_scaling == "yarn" and not both and (model.rope_mscale, model.rope_mscale_all_dim) != (1.0, 0.0):
            message = (
                f"model.rope_mscale={model.rope_mscale:g} with rope_mscale_all_dim={model.rope_mscale_all_dim:g}: "
                f"{self.architecture} reads both of them, or neither"
            )
            problems.append(Problem(message, "model.rope_mscale"))
        router = spec.router
        if router is not None and router.topk_group < router.n_group == model.experts and self.score == "sigmoid":
            message = f"model.router.n_group={router.n_group}: {self.architecture} ranks groups by two experts of each"
            problems.append(Problem(message, "model.router.n_group"))
        return problems + routing_differences(spec, self.architecture, self.routers)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model, router = config.model, spec.router
        assert router is not None and spec.latent is not None
        return {
            **decoder_fields(config, spec),
            **{key: getattr(model, key) for key in LATENT_KEYS},
            "head_dim": spec.latent.rope,
            "attention_bias": False,
            **self.expert_fields(config, router),
            **self.routing_fields(config, spec),
        }

    def routing_fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        """Return the routing fields, which differ between this class and its predecessor."""
        assert spec.router is not None
        return {
            "norm_topk_prob": spec.router.renormalise != "none",
            "n_group": spec.router.n_group,
            "topk_group": min(spec.router.topk_group, spec.router.n_group),
            "rope_interleave": True,
            "num_nextn_predict_layers": 0,
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        sizes = {key: fields.take(key, int) for key in KEYS}
        sizes["q_lora_rank"] = fields.take("q_lora_rank", int, None)
        rope, head_dim = sizes["qk_rope_head_dim"], sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        fields.expect("head_dim", rope, None)
        fields.expect("qk_head_dim", head_dim, None)
        for key, value in (("attention_bias", False), ("rms_norm_eps", NORM_EPS), ("moe_layer_freq", 1),
                           ("rope_interleave", True), ("scoring_func", self.score)):  # fmt: skip
            fields.expect(key, value)
        groups = self.groups(fields)
        normalises = fields.chosen("norm_topk_prob", {flag: flag for flag in self.renormalises}, self.renormalises[0])
        decoder = decoder_values(fields, self.default_eps, self.default_theta, self.default_seq, yarn=True)
        found = {**decoder, **sizes, **self.expert_values(fields, self.default_dense_layers)}
        return found | {
            "router": {
                "kind": "top_k",
                "top_k": fields.take("num_experts_per_tok", int, 8),
                "score": self.score,
                "renormalise": "before" if normalises else "none",
                "scaling": fields.take("routed_scaling_factor", float, self.default_scaling),
                "aux_coefficient": fields.take("aux_loss_alpha", float, self.default_aux),
                "n_group": groups[0],
                "topk_group": groups[1],
                **self.bias_values(),
            }
        }

    def groups(self, fields: Fields) -> tuple[int, int]:
        """(groups of experts, groups that a token uses)."""
        fields.expect("topk_method", "noaux_tc")
        count, used = self.default_groups
        return fields.take("n_group", int, count), fields.take("topk_group", int, used)

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
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
    default_seq, default_groups, default_dense_layers, default_scaling, default_aux = 2048, (1, 1), 0, 1.0, 1e-3
    score, renormalises = "softmax", (False,)
    routers = {**DeepseekV3.routers, "score": ("softmax",), "renormalise": ("none",), "bias_rate": (0.0,)}

    def routing_fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        assert spec.router is not None
        limited = spec.router.topk_group < spec.router.n_group
        return {
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy" if limited else "greedy",
            "n_group": spec.router.n_group if limited else 1,
            "topk_group": spec.router.topk_group if limited else 1,
            "mlp_bias": False,
        }

    def bias_values(self) -> dict[str, float]:
        return {"bias_rate": 0.0}

    def groups(self, fields: Fields) -> tuple[int, int]:
        fields.expect("mlp_bias", False)
        limited = fields.chosen("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
        counts = fields.take("n_group", int, None) or 1, fields.take("topk_group", int, None) or 1
        return counts if limited else (1, 1)

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        return {}
