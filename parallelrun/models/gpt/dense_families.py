"""The classes of transformers without experts that compute what a gpt does: GPT-2 and Llama."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.hugging_face import ROPE_KEYS, Family, Fields, Piece, both, options
from parallelrun.models.moe import spec as moe
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.model_spec import ModelSpec

GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}  # theirs -> ours


class Gpt2(Family):
    """GPT2LMHeadModel, which stores projections transposed (Conv1D), and q, k, v as one."""

    model_type, architecture, prefix = "gpt2", "GPT2LMHeadModel", "transformer."
    skipped = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"
    copies = (("lm_head.weight", "transformer.wte.weight"),)

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        allowed = {"norm": ("layernorm",), "position": ("learned",), "activation": tuple(dict.fromkeys(GELUS.values())),
                   "bias": (True,), "norm_bias": (None, True), "head_bias": (False,), "experts": (0,),
                   "kv_heads": (None, config.model.heads)}  # fmt: skip
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
            "activation_function": next(theirs for theirs, ours in GELUS.items() if ours == model.activation),
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
            yield from both(f"{ours}.attention_norm", f"{theirs}.ln_1")
            for number, part in enumerate("qkv"):
                name, key, start = f"{ours}.attention.qkv.{part}", f"{theirs}.attn.c_attn", number * hidden
                yield Piece(f"{name}.weight", f"{key}.weight", transposed=True, start=start)
                yield Piece(f"{name}.bias", f"{key}.bias", start=start)
            yield from both(f"{ours}.attention.out", f"{theirs}.attn.c_proj", transposed=True)
            yield from both(f"{ours}.mlp_norm", f"{theirs}.ln_2")
            yield from both(f"{ours}.mlp.up.up", f"{theirs}.mlp.c_fc", transposed=True)
            yield from both(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", transposed=True)
        yield from both("head.norm", "transformer.ln_f")
        if not config.model.tied_embeddings:
            yield Piece("head.head.weight", "lm_head.weight")


class Llama(Family):
    """LlamaForCausalLM: Llama 1, 2 and 3. Its rotary embedding rotates the halves of a head, as ours does."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
    copies = (("lm_head.weight", "model.embed_tokens.weight"),)
    default_eps, default_theta, default_seq = 1e-6, 10000.0, 2048

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        return options(config, self.architecture, {**LLAMA_KEYS, "experts": (0,)})

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        return {**decoder_fields(config, spec), "attention_bias": config.model.bias, "mlp_bias": config.model.bias}

    def values(self, fields: Fields) -> dict[str, Any]:
        bias = fields.take("attention_bias", bool, False)
        fields.expect("mlp_bias", bias)
        return {**decoder_values(fields, self.default_eps, self.default_theta, self.default_seq), "bias": bias}

    def pieces(self, config: Config, spec: ModelSpec) -> Iterator[Piece]:
        yield Piece("embedding.tokens.weight", "model.embed_tokens.weight")
        for index in range(config.model.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            bias = config.model.bias
            yield Piece(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
            yield from self.attention_pieces(config, ours, theirs)
            yield Piece(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
            if moe.has_experts(index, config.model):
                yield from self.expert_pieces(config, f"{ours}.moe", theirs)
            else:
                yield from gated(f"{ours}.mlp", f"{theirs}.mlp", bias)
        yield Piece("head.norm.weight", "model.norm.weight")
        if not config.model.tied_embeddings:
            yield Piece("head.head.weight", "lm_head.weight")

    def attention_pieces(self, config: Config, ours: str, theirs: str) -> Iterable[Piece]:
        """The pieces of a layer's attention. ours, theirs: of the whole layer."""
        for part in "qkv":
            yield from both(f"{ours}.attention.qkv.{part}", f"{theirs}.self_attn.{part}_proj", config.model.bias)
        yield from both(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", config.model.bias)

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterable[Piece]:
        """The pieces of a layer's router and experts. ours: of the experts; theirs: of the whole layer."""
        raise NotImplementedError(f"{self.architecture} has no experts")


LLAMA_KEYS: dict[str, tuple[Any, ...]] = {
    "norm": ("rmsnorm",), "position": ("rope",), "activation": ("swiglu",), "head_bias": (False,),
    "kv_lora_rank": (None,),
}  # fmt: skip


def decoder_fields(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json fields that all classes after Llama share."""
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
        **rope_fields(model),
        "attention_dropout": model.attention_dropout,
    }


def decoder_values(
    fields: Fields, eps: float, theta: float, seq: int, partial: float = 1.0, yarn: bool = False
) -> dict[str, Any]:
    """The values that `decoder_fields` describes; the arguments are the defaults of the class. yarn: it is built for
    the attention of this class."""
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
        **fields.rotary(theta, partial, yarn),
        "init_std": fields.take("initializer_range", float, 0.02),
        "tied_embeddings": fields.take("tie_word_embeddings", bool, False),
    }


def rope_fields(model: ModelConfig, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The rotary frequencies, as transformers 5 reads them and as earlier versions do. more: beside the scaling."""
    scaling = {key: getattr(model, name) for key, name in ROPE_KEYS[model.rope_scaling].items()}
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    parameters = {"rope_type": kind, **scaling, **(more or {})}
    return {
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, **parameters},
        "rope_scaling": parameters if scaling else None,
    }


def gated(ours: str, theirs: str, bias: bool = False) -> Iterator[Piece]:
    yield from both(f"{ours}.up.gate", f"{theirs}.gate_proj", bias)
    yield from both(f"{ours}.up.up", f"{theirs}.up_proj", bias)
    yield from both(f"{ours}.down", f"{theirs}.down_proj", bias)
