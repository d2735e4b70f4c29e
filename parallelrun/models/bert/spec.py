"""What a bert is made of: blocks, layers, parameters and FLOPs. Torch-free; `network.py` is built to match it.

Post-LN encoder (Devlin et al. 2019) with the masked-language-model head: transform, activation, norm, tied decoder.
Left out, as in RoBERTa (Liu et al. 2019): next-sentence prediction with its pooler, and token types. The decoder has no
bias over the vocabulary.
"""

from __future__ import annotations

from parallelrun import registry
from parallelrun.config.schema import Config, ModelConfig
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec
from parallelrun.models.gpt import spec as gpt

FIXED = {"norm": "layernorm", "activation": "gelu", "position": "learned", "tied_embeddings": True, "experts": 0}


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the bert that `config.model` describes. Raises ConfigError.

    vocab: the dataset's, to which one id is added for [MASK]; a given `model.vocab` counts that id.
    """
    model = config.model
    problems = _fixed(model) + gpt.check(model) + _room_for_mask(config)
    if problems:
        raise ConfigError(*problems)
    vocab = model.vocab if model.vocab is not None else vocab + 1
    layers = tuple(_encoder(f"layers.{index}", model) for index in range(model.layers))
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
        kv_heads=gpt.kv_heads(model),
        ffn=gpt.ffn_size(model),
        seq=model.seq,
        num_layers=model.layers,
        activation=model.activation,
        norm=model.norm,
        attention_dropout=model.attention_dropout,
        tied=(gpt.TIED,),
        mask_token=vocab - 1,
    )


def _fixed(model: ModelConfig) -> list[Problem]:
    """What makes a bert a bert cannot be chosen."""
    return [
        Problem(f"model.{key}={getattr(model, key)} is not a bert's", f"model.{key}", f"model.{key}={value}")
        for key, value in FIXED.items()
        if getattr(model, key) != value
    ]


def _room_for_mask(config: Config) -> list[Problem]:
    """The last id of a given vocabulary is [MASK]: no token of the data may have it."""
    asked = config.model.vocab
    if asked is None or config.dataset.name == "synthetic":
        return []
    known = registry.load("datasets", config.dataset.name).vocab_size(config)
    if known is None or known < asked:
        return []
    what = f"model.vocab={asked}: a bert needs one id more than dataset {config.dataset.name}'s {known}, for [MASK]"
    return [Problem(what, "model.vocab", f"model.vocab={known + 1}", kind="arithmetic")]


def _embedding(model: ModelConfig, vocab: int) -> BlockSpec:
    normal = Initialiser("normal", model.init_std)
    tokens = ParameterSpec("embedding.tokens.weight", (vocab, model.hidden), normal, "embedding")
    position = ParameterSpec("embedding.position.weight", (model.seq, model.hidden), normal, "position")
    layers = (
        LayerSpec("embedding.tokens", "embedding", vocab, model.hidden, (tokens,)),
        LayerSpec("embedding.position", "position", model.hidden, model.hidden, (position,)),
        gpt.norm("embedding.norm", model),
        gpt.dropout("embedding.dropout", model),
    )
    return BlockSpec("embedding", "embedding", layers, forward_flops=0.0)


def _encoder(name: str, model: ModelConfig) -> BlockSpec:
    normal = Initialiser("normal", model.init_std)
    heads = {"q": model.heads, "k": gpt.kv_heads(model), "v": gpt.kv_heads(model)}
    layers = (
        gpt.columns(f"{name}.attention.qkv", model.hidden, gpt.projections(model), model.bias, normal, heads),
        gpt.row(f"{name}.attention.out", model.hidden, model.hidden, model.bias, normal),
        gpt.dropout(f"{name}.attention.dropout", model),
        gpt.norm(f"{name}.attention_norm", model),
        gpt.columns(f"{name}.mlp.up", model.hidden, gpt.expansions(model), model.bias, normal),
        gpt.row(f"{name}.mlp.down", gpt.ffn_size(model), model.hidden, model.bias, normal),
        gpt.dropout(f"{name}.mlp.dropout", model),
        gpt.norm(f"{name}.mlp_norm", model),
    )
    return BlockSpec(name, "transformer", layers, gpt.transformer_flops(layers, model))


def _head(model: ModelConfig, vocab: int) -> BlockSpec:
    transform = gpt.linear(
        "head.transform", model.hidden, model.hidden, model.bias, Initialiser("normal", model.init_std)
    )
    head = LayerSpec("head.head", "head", model.hidden, vocab, tied=gpt.TIED[1])
    flops = 2.0 * (model.hidden * model.hidden + model.hidden * vocab) * model.seq
    return BlockSpec("head", "head", (transform, gpt.norm("head.norm", model), head), flops)
