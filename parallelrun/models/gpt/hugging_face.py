"""The classes of transformers that compute what a gpt does: GPT-2, Llama, Mixtral, and Glm4Moe.

DeepSeek-V3's own class has latent attention, which our model does not have. GLM-4.5's class, Glm4Moe, has the same
experts and routing on plain attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from parallelrun.config.model_schema import ModelConfig
from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.models.hugging_face import ROPE_KEYS, Family, Fields, FixedTensor, Piece, options
from parallelrun.models.moe import spec as moe
from parallelrun.models.transformer import spec as transformer

GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}  # theirs -> ours


class Gpt2(Family):
    """GPT2LMHeadModel, which stores projections transposed (Conv1D), and q, k, v as one."""

    model_type, architecture, prefix = "gpt2", "GPT2LMHeadModel", "transformer."
    skipped = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        allowed = {"norm": ("layernorm",), "position": ("learned",), "activation": tuple(dict.fromkeys(GELUS.values())),
                   "bias": (True,), "experts": (0,), "kv_heads": (None, config.model.heads)}  # fmt: skip
        return options(config, self.architecture, allowed)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model = config.model
        return {
            "vocab_size": spec.vocab,
            "n_positions": model.seq,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": transformer.ffn_size(model),
            "activation_function": _theirs(GELUS, model.activation),
            "layer_norm_epsilon": model.norm_eps,
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tied_embeddings,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": model.attention_dropout,
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.expect("scale_attn_weights", True)
        fields.expect("scale_attn_by_inverse_layer_idx", False)
        fields.expect("add_cross_attention", False)
        return {
            "vocab": fields.take("vocab_size", int, 50257),
            "seq": fields.take("n_positions", int, 1024),
            "hidden": fields.take("n_embd", int, 768),
            "layers": fields.take("n_layer", int, 12),
            "heads": fields.take("n_head", int, 12),
            "ffn": fields.take("n_inner", int, None),
            "activation": fields.chosen("activation_function", GELUS, "gelu_new"),
            "norm_eps": fields.take("layer_norm_epsilon", float, 1e-5),
            "init_std": fields.take("initializer_range", float, 0.02),
            "tied_embeddings": fields.take("tie_word_embeddings", bool, True),
        }

    def pieces(self, config: Config, spec: ModelSpec) -> Iterator[Piece]:
        yield Piece("embedding.tokens.weight", "transformer.wte.weight")
        yield Piece("embedding.position.weight", "transformer.wpe.weight")
        hidden = config.model.hidden
        for index in range(config.model.layers):
            ours, theirs = f"layers.{index}", f"transformer.h.{index}"
            yield from _both(f"{ours}.attention_norm", f"{theirs}.ln_1")
            for number, part in enumerate("qkv"):
                name, key, start = f"{ours}.attention.qkv.{part}", f"{theirs}.attn.c_attn", number * hidden
                yield Piece(f"{name}.weight", f"{key}.weight", transposed=True, start=start)
                yield Piece(f"{name}.bias", f"{key}.bias", start=start)
            yield from _both(f"{ours}.attention.out", f"{theirs}.attn.c_proj", transposed=True)
            yield from _both(f"{ours}.mlp_norm", f"{theirs}.ln_2")
            yield from _both(f"{ours}.mlp.up.up", f"{theirs}.mlp.c_fc", transposed=True)
            yield from _both(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", transposed=True)
        yield from _both("head.norm", "transformer.ln_f")
        if not config.model.tied_embeddings:
            yield Piece("head.head.weight", "lm_head.weight")


class Llama(Family):
    """LlamaForCausalLM: Llama 1, 2 and 3. Its rotary embedding rotates the halves of a head, as ours does."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
    default_eps, default_theta, default_seq = 1e-6, 10000.0, 2048

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        return options(config, self.architecture, {**_LLAMA, "experts": (0,)})

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        return {**_decoder_fields(config, spec), "attention_bias": config.model.bias, "mlp_bias": config.model.bias}

    def values(self, fields: Fields) -> dict[str, Any]:
        bias = fields.take("attention_bias", bool, False)
        fields.expect("mlp_bias", bias)
        return {**_decoder_values(fields, self.default_eps, self.default_theta, self.default_seq), "bias": bias}

    def pieces(self, config: Config, spec: ModelSpec) -> Iterator[Piece]:
        yield Piece("embedding.tokens.weight", "model.embed_tokens.weight")
        for index in range(config.model.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            bias = config.model.bias
            yield Piece(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
            for part in "qkv":
                yield from _both(f"{ours}.attention.qkv.{part}", f"{theirs}.self_attn.{part}_proj", bias)
            yield from _both(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", bias)
            yield Piece(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
            if moe.has_experts(index, config.model):
                yield from self.expert_pieces(config, f"{ours}.moe", theirs)
            else:
                yield from _gated(f"{ours}.mlp", f"{theirs}.mlp", bias)
        yield Piece("head.norm.weight", "model.norm.weight")
        if not config.model.tied_embeddings:
            yield Piece("head.head.weight", "lm_head.weight")

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterable[Piece]:
        """The pieces of a layer's router and experts. ours: of the experts; theirs: of the whole layer."""
        raise NotImplementedError(f"{self.architecture} has no experts")


class Mixtral(Llama):
    """MixtralForCausalLM: experts in every layer, weights of the chosen ones normalised to sum 1."""

    model_type, architecture = "mixtral", "MixtralForCausalLM"
    default_eps, default_theta, default_seq = 1e-5, 1e6, 131072
    routers = {"kind": ("top_k",), "score": ("softmax",), "renormalise": ("before", "after"), "scaling": (1.0,),
               "capacity_factor": (None,), "eval_capacity_factor": (None,), "bias_rate": (0.0,)}  # fmt: skip

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        allowed = {**_LLAMA, "bias": (False,), "shared_experts": (0,), "expert_period": (1,), "dense_layers": (0,)}
        found = options(config, self.architecture, allowed)
        return found + _routing(spec, self.architecture, self.routers)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        assert spec.router is not None
        return {
            **_decoder_fields(config, spec),
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
            **_decoder_values(fields, self.default_eps, self.default_theta, self.default_seq),
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
               "capacity_factor": (None,), "eval_capacity_factor": (None,), "jitter": (0.0,)}  # fmt: skip

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        found = options(config, self.architecture, {**_LLAMA, "bias": (False,), "expert_period": (1,)})
        if not config.model.shared_experts:
            what = f"model.shared_experts=0: {self.architecture} of transformers has a shared expert in every layer"
            found.append(Problem(what, "model.shared_experts"))
        return found + _routing(spec, self.architecture, self.routers)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model, router = config.model, spec.router
        assert router is not None
        return {
            **_decoder_fields(config, spec),
            **_rope_fields(model, {"partial_rotary_factor": 1.0}),
            "partial_rotary_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": False,
            "moe_intermediate_size": moe.expert_ffn(model),
            "n_routed_experts": model.experts,
            "num_experts_per_tok": router.top_k,
            "n_shared_experts": model.shared_experts,
            "first_k_dense_replace": model.dense_layers,
            "routed_scaling_factor": router.scaling,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        for key, value in (("attention_bias", False), ("use_qk_norm", False), ("n_group", 1), ("topk_group", 1)):
            fields.expect(key, value)
        fields.expect("norm_topk_prob", True)
        return {
            **_decoder_values(fields, self.default_eps, self.default_theta, self.default_seq, partial=0.5),
            "bias": False,
            "experts": fields.take("n_routed_experts", int, 128),
            "expert_ffn": fields.take("moe_intermediate_size", int, 1408),
            "expert_period": 1,
            "dense_layers": fields.take("first_k_dense_replace", int, 1),
            "shared_experts": fields.take("n_shared_experts", int, 1),
            "router": {
                "kind": "top_k",
                "top_k": fields.take("num_experts_per_tok", int, 8),
                "score": "sigmoid",
                "renormalise": "before",
                "scaling": fields.take("routed_scaling_factor", float, 1.0),
                "bias_rate": 1e-3,  # that of DeepSeek-V3: a file does not say it, and a rate of 0 drops the biases
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
        yield from _gated(f"{ours}.shared", f"{theirs}.mlp.shared_experts")

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        if config.model.router.bias_rate > 0:
            return {}
        layers = (index for index in range(config.model.layers) if moe.has_experts(index, config.model))
        zeros = FixedTensor((config.model.experts,), 0.0)
        return {f"model.layers.{index}.mlp.gate.e_score_correction_bias": zeros for index in layers}


_LLAMA: dict[str, tuple[Any, ...]] = {"norm": ("rmsnorm",), "position": ("rope",), "activation": ("swiglu",)}


def _decoder_fields(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """What all classes after Llama have in common."""
    model = config.model
    return {
        "vocab_size": spec.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": transformer.ffn_size(model),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": transformer.kv_heads(model),
        "head_dim": model.hidden // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        **_rope_fields(model),
        "attention_dropout": model.attention_dropout,
    }


def _decoder_values(fields: Fields, eps: float, theta: float, seq: int, partial: float = 1.0) -> dict[str, Any]:
    """The values that `_decoder_fields` describes; the arguments are the defaults of the class."""
    fields.expect("hidden_act", "silu")
    hidden, heads = fields.take("hidden_size", int, 4096), fields.take("num_attention_heads", int, 32)
    fields.expect("head_dim", hidden // max(1, heads), None)
    return {
        "vocab": fields.take("vocab_size", int, 32000),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.take("num_key_value_heads", int, None),
        "layers": fields.take("num_hidden_layers", int, 32),
        "ffn": fields.take("intermediate_size", int),
        "seq": fields.take("max_position_embeddings", int, seq),
        "norm": "rmsnorm",
        "norm_eps": fields.take("rms_norm_eps", float, eps),
        "activation": "swiglu",
        "position": "rope",
        **fields.rotary(theta, partial),
        "init_std": fields.take("initializer_range", float, 0.02),
        "tied_embeddings": fields.take("tie_word_embeddings", bool, False),
    }


def _rope_fields(model: ModelConfig, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The rotary frequencies, as transformers 5 reads them and as earlier versions do. more: beside the scaling."""
    scaling = {key: getattr(model, name) for key, name in ROPE_KEYS[model.rope_scaling].items()}
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    parameters = {"rope_type": kind, **scaling, **(more or {})}
    return {
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, **parameters},
        "rope_scaling": parameters if scaling else None,
    }


def _routing(spec: ModelSpec, family: str, allowed: dict[str, tuple[Any, ...]]) -> list[Problem]:
    """The problems of a router with a family that knows only some values of some keys."""
    if spec.router is None:
        return [Problem(f"model.experts=0: {family} of transformers has experts", "model.experts")]
    found = []
    for key, values in allowed.items():
        if (value := getattr(spec.router, key)) not in values:
            theirs = " or ".join("null" if one is None else str(one) for one in values)
            what = f"model.router.{key}={value}: {family} of transformers has {theirs}"
            found.append(Problem(what, f"model.router.{key}"))
    if spec.router.top_k == 1:
        what = f"model.router.top_k=1: {family} gives a single expert the weight 1, and our model its score"
        found.append(Problem(what, "model.router.top_k"))
    return found


def _both(ours: str, theirs: str, bias: bool = True, transposed: bool = False) -> Iterator[Piece]:
    """A weight and, with `bias`, a bias."""
    yield Piece(f"{ours}.weight", f"{theirs}.weight", transposed=transposed)
    if bias:
        yield Piece(f"{ours}.bias", f"{theirs}.bias")


def _gated(ours: str, theirs: str, bias: bool = False) -> Iterator[Piece]:
    yield from _both(f"{ours}.up.gate", f"{theirs}.gate_proj", bias)
    yield from _both(f"{ours}.up.up", f"{theirs}.up_proj", bias)
    yield from _both(f"{ours}.down", f"{theirs}.down_proj", bias)


def _theirs(names: dict[str, str], ours: str) -> str:
    return next(theirs for theirs, name in names.items() if name == ours)


FAMILIES = (Gpt2(), Llama(), Mixtral(), Glm4Moe())
