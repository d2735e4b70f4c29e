"""What a gpt is made of: blocks, layers, parameters and FLOPs. Torch-free; `network.py` is built to match it.

Pre-LN decoder (GPT-2, Radford et al. 2019; GPT-3, Brown et al. 2020). Options make it a Llama (Touvron et al. 2023):
`position=rope`, `norm=rmsnorm`, `activation=swiglu`, `kv_heads`, `bias=false`, `tied_embeddings=false`.
"""

from __future__ import annotations

from math import sqrt

from parallelrun.config.schema import Config, ModelConfig
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec, renamed, too_small
from parallelrun.models.moe import spec as moe

ZEROS = Initialiser("zeros")
ONES = Initialiser("ones")
CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "relu", "swiglu"),
    "position": ("learned", "rope"),
}
TIED = ("head.head.weight", "embedding.tokens.weight")


def ffn_size(model: ModelConfig) -> int:
    """Width of the MLP's inside: as given, else 4 x hidden."""
    return model.ffn if model.ffn is not None else 4 * model.hidden


def kv_heads(model: ModelConfig) -> int:
    """Key and value heads: as given, else as many as query heads."""
    return model.kv_heads if model.kv_heads is not None else model.heads


def projections(model: ModelConfig) -> dict[str, int]:
    """Outputs of the attention's column layer, by name: q over all heads, k and v over the kv heads."""
    head_dim = model.hidden // model.heads
    return {"q": model.hidden, "k": kv_heads(model) * head_dim, "v": kv_heads(model) * head_dim}


def expansions(model: ModelConfig) -> dict[str, int]:
    """Outputs of the MLP's column layer, by name."""
    ffn = ffn_size(model)
    return {"gate": ffn, "up": ffn} if model.activation == "swiglu" else {"up": ffn}


def check(model: ModelConfig) -> list[Problem]:
    """Everything about `model` that no plan could make right, each with the nearest legal value."""
    problems = [
        Problem(
            f"model.{key}={getattr(model, key)} is unknown",
            f"model.{key}",
            " or ".join(f"model.{key}={one}" for one in legal),
        )
        for key, legal in CHOICES.items()
        if getattr(model, key) not in legal
    ]
    sizes = {key: getattr(model, key) for key in ("layers", "hidden", "heads", "seq")}
    sizes |= {"kv_heads": kv_heads(model), "ffn": ffn_size(model)}
    if too_small(sizes):
        return problems + too_small(sizes)
    if model.hidden % model.heads:
        nearest = max(model.heads, round(model.hidden / model.heads) * model.heads)
        what = f"model.hidden={model.hidden} does not divide into model.heads={model.heads}"
        problems.append(Problem(what, "model.hidden", f"model.hidden={nearest}", kind="arithmetic"))
    elif model.position == "rope" and (model.hidden // model.heads) % 2:
        what = f"rotary positions need an even head size; hidden / heads is {model.hidden // model.heads}"
        problems.append(Problem(what, "model.hidden", f"model.hidden={2 * model.hidden}", kind="arithmetic"))
    if model.heads % kv_heads(model):
        legal = min((n for n in range(1, model.heads + 1) if model.heads % n == 0), key=_distance(kv_heads(model)))
        what = f"model.heads={model.heads} does not divide into model.kv_heads={kv_heads(model)}"
        problems.append(Problem(what, "model.kv_heads", f"model.kv_heads={legal}", kind="arithmetic"))
    return problems


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the gpt that `config.model` describes, over `vocab` token ids. Raises ConfigError."""
    model = config.model
    problems = check(model) or moe.check(model)
    if problems:
        raise ConfigError(*problems)
    kinds = [moe.has_experts(index, model) for index in range(model.layers)]
    first = {kind: _transformer(kinds.index(kind), model) for kind in set(kinds)}
    layers = tuple(renamed(first[kind], f"layers.{index}") for index, kind in enumerate(kinds))
    dense = not all(kinds)
    return ModelSpec(
        name=model.preset,
        kind="tokens",
        blocks=(_embedding(model, vocab), *layers, _head(model, vocab)),
        sample_shape=(model.seq,),
        boundary_shape=(model.seq, model.hidden),
        targets_per_sample=model.seq,
        vocab=vocab,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=kv_heads(model),
        ffn=ffn_size(model) if dense else 0,
        seq=model.seq,
        num_layers=model.layers,
        activation=model.activation,
        norm=model.norm,
        attention_dropout=model.attention_dropout,
        tied=(TIED,) if model.tied_embeddings else (),
        experts=model.experts,
        router=moe.router_spec(model),
    )


def _distance(wanted: int):
    return lambda candidate: abs(candidate - wanted)


def _embedding(model: ModelConfig, vocab: int) -> BlockSpec:
    normal = Initialiser("normal", model.init_std)
    weight = ParameterSpec("embedding.tokens.weight", (vocab, model.hidden), normal, "embedding")
    layers = [LayerSpec("embedding.tokens", "embedding", vocab, model.hidden, (weight,))]
    if model.position == "learned":
        position = ParameterSpec("embedding.position.weight", (model.seq, model.hidden), normal, "position")
        layers.append(LayerSpec("embedding.position", "position", model.hidden, model.hidden, (position,)))
    layers.append(dropout("embedding.dropout", model))
    return BlockSpec("embedding", "embedding", tuple(layers), forward_flops=0.0)


def _transformer(index: int, model: ModelConfig) -> BlockSpec:
    name, normal, residual = f"layers.{index}", *_initialisers(model)
    heads = {"q": model.heads, "k": kv_heads(model), "v": kv_heads(model)}
    inside = _experts(f"{name}.moe", model) if moe.has_experts(index, model) else _mlp(f"{name}.mlp", model)
    layers = (
        norm(f"{name}.attention_norm", model),
        columns(f"{name}.attention.qkv", model.hidden, projections(model), model.bias, normal, heads),
        row(f"{name}.attention.out", model.hidden, model.hidden, model.bias, residual),
        dropout(f"{name}.attention.dropout", model),
        norm(f"{name}.mlp_norm", model),
        *inside,
    )
    return BlockSpec(name, "transformer", layers, transformer_flops(layers, model))


def _initialisers(model: ModelConfig) -> tuple[Initialiser, Initialiser]:
    """(of most weights, of those whose output is added to the residual stream, which so keeps its scale: GPT-2)."""
    return Initialiser("normal", model.init_std), Initialiser("normal", model.init_std / sqrt(2 * model.layers))


def _mlp(name: str, model: ModelConfig) -> tuple[LayerSpec, ...]:
    normal, residual = _initialisers(model)
    return (
        columns(f"{name}.up", model.hidden, expansions(model), model.bias, normal),
        row(f"{name}.down", ffn_size(model), model.hidden, model.bias, residual),
        dropout(f"{name}.dropout", model),
    )


def _experts(name: str, model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Router, experts and, where there is one, the shared expert, in the place of the MLP."""
    normal, residual = _initialisers(model)
    layers = moe.router_and_experts(name, model, normal, residual)
    if model.shared_experts:
        outputs = moe.shared_expansions(model)
        layers.append(columns(f"{name}.shared.up", model.hidden, outputs, model.bias, normal))
        layers.append(row(f"{name}.shared.down", outputs["up"], model.hidden, model.bias, residual))
    return (*layers, dropout(f"{name}.dropout", model))


def transformer_flops(layers: tuple[LayerSpec, ...], model: ModelConfig) -> float:
    """Forward FLOPs of a block of those layers, for one sample: its products (of experts those that a token goes to),
    its scores and their product with v."""
    products = sum(layer.in_features * layer.out_features for layer in layers if layer.layer_role in ("columns", "row"))
    products += sum(moe.multiplied(layer, model) for layer in layers if layer.layer_role in ("router", "expert"))
    # Scores and their product with v, 2 s^2 h each; the causal half is counted too, as SC21 and every MFU figure does.
    return 2.0 * products * model.seq + 4.0 * model.seq**2 * model.hidden


def _head(model: ModelConfig, vocab: int) -> BlockSpec:
    own = ParameterSpec(TIED[0], (vocab, model.hidden), Initialiser("normal", model.init_std), "head")
    head = LayerSpec(
        "head.head",
        "head",
        model.hidden,
        vocab,
        parameters=() if model.tied_embeddings else (own,),
        tied=TIED[1] if model.tied_embeddings else None,
    )
    return BlockSpec("head", "head", (norm("head.norm", model), head), 2.0 * model.hidden * vocab * model.seq)


def columns(
    name: str,
    in_features: int,
    outputs: dict[str, int],
    bias: bool,
    initialiser: Initialiser,
    heads: dict[str, int] | None = None,
) -> LayerSpec:
    """A column layer: per output a weight (out, in) and, with `bias`, a bias (out)."""
    parameters = []
    for output, size in outputs.items():
        count = heads[output] if heads else None
        weight = ParameterSpec(f"{name}.{output}.weight", (size, in_features), initialiser, "columns", count)
        parameters.append(weight)
        if bias:
            parameters.append(ParameterSpec(f"{name}.{output}.bias", (size,), ZEROS, "columns", count))
    return LayerSpec(name, "columns", in_features, sum(outputs.values()), tuple(parameters))


def row(name: str, in_features: int, out_features: int, bias: bool, initialiser: Initialiser) -> LayerSpec:
    """A row layer: weight (out, in) and, with `bias`, a bias (out)."""
    parameters = [ParameterSpec(f"{name}.weight", (out_features, in_features), initialiser, "row")]
    if bias:
        parameters.append(ParameterSpec(f"{name}.bias", (out_features,), ZEROS, "row"))
    return LayerSpec(name, "row", in_features, out_features, tuple(parameters))


def linear(name: str, in_features: int, out_features: int, bias: bool, initialiser: Initialiser) -> LayerSpec:
    """A linear layer from the whole hidden size to the whole: weight (out, in) and, with `bias`, a bias (out)."""
    parameters = [ParameterSpec(f"{name}.weight", (out_features, in_features), initialiser, "linear")]
    if bias:
        parameters.append(ParameterSpec(f"{name}.bias", (out_features,), ZEROS, "linear"))
    return LayerSpec(name, "linear", in_features, out_features, tuple(parameters))


def norm(name: str, model: ModelConfig) -> LayerSpec:
    """A norm over hidden. RMSNorm has no bias; LayerNorm has one when the model has biases."""
    parameters = [ParameterSpec(f"{name}.weight", (model.hidden,), ONES, "norm")]
    if model.bias and model.norm == "layernorm":
        parameters.append(ParameterSpec(f"{name}.bias", (model.hidden,), ZEROS, "norm"))
    return LayerSpec(name, "norm", model.hidden, model.hidden, tuple(parameters))


def dropout(name: str, model: ModelConfig) -> LayerSpec:
    """What drops elements of hidden."""
    return LayerSpec(name, "dropout", model.hidden, model.hidden)
