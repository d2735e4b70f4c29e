"""The classes of transformers without experts that compute what a gpt does: GPT-2, Llama, Mistral, Phi-3
and OLMo 2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.config_fields import ROPE_KEYS, Fields
from parallelrun.models.hugging_face import PLAIN, Family, Field, Piece, both, options, routing_differences
from parallelrun.models.moe import spec as moe
from parallelrun.models.transformer import spec as transformer
from parallelrun.models.transformer.latent_spec import rotary_growth
from parallelrun.planner.model.model_spec import ModelSpec

Allowed = dict[str, tuple[Any, ...]]
# Of the classes after GPT-2: options of `model`, and of `model.router`.
DEFAULTS = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "head_bias": False, "experts": 0,
            "kv_lora_rank": None, "qk_norm": None, "norm_position": "pre", "window": None,
            **{key: off for key, (off,) in PLAIN.items()}}  # fmt: skip
ROUTING = {"kind": "top_k", "scaling": 1.0, "capacity_factor": None, "eval_capacity_factor": None, "bias_rate": 0.0,
           "n_group": 1, "jitter": 0.0}  # fmt: skip
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}  # theirs -> ours


class Gpt2(Family):
    """GPT2LMHeadModel, which stores projections transposed (Conv1D), and q, k, v as one."""

    model_type, architecture, prefix = "gpt2", "GPT2LMHeadModel", "transformer."
    skipped = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"
    copies = (("lm_head.weight", "transformer.wte.weight"),)

    table = (
        Field("vocab_size", "vocab", int, 50257),
        Field("n_positions", "seq", int, 1024),
        Field("n_embd", "hidden", int, 768),
        Field("n_layer", "layers", int, 12),
        Field("n_head", "heads", int, 12),
        Field("n_inner", "ffn", int, None),
        Field("activation_function", "activation", GELUS, "gelu_new"),
        Field("layer_norm_epsilon", "norm_eps", float, 1e-5),
        Field("initializer_range", "init_std", float, 0.02),
        Field("tie_word_embeddings", "tied_embeddings", bool, True),
    )
    expected = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        model = config.model
        allowed = {**PLAIN, "norm": ("layernorm",), "position": ("learned",), "bias": (True,),
                   "activation": tuple(dict.fromkeys(GELUS.values())), "norm_bias": (None, True),
                   "head_bias": (False,), "experts": (0,), "kv_heads": (None, model.heads),
                   "head_dim": (None, model.hidden // model.heads), "qk_norm": (None,), "norm_position": ("pre",),
                   "window": (None,), "qkv_bias": (None, True)}  # fmt: skip
        return options(model, "model", self.architecture, allowed)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.dropout)
        return {**super().fields(config, spec), **dropout, "attn_pdrop": config.model.attention_dropout}

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


def decoder_table(eps: float, seq: int, tied: bool = False, **sizes: int) -> tuple[Field, ...]:
    """Return the fields that Llama and all later classes have. The arguments are defaults of the class."""
    sizes = {"vocab": 32000, "hidden": 4096, "layers": 32, "heads": 32, **sizes}
    return (
        Field("vocab_size", "vocab", int, sizes["vocab"]),
        Field("hidden_size", "hidden", int, sizes["hidden"]),
        Field("intermediate_size", "ffn", int),
        Field("num_hidden_layers", "layers", int, sizes["layers"]),
        Field("num_attention_heads", "heads", int, sizes["heads"]),
        Field("num_key_value_heads", "kv_heads", int, sizes.get("kv_heads")),
        Field("max_position_embeddings", "seq", int, seq),
        Field("initializer_range", "init_std", float, 0.02),
        Field("rms_norm_eps", "norm_eps", float, eps),
        Field("tie_word_embeddings", "tied_embeddings", bool, tied),
    )


class Decoder(Family):
    """Llama and the classes after it. The rotary embedding rotates the halves of a head, as ours does.

    theta, rotated, head_size: the defaults of the rotary base, of the share of a head that is rotated, and of the size
    of a head (None: hidden / heads). norms: the names of a layer's norms by ours. norm_offset: our weights of norms
    less the stored ones. latent: whether it has latent attention. routing: the values of `model.router` of which
    config.json says nothing.
    """

    skipped = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
    copies: ClassVar[tuple[tuple[str, str], ...]] = (("lm_head.weight", "model.embed_tokens.weight"),)
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    theta, rotated, latent = 10000.0, 1.0, False
    head_size: ClassVar[int | None] = None
    norms: ClassVar[Mapping[str, str]] = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    norm_offset = 0.0
    implied: ClassVar[Mapping[str, Any]] = {"bias": False}
    routing: ClassVar[Mapping[str, Any]] = {}
    free: ClassVar[Set[str]] = frozenset()

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        """An option that no field tells has the value that the class implies, else the default of all classes."""
        told = {field.ours for field in self.table} | self.free
        model = {key: value for key, value in DEFAULTS.items() if key not in told} | dict(self.implied)
        allowed: Allowed = {"qkv_bias": (None, config.model.bias), **{key: (value,) for key, value in model.items()}}
        problems = options(config.model, "model", self.architecture, allowed)
        routing = {**ROUTING, **self.routing}
        routers: Allowed = {key: (value,) for key, value in routing.items() if f"router.{key}" not in told}
        if routing.get("renormalise") == "before":
            routers["renormalise"] = "before", "after"  # the same function
        return problems + (routing_differences(spec, self.architecture, routers) if self.routing else [])

    def head_dim(self, model: Mapping[str, Any]) -> int:
        """Return what the class calls the size of a head. model: the values of `model` by key."""
        return int(model.get("head_dim") or model["hidden"] // max(1, model["heads"]))

    def head_values(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        """The value of `model.head_dim`, where it is not hidden / heads."""
        size = fields.take("head_dim", int, self.head_size)
        return {} if size in (None, self.head_dim(values)) else {"head_dim": size}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model = config.model
        more = {"head_dim": self.head_dim(vars(model)), "attention_dropout": model.attention_dropout}
        return {**super().fields(config, spec), **more, **rope_fields(model)}

    def values(self, fields: Fields) -> dict[str, Any]:
        values = super().values(fields)
        values |= self.head_values(fields, values)
        values |= fields.rotary(self.theta, self.rotated, self.latent)
        if "router" in values:
            values["router"] |= self.routing
        return {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", **self.implied, **values}

    def pieces(self, config: Config, spec: ModelSpec) -> Iterator[Piece]:
        yield Piece("embedding.tokens.weight", "model.embed_tokens.weight")
        for index in range(config.model.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            first, *others = (self.norm_piece(f"{ours}.{a}", f"{theirs}.{b}") for a, b in self.norms.items())
            yield first
            yield from self.attention_pieces(config, ours, theirs)
            yield from others
            if moe.has_experts(index, config.model):
                yield from self.expert_pieces(config, f"{ours}.moe", theirs)
            else:
                yield from self.mlp_pieces(config, f"{ours}.mlp", f"{theirs}.mlp")
        yield self.norm_piece("head.norm", "model.norm")
        if not config.model.tied_embeddings:
            yield Piece("head.head.weight", "lm_head.weight")

    def norm_piece(self, ours: str, theirs: str) -> Piece:
        """The piece of a norm."""
        return Piece(f"{ours}.weight", f"{theirs}.weight", offset=self.norm_offset)

    def attention_pieces(self, config: Config, ours: str, theirs: str) -> Iterable[Piece]:
        """The pieces of a layer's attention. ours, theirs: of the whole layer."""
        biased = transformer.qkv_has_bias(config.model)
        for part in "qkv":
            yield from both(f"{ours}.attention.qkv.{part}", f"{theirs}.self_attn.{part}_proj", biased)
        for part in "qk" if config.model.qk_norm else "":
            yield self.norm_piece(f"{ours}.attention.{part}_norm", f"{theirs}.self_attn.{part}_norm")
        if config.model.sinks:
            yield Piece(f"{ours}.attention.product.sinks", f"{theirs}.self_attn.sinks")
        yield from both(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", config.model.bias)

    def mlp_pieces(self, config: Config, ours: str, theirs: str) -> Iterable[Piece]:
        """The pieces of an MLP without experts."""
        return gated(ours, theirs, config.model.bias)

    def expert_pieces(self, config: Config, ours: str, theirs: str) -> Iterable[Piece]:
        """The pieces of a layer's router and experts. ours: of the experts; theirs: of the whole layer."""
        raise NotImplementedError(f"{self.architecture} has no experts")


class Llama(Decoder):
    """LlamaForCausalLM: Llama 1, 2 and 3."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    table = (*decoder_table(eps=1e-6, seq=2048), Field("attention_bias", "bias", bool, False))
    implied: ClassVar[Mapping[str, Any]] = {}

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        return {**super().fields(config, spec), "mlp_bias": config.model.bias}

    def values(self, fields: Fields) -> dict[str, Any]:
        values = super().values(fields)
        fields.expect("mlp_bias", values["bias"])
        return values


class Mistral(Decoder):
    """MistralForCausalLM: Llama without biases, and with a sliding window."""

    model_type, architecture = "mistral", "MistralForCausalLM"
    table = (
        *decoder_table(eps=1e-6, seq=131072, kv_heads=8),
        Field("sliding_window", "window", int, 4096, nullable=True),
    )


class Phi3(Decoder):
    """Phi3ForCausalLM: Mistral that stores q, k, v as one tensor, and gate and up."""

    model_type, architecture = "phi3", "Phi3ForCausalLM"
    table = (
        *decoder_table(eps=1e-5, seq=4096, vocab=32064, hidden=3072),
        Field("sliding_window", "window", int, None),
    )
    implied: ClassVar[Mapping[str, Any]] = {"bias": False, "rope_scaling": "none"}

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        widths = {"head_dim": (None, config.model.hidden // config.model.heads)}
        return super().differences(config, spec) + options(config.model, "model", self.architecture, widths)

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.drop("original_max_position_embeddings")  # read by frequencies that are refused
        values = super().values(fields)
        if values["rope_scaling"] != "none":
            fields.note(f"rope_scaling is {values['rope_scaling']}, and phi3 with default frequencies alone is built")
        return values

    def attention_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        start = 0
        for part, size in transformer.projections(config.model).items():
            yield Piece(f"{ours}.attention.qkv.{part}.weight", f"{theirs}.self_attn.qkv_proj.weight", start=start)
            start += size
        yield Piece(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight")

    def mlp_pieces(self, config: Config, ours: str, theirs: str) -> Iterator[Piece]:
        for index, part in enumerate(("gate", "up")):
            start = index * transformer.ffn_size(config.model)
            yield Piece(f"{ours}.up.{part}.weight", f"{theirs}.gate_up_proj.weight", start=start)
        yield Piece(f"{ours}.down.weight", f"{theirs}.down_proj.weight")


class Olmo2(Decoder):
    """Olmo2ForCausalLM: norms of results in place of inputs, and of all queries and all keys together; no biases."""

    model_type, architecture = "olmo2", "Olmo2ForCausalLM"
    table = decoder_table(eps=1e-5, seq=2048, vocab=50304)
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    implied: ClassVar[Mapping[str, Any]] = {"bias": False, "qk_norm": "all", "norm_position": "post"}
    norms: ClassVar[Mapping[str, str]] = {
        "attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"
    }  # fmt: skip


def rope_fields(model: ModelConfig, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The rotary frequencies, as transformers 5 reads them and as earlier versions do. more: beside the scaling."""
    scaling = {key: getattr(model, name) for key, name in ROPE_KEYS[model.rope_scaling].items()}
    if model.rope_scaling == "yarn" and not (model.rope_mscale and model.rope_mscale_all_dim):
        del scaling["mscale"], scaling["mscale_all_dim"]  # transformers reads both, or neither
        scaling |= {"attention_factor": rotary_growth(model)} if model.rope_mscale != 1.0 else {}
    if model.rope_scaling == "yarn" and not model.rope_truncate:
        scaling["truncate"] = False
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
