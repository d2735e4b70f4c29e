"""The blocks, layers, parameters and FLOPs of a bert. `network.py` builds the same parameters."""

from __future__ import annotations

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import BlockSpec, ModelSpec

FIXED = {"norm": "layernorm", "position": "learned", "tied_embeddings": True, "experts": 0}
GELUS = ("gelu", "gelu_exact")


class BertDefinition(ModelDefinition):
    """Blocks `embedding`, `layers.0` ..., `head`."""

    own_keys = transformer.TEXT_KEYS | transformer.ATTENTION_KEYS | {"mask_token"}
    packs = True

    def make(self, config: Config, vocab: int) -> ModelSpec:
        """vocab: the dataset's, to which one id is added for [MASK]; a given `model.vocab` or `model.mask_token`
        means that the id is among them."""
        model = config.model
        problems = [
            Problem(f"model.{key}={getattr(model, key)} is not a bert's", f"model.{key}", f"model.{key}={value}")
            for key, value in FIXED.items()
            if getattr(model, key) != value
        ]
        if model.activation not in GELUS:
            message = f"model.activation={model.activation} is not a bert's"
            problems.append(
                Problem(
                    message, "model.activation", " or ".join(f"model.activation={activation}" for activation in GELUS)
                )
            )
        problems += transformer.check(model) + _room_for_mask(config)
        if problems:
            raise ConfigError(*problems)
        vocab = model.vocab if model.vocab is not None else vocab + (model.mask_token is None)
        layers = (_block(f"layers.{index}", model) for index in range(model.layers))
        blocks = (_embedding(model, vocab), *layers, _head(model, vocab))
        mask_token = model.mask_token if model.mask_token is not None else vocab - 1
        return transformer.transformer_spec(model, vocab, blocks, tied=(transformer.TIED,), mask_token=mask_token)


def _room_for_mask(config: Config) -> list[Problem]:
    """No token of the data may have the id of [MASK]: the last one, or the one of the data's tokenizer."""
    requested, mask, dataset = config.model.vocab, config.model.mask_token, definitions.dataset(config)
    if mask is not None:
        vocab = dataset.vocab_size(config)
        made = dataset.tokenizer(config)
        if made and made.is_bytes and vocab is not None and mask < vocab:
            message = f"model.mask_token={mask} is the id of a byte of dataset {config.dataset.name}"
            fix = (
                f"model.mask_token={vocab}"
                if requested is not None and requested > vocab
                else "leave model.mask_token out"
            )
            return [Problem(message, "model.mask_token", fix, kind="arithmetic")]
        return []
    if requested is None or dataset.vocab_follows_model:
        return []
    vocab = dataset.vocab_size(config)
    if vocab is None or vocab < requested:
        return []
    message = (
        f"model.vocab={requested}: a bert needs one id more than dataset {config.dataset.name}'s {vocab}, for [MASK]"
    )
    return [Problem(message, "model.vocab", f"model.vocab={vocab + 1}", kind="arithmetic")]


def _embedding(model: ModelConfig, vocab: int) -> BlockSpec:
    norm = transformer.norm_layer("embedding.norm", model)
    dropout = transformer.dropout_layer("embedding.dropout", model)
    layers = (*transformer.embedding_layers(model, vocab), norm, dropout)
    return BlockSpec("embedding", "embedding", layers, forward_flops=0.0)


def _block(name: str, model: ModelConfig) -> BlockSpec:
    normal = transformer.normal(model)
    layers = (
        *transformer.attention_layers(f"{name}.attention", model, normal),
        transformer.norm_layer(f"{name}.attention_norm", model),
        *transformer.mlp_layers(f"{name}.mlp", model, normal, normal),
        transformer.norm_layer(f"{name}.mlp_norm", model),
    )
    flops, attention = transformer.transformer_flops(layers, model), transformer.attention_spec(model)
    return BlockSpec(name, "transformer", layers, flops, attention=attention)


def _head(model: ModelConfig, vocab: int) -> BlockSpec:
    hidden, normal = model.hidden, transformer.normal(model)
    layers = (
        transformer.linear_layer("head.transform", hidden, hidden, model.bias, normal, role="linear"),
        transformer.norm_layer("head.norm", model),
        transformer.head_layer(model, vocab, tied=True),
    )
    return BlockSpec("head", "head", layers, 2.0 * (hidden * hidden + hidden * vocab) * model.seq)


MODEL = BertDefinition()
