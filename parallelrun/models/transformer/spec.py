"""Sizes, checks, layer specs and FLOPs of transformer blocks. `modules.py` builds the same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.models.transformer import latent_spec
from parallelrun.planner.model.model_spec import (
    GATED,
    BlockSpec,
    Initialiser,
    LayerSpec,
    ModelSpec,
    ParameterSpec,
    weight_and_bias,
)
from parallelrun.planner.model.model_spec.attention import AttentionSpec, LatentSpec

TEXT_KEYS = frozenset({
    "layers", "hidden", "ffn", "vocab", "seq", "norm", "norm_eps", "activation", "bias", "norm_bias", "tied_embeddings",
    "head_bias", "init_std", "label_smoothing", "z_loss", "dropout",
})  # fmt: skip  # of every model of tokens
ATTENTION_KEYS = frozenset({
    "heads", "kv_heads", "head_dim", "qk_norm", "qkv_bias", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "position", "attention_dropout", "rope_scaling", "sinks", "attention_softcap",
    "query_pre_attn_scalar", "scaled_embedding",
})  # fmt: skip
ROPE_KEYS = frozenset({
    "rope_theta", "rope_factor", "rope_original_seq", "rope_low_factor", "rope_high_factor", "rope_beta_fast",
    "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim", "rope_truncate",
})  # fmt: skip
TIED = ("head.head.weight", "embedding.tokens.weight")  # (copy, original)


def ffn_size(model: ModelConfig) -> int:
    """Inner width of the MLP: as given, else 4 x hidden."""
    return model.ffn if model.ffn is not None else 4 * model.hidden


def kv_heads(model: ModelConfig) -> int:
    """Key and value heads: as given, else as many as query heads."""
    return model.kv_heads if model.kv_heads is not None else model.heads


def head_dim(model: ModelConfig) -> int:
    """Features of a head of plain attention: as given, else hidden / heads."""
    return model.head_dim if model.head_dim is not None else model.hidden // model.heads


def projections(model: ModelConfig) -> dict[str, int]:
    """Outputs of the attention's column-parallel layer, by name: q over all heads, k and v over the kv heads."""
    kv_size = kv_heads(model) * head_dim(model)
    return {"q": model.heads * head_dim(model), "k": kv_size, "v": kv_size}


def qkv_has_bias(model: ModelConfig) -> bool:
    """Whether the projections to queries, keys and values have biases."""
    return model.bias if model.qkv_bias is None else model.qkv_bias


def expansions(model: ModelConfig, ffn: int) -> dict[str, int]:
    """Outputs of an MLP's column-parallel layer, by name, for an inner width of `ffn`."""
    return {"gate": ffn, "up": ffn} if model.activation in GATED else {"up": ffn}


def window_of(index: int, model: ModelConfig) -> int | None:
    """The window of layer `index`; None: it sees all. The last of every `global_period` layers has none."""
    return None if model.global_period and (index + 1) % model.global_period == 0 else model.window


def check(model: ModelConfig) -> list[Problem]:
    """Every problem of `model` that no plan could solve, each with the nearest legal value."""
    problems = latent_spec.check(model)
    heads, hidden, grouped = model.heads, model.hidden, kv_heads(model)
    if model.kv_lora_rank is not None:
        return problems + _check_scaling(model)  # heads have sizes of their own
    if model.head_dim is None and hidden % heads:
        fix = f"model.hidden={max(heads, round(hidden / heads) * heads)}"
        message = f"model.hidden={hidden} does not divide into model.heads={heads}"
        problems.append(Problem(message, "model.hidden", fix, kind="arithmetic"))
    elif model.position == "rope" and head_dim(model) % 2:
        size = "hidden / heads" if model.head_dim is None else "model.head_dim"
        where, twice = ("model.hidden", hidden) if model.head_dim is None else ("model.head_dim", model.head_dim)
        message = f"rotary positions need an even head size; {size} is {head_dim(model)}"
        problems.append(Problem(message, where, f"{where}={2 * twice}", kind="arithmetic"))
    problems += _check_scaling(model)
    if heads % grouped:
        legal = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - grouped))
        message = f"model.heads={heads} does not divide into model.kv_heads={grouped}"
        problems.append(Problem(message, "model.kv_heads", f"model.kv_heads={legal}", kind="arithmetic"))
    return problems


def _check_scaling(model: ModelConfig) -> list[Problem]:
    """Which waves are scaled must be in order."""
    if model.rope_scaling == "yarn" and model.rope_theta <= 1.0:
        message = f"model.rope_theta={model.rope_theta:g} is not above 1, and yarn divides by its logarithm"
        return [Problem(message, "model.rope_theta", "model.rope_theta=10000", kind="arithmetic")]
    pairs = {"llama3": ("rope_high_factor", "rope_low_factor", 4), "yarn": ("rope_beta_fast", "rope_beta_slow", 32)}
    if model.rope_scaling not in pairs:
        return []
    upper, lower, factor = pairs[model.rope_scaling]
    high, low = getattr(model, upper), getattr(model, lower)
    if high > low or (high == low and model.rope_scaling == "yarn"):  # one pair, at which scaling begins and ends
        return []
    message, fix = f"model.{upper}={high:g} is not above {lower}", f"model.{upper}={factor * low:g}"
    return [Problem(message, f"model.{upper}", fix, kind="arithmetic")]


def normal(model: ModelConfig) -> Initialiser:
    """The initialiser of most weights."""
    return Initialiser("normal", model.init_std)


def column_layer(
    name: str,
    in_features: int,
    outputs: dict[str, int],
    bias: bool,
    initialiser: Initialiser,
    heads: dict[str, int] | None = None,
) -> LayerSpec:
    """A column-parallel layer: per output a weight (out, in) and, with `bias`, a bias (out)."""
    parameters: list[ParameterSpec] = []
    for output, size in outputs.items():
        shape, count = (size, in_features), heads[output] if heads else None
        parameters += weight_and_bias(f"{name}.{output}", shape, initialiser, "column_parallel", bias, count)
    return LayerSpec(name, "column_parallel", in_features, sum(outputs.values()), tuple(parameters))


def linear_layer(
    name: str, in_features: int, out_features: int, bias: bool, initialiser: Initialiser, role: str
) -> LayerSpec:
    """A layer of role `row_parallel` or `linear`: a weight (out, in) and, with `bias`, a bias (out)."""
    parameters = weight_and_bias(name, (out_features, in_features), initialiser, role, bias)
    return LayerSpec(name, role, in_features, out_features, parameters)


def norms_have_bias(model: ModelConfig) -> bool:
    """RMSNorm has no bias; LayerNorm has one when the model has biases, unless model.norm_bias says otherwise."""
    return model.norm == "layernorm" and (model.bias if model.norm_bias is None else model.norm_bias)


def norm_layer(name: str, model: ModelConfig, features: int | None = None) -> LayerSpec:
    """A norm over hidden, or other features."""
    size = features or model.hidden
    parameters = weight_and_bias(name, (size,), Initialiser("ones"), "norm", norms_have_bias(model))
    return LayerSpec(name, "norm", size, size, parameters)


def _qk_norm(name: str, model: ModelConfig, heads: int) -> LayerSpec:
    """The norm of the features of each of `heads` heads, or of all together, as `model.qk_norm` says."""
    features, ones = heads * head_dim(model), Initialiser("ones")
    if model.qk_norm == "all":
        parameters = weight_and_bias(name, (features,), ones, "norm", norms_have_bias(model), heads)
        return LayerSpec(name, "norm", features, features, parameters)
    parameters = weight_and_bias(name, (head_dim(model),), ones, "per_head", norms_have_bias(model))
    return LayerSpec(name, "per_head", features, features, parameters)


def dropout_layer(name: str, model: ModelConfig) -> LayerSpec:
    """Dropout of elements of hidden."""
    return LayerSpec(name, "dropout", model.hidden, model.hidden)


def attention_layers(name: str, model: ModelConfig, out_initialiser: Initialiser) -> tuple[LayerSpec, ...]:
    """Self-attention: the projections, the output layer and its dropout."""
    sizes, hidden = latent_spec.latent_sizes(model), model.hidden
    values = model.heads * (head_dim(model) if sizes is None else sizes.value)
    if sizes is not None:
        opened = _latent_layers(name, model, sizes)
    else:
        heads = {"q": model.heads, "k": kv_heads(model), "v": kv_heads(model)}
        sizes_of, biased = projections(model), qkv_has_bias(model)
        opened = (
            column_layer(f"{name}.qkv", hidden, sizes_of, biased, normal(model), heads),
            *(_qk_norm(f"{name}.{part}_norm", model, heads[part]) for part in "qk" if model.qk_norm),
        )
    sinks = ParameterSpec(f"{name}.product.sinks", (model.heads,), normal(model), "attention", model.heads)
    product = LayerSpec(f"{name}.product", "attention", values, values, (sinks,))
    return (
        *opened,
        *((product,) if model.sinks else ()),
        linear_layer(f"{name}.out", values, hidden, model.bias, out_initialiser, "row_parallel"),
        dropout_layer(f"{name}.dropout", model),
    )


def _latent_layers(name: str, model: ModelConfig, sizes: LatentSpec) -> tuple[LayerSpec, ...]:
    """The layers of latent attention before its product, in the order in which they run. Those that give heads have no
    bias, as in the published models."""
    init, heads, hidden, q_rank, kv_rank = normal(model), model.heads, model.hidden, sizes.q_rank, sizes.kv_rank
    latent: list[LayerSpec] = []
    if q_rank is not None:
        latent.append(linear_layer(f"{name}.q_a", hidden, q_rank, model.bias, init, "linear"))
        latent.append(norm_layer(f"{name}.q_a_norm", model, q_rank))

    def heads_layer(part: str, read: int, features: int) -> LayerSpec:
        shape = (heads * features, read)
        (weight,) = weight_and_bias(f"{name}.{part}", shape, init, "column_parallel", bias=False, heads=heads)
        return LayerSpec(f"{name}.{part}", "column_parallel", read, heads * features, (weight,))

    return (
        *latent,
        linear_layer(f"{name}.kv_a", hidden, kv_rank + sizes.rope, model.bias, init, "linear"),
        norm_layer(f"{name}.kv_a_norm", model, kv_rank),
        LayerSpec(f"{name}.shared_key", "shared_input", sizes.rope, sizes.rope),
        heads_layer("q" if q_rank is None else "q_b", q_rank or hidden, sizes.head_dim),
        heads_layer("kv_b", kv_rank, sizes.nope + sizes.value),
    )


def up_and_down(
    name: str, model: ModelConfig, ffn: int, inner: Initialiser, outer: Initialiser
) -> tuple[LayerSpec, LayerSpec]:
    """An MLP without dropout: up (and gate), then down. inner, outer: initialisers of the former and of down."""
    return (
        column_layer(f"{name}.up", model.hidden, expansions(model, ffn), model.bias, inner),
        linear_layer(f"{name}.down", ffn, model.hidden, model.bias, outer, "row_parallel"),
    )


def mlp_layers(name: str, model: ModelConfig, inner: Initialiser, outer: Initialiser) -> tuple[LayerSpec, ...]:
    """The MLP with its dropout; see `up_and_down`."""
    layers = up_and_down(name, model, ffn_size(model), inner, outer)
    return (*layers, dropout_layer(f"{name}.dropout", model))


def embedding_layers(model: ModelConfig, vocab: int) -> list[LayerSpec]:
    """The token embedding and, for learned positions, the position embedding."""
    hidden, init = model.hidden, normal(model)
    weight = ParameterSpec("embedding.tokens.weight", (vocab, hidden), init, "embedding")
    layers = [LayerSpec("embedding.tokens", "embedding", vocab, hidden, (weight,))]
    if model.position == "learned":
        positions = ParameterSpec("embedding.position.weight", (model.seq, hidden), init, "position_embedding")
        layers.append(LayerSpec("embedding.position", "position_embedding", hidden, hidden, (positions,)))
    return layers


def head_layer(model: ModelConfig, vocab: int, tied: bool) -> LayerSpec:
    """The layer that gives the logits. A tied one has no weight of its own: it reads the embedding's."""
    parameters = weight_and_bias("head.head", (vocab, model.hidden), normal(model), "head", model.head_bias)
    return LayerSpec(
        "head.head", "head", model.hidden, vocab, parameters[1:] if tied else parameters, tied=TIED[1] if tied else None
    )


def attention_spec(model: ModelConfig, window: int | None = None) -> AttentionSpec:
    """What a block's attention sees and how it scores. window: of a causal model's layer."""
    attended = None if window is None or window >= model.seq else window * (2.0 - window / model.seq)
    return AttentionSpec(window, attended, model.attention_softcap, model.sinks)


def transformer_flops(
    layers: Iterable[LayerSpec], model: ModelConfig, expert_products: int = 0, attended: float | None = None
) -> float:
    """Forward FLOPs of a block of those layers, for one sample. expert_products: weights of routers and experts that
    one token is multiplied by. attended: see `AttentionSpec`."""
    roles = ("column_parallel", "row_parallel", "linear")
    products = sum(layer.in_features * layer.out_features for layer in layers if layer.layer_role in roles)
    # Scores and their product with v, 2 s^2 h each; the causal half is counted too, as SC21 and every MFU figure does.
    sizes = latent_spec.latent_sizes(model)
    features = model.heads * (2 * head_dim(model) if sizes is None else sizes.head_dim + sizes.value)
    return 2.0 * (products + expert_products) * model.seq + 2.0 * model.seq * (attended or model.seq) * features


def transformer_spec(model: ModelConfig, vocab: int, blocks: tuple[BlockSpec, ...], **more: Any) -> ModelSpec:
    """The spec of a transformer over tokens. more: fields of ModelSpec that differ from model to model."""
    values: dict[str, Any] = {"ffn": ffn_size(model), **more}
    return ModelSpec(
        name=model.preset,
        kind="tokens",
        blocks=blocks,
        sample_shape=(model.seq,),
        boundary_shape=(model.seq, model.hidden),
        targets_per_sample=model.seq,
        vocab=vocab,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=kv_heads(model),
        head_dim=model.head_dim,
        seq=model.seq,
        num_layers=model.layers,
        activation=model.activation,
        norm=model.norm,
        attention_dropout=model.attention_dropout,
        z_loss=model.z_loss,
        latent=latent_spec.latent_sizes(model),
        **values,
    )
