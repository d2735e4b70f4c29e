"""What an mlp is made of. Torch-free; `network.py` is built to match it.

On `dataset=synthetic` a sample is a vector of `hidden` features and the model says its class; on images the features
are the pixels, so `hidden` must be their number (digits: 64). On tokens each position
is embedded and predicts its next token alone, so what it can learn is how often tokens follow one another.
"""

from __future__ import annotations

from math import sqrt

from parallelrun import registry
from parallelrun.config.schema import Config, ModelConfig
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec, too_small
from parallelrun.models.gpt.spec import CHOICES, TIED, columns, expansions, ffn_size, norm, row


def reads_tokens(config: Config) -> bool:
    """Are the samples token ids, rather than features (of images: their pixels)?"""
    return not hasattr(registry.load("datasets", config.dataset.name), "image_shape")


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the mlp that `config.model` describes, over `vocab` token ids or classes. Raises ConfigError."""
    model, tokens = config.model, reads_tokens(config)
    problems = [
        Problem(
            f"model.{key}={getattr(model, key)} is unknown",
            f"model.{key}",
            " or ".join(f"model.{key}={one}" for one in CHOICES[key]),
        )
        for key in ("norm", "activation")
        if getattr(model, key) not in CHOICES[key]
    ]
    sizes = {"layers": model.layers, "hidden": model.hidden, "ffn": ffn_size(model), "seq": model.seq}
    problems += too_small(sizes)
    if problems:
        raise ConfigError(*problems)
    rows = model.seq if tokens else 1
    tied = tokens and model.tied_embeddings
    layers = [_layer(f"layers.{index}", model, rows) for index in range(model.layers)]
    return ModelSpec(
        name=model.preset,
        kind="tokens" if tokens else "features",
        blocks=(*((_embedding(model, vocab),) if tokens else ()), *layers, _head(model, vocab, rows, tied)),
        sample_shape=(model.seq,) if tokens else (model.hidden,),
        boundary_shape=(model.seq, model.hidden) if tokens else (model.hidden,),
        targets_per_sample=rows,
        vocab=vocab,
        hidden=model.hidden,
        ffn=ffn_size(model),
        seq=model.seq if tokens else 0,
        num_layers=model.layers,
        activation=model.activation,
        norm=model.norm,
        tied=(TIED,) if tied else (),
    )


def _embedding(model: ModelConfig, vocab: int) -> BlockSpec:
    normal = Initialiser("normal", model.init_std)
    weight = ParameterSpec("embedding.tokens.weight", (vocab, model.hidden), normal, "embedding")
    layers = (LayerSpec("embedding.tokens", "embedding", vocab, model.hidden, (weight,)),)
    return BlockSpec("embedding", "embedding", layers, forward_flops=0.0, saved_elements=0.0)


def _layer(name: str, model: ModelConfig, rows: int) -> BlockSpec:
    # Fan-in scaled (LeCun et al. 1998), the last of each residual branch by depth too, as in the gpt.
    inner = Initialiser("normal", 1 / sqrt(model.hidden))
    outer = Initialiser("normal", 1 / sqrt(ffn_size(model) * 2 * model.layers))
    up = columns(f"{name}.mlp.up", model.hidden, expansions(model), model.bias, inner)
    down = row(f"{name}.mlp.down", ffn_size(model), model.hidden, model.bias, outer)
    dropout = LayerSpec(f"{name}.mlp.dropout", "dropout", model.hidden, model.hidden)
    products = up.in_features * up.out_features + down.in_features * down.out_features
    # gate, up, silu(gate) and their product; relu(up); or up and gelu(up)
    inside = {"swiglu": 4, "relu": 1}.get(model.activation, 2)
    return BlockSpec(
        name,
        "mlp",
        (norm(f"{name}.mlp_norm", model), up, down, dropout),
        forward_flops=2.0 * products * rows,
        saved_elements=float(rows * (2 * model.hidden + inside * ffn_size(model))),
    )


def _head(model: ModelConfig, vocab: int, rows: int, tied: bool) -> BlockSpec:
    own = ParameterSpec(TIED[0], (vocab, model.hidden), Initialiser("normal", model.init_std), "head")
    head = LayerSpec("head.head", "head", model.hidden, vocab, () if tied else (own,), tied=TIED[1] if tied else None)
    return BlockSpec(
        "head",
        "head",
        (norm("head.norm", model), head),
        forward_flops=2.0 * model.hidden * vocab * rows,
        saved_elements=float(rows * (2 * model.hidden + 2 * vocab)),
    )
