"""The classes of transformers with experts on plain attention that compute what a gpt does: Mixtral and Glm4Moe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.gpt.dense_families import LLAMA_KEYS, Llama, decoder_fields, decoder_values, gated, rope_fields
from parallelrun.models.hugging_face import Fields, FixedTensor, Piece, options
from parallelrun.models.moe import spec as moe
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.router import RouterSpec


class Mixtral(Llama):
    """MixtralForCausalLM: experts in every layer, weights of the chosen ones normalised to sum 1."""

    model_type, architecture = "mixtral", "MixtralForCausalLM"
    default_eps, default_theta, default_seq = 1e-5, 1e6, 131072
    routers = {"kind": ("top_k",), "score": ("softmax",), "renormalise": ("before", "after"), "scaling": (1.0,),
               "capacity_factor": (None,), "eval_capacity_factor": (None,), "bias_rate": (0.0,),
               "n_group": (1,)}  # fmt: skip

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        allowed = {**LLAMA_KEYS, "bias": (False,), "shared_experts": (0,), "expert_period": (1,), "dense_layers": (0,)}
        problems = options(config, self.architecture, allowed)
        return problems + routing_differences(spec, self.architecture, self.routers)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        assert spec.router is not None
        return {
            **decoder_fields(config, spec),
            "intermediate_size": moe.expert_ffn(config.model),
            "num_local_experts": config.model.experts,
            "num_experts_per_tok": spec.router.top_k,
            "router_aux_loss_coef": spec.router.aux_coefficient,
            "router_jitter_noise": spec.router.jitter,
            "sliding_window": None,
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.expect("sliding_window", None)
        return {
            **decoder_values(fields, self.default_eps, self.default_theta, self.default_seq),
            "bias": False,
            "experts": fields.take("num_local_experts", int, 8),
            "expert_period": 1,
            "dense_layers": 0,
            "shared_experts": 0,
            "router": {
                "kind": "top_k",
                "top_k": fields.take("num_experts_per_tok", int, 2),
                "score": "softmax",
                "renormalise": "before",
                "aux_coefficient": fields.take("router_aux_loss_coef", float, 0.001),
                "jitter": fields.take("router_jitter_noise", float, 0.0),
            },
        }

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        block = f"{theirs}.block_sparse_moe"
        yield Piece(f"{ours}.router.weight", f"{block}.gate.weight")
        for expert in range(config.model.experts):
            for part, key in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                yield Piece(f"{ours}.experts.{part}", f"{block}.experts.{expert}.{key}.weight", index=expert)


class Glm4Moe(Llama):
    """Glm4MoeForCausalLM with whole heads rotated: DeepSeek-V3's experts and routing, on plain attention."""

    model_type, architecture = "glm4_moe", "Glm4MoeForCausalLM"
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
    default_eps, default_theta, default_seq = 1e-5, 10000.0, 131072
    routers = {"kind": ("top_k",), "score": ("sigmoid",), "renormalise": ("before", "after"),
               "capacity_factor": (None,), "eval_capacity_factor": (None,), "jitter": (0.0,),
               "n_group": (1,)}  # fmt: skip

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        problems = options(config, self.architecture, {**LLAMA_KEYS, "bias": (False,), "expert_period": (1,)})
        if not config.model.shared_experts:
            message = f"model.shared_experts=0: {self.architecture} of transformers has a shared expert in every layer"
            problems.append(Problem(message, "model.shared_experts"))
        return problems + routing_differences(spec, self.architecture, self.routers)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model, router = config.model, spec.router
        assert router is not None
        return {
            **decoder_fields(config, spec),
            **rope_fields(model, {"partial_rotary_factor": 1.0}),
            "partial_rotary_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": False,
            **self.expert_fields(config, router),
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }

    def expert_fields(self, config: Config, router: RouterSpec) -> dict[str, Any]:
        """Sizes of the experts, under the names that DeepSeek gave them. router: of the spec."""
        model = config.model
        return {
            "moe_intermediate_size": moe.expert_ffn(model),
            "n_routed_experts": model.experts,
            "num_experts_per_tok": router.top_k,
            "n_shared_experts": model.shared_experts,
            "first_k_dense_replace": model.dense_layers,
            "routed_scaling_factor": router.scaling,
        }

    def expert_values(self, fields: Fields, dense_layers: int) -> dict[str, Any]:
        """Return the model keys for the fields of `expert_fields`, without the router. dense_layers: the default."""
        return {
            "bias": False,
            "experts": fields.take("n_routed_experts", int, 128),
            "expert_ffn": fields.take("moe_intermediate_size", int, 1408),
            "expert_period": 1,
            "dense_layers": fields.take("first_k_dense_replace", int, dense_layers),
            "shared_experts": fields.take("n_shared_experts", int, 1),
        }

    def bias_values(self) -> dict[str, float]:
        """A file does not say how fast selection biases move: the rate is that of DeepSeek-V3; 0 would drop them."""
        return {"bias_rate": 1e-3}

    def values(self, fields: Fields) -> dict[str, Any]:
        for key, value in (("attention_bias", False), ("use_qk_norm", False), ("n_group", 1), ("topk_group", 1)):
            fields.expect(key, value)
        fields.expect("norm_topk_prob", True)
        return {
            **decoder_values(fields, self.default_eps, self.default_theta, self.default_seq, partial=0.5),
            **self.expert_values(fields, dense_layers=1),
            "router": {
                "kind": "top_k",
                "top_k": fields.take("num_experts_per_tok", int, 8),
                "score": "sigmoid",
                "renormalise": "before",
                "scaling": fields.take("routed_scaling_factor", float, 1.0),
                **self.bias_values(),
            },
        }

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        yield Piece(f"{ours}.router.weight", f"{theirs}.mlp.gate.weight")
        if config.model.router.bias_rate > 0:
            yield Piece(f"{ours}.router.selection_bias", f"{theirs}.mlp.gate.e_score_correction_bias")
        for expert in range(config.model.experts):
            for part in ("gate", "up", "down"):
                key = f"{theirs}.mlp.experts.{expert}.{part}_proj.weight"
                yield Piece(f"{ours}.experts.{part}", key, index=expert)
        yield from gated(f"{ours}.shared", f"{theirs}.mlp.shared_experts")

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        if config.model.router.bias_rate > 0:
            return {}
        layers = (index for index in range(config.model.layers) if moe.has_experts(index, config.model))
        zeros = FixedTensor((config.model.experts,), 0.0)
        return {f"model.layers.{index}.mlp.gate.e_score_correction_bias": zeros for index in layers}


def routing_differences(spec: ModelSpec, family: str, allowed: dict[str, tuple[Any, ...]]) -> list[Problem]:
    """The problems of a router with a family that knows only some values of some keys."""
    if spec.router is None:
        return [Problem(f"model.experts=0: {family} of transformers has experts", "model.experts")]
    problems = []
    for key, values in allowed.items():
        if (value := getattr(spec.router, key)) not in values:
            theirs = " or ".join("null" if one is None else str(one) for one in values)
            message = f"model.router.{key}={value}: {family} of transformers has {theirs}"
            problems.append(Problem(message, f"model.router.{key}"))
    if spec.router.top_k == 1:
        message = f"model.router.top_k=1: {family} gives a single expert the weight 1, and our model its score"
        problems.append(Problem(message, "model.router.top_k"))
    return problems
