"""The class of transformers that computes what a bert does: BertForMaskedLM.

It has token types, which our model does not: they are exported as zeros, and of stored ones that of type 0, which
every token has here, is added to the position embeddings: the sum of both is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.hugging_face import Family, Fields, FixedTensor, Piece, both, options
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.model_spec import ModelSpec

GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}  # theirs -> ours


class Bert(Family):
    """BertForMaskedLM with one token type."""

    model_type, architecture, prefix = "bert", "BertForMaskedLM", "bert."
    skipped = r"(bert\.)?(pooler|embeddings\.position_ids|cls\.seq_relationship).*|cls\.predictions\.decoder\..*"
    copies = (
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    )

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        allowed = {"bias": (True,), "norm_bias": (None, True), "kv_heads": (None, config.model.heads)}
        return options(config, self.architecture, allowed)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        model = config.model
        return {
            "vocab_size": spec.vocab,
            "hidden_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "intermediate_size": transformer.ffn_size(model),
            "hidden_act": next(theirs for theirs, ours in GELUS.items() if ours == model.activation),
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": model.attention_dropout,
            "max_position_embeddings": model.seq,
            "type_vocab_size": 1,
            "initializer_range": model.init_std,
            "layer_norm_eps": model.norm_eps,
            "tie_word_embeddings": True,
        }

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.expect("position_embedding_type", "absolute")
        fields.expect("tie_word_embeddings", True)
        for key in ("is_decoder", "add_cross_attention"):
            fields.expect(key, False)
        fields.take("type_vocab_size", int, 2)
        return {
            "head_bias": True,
            "vocab": fields.take("vocab_size", int, 30522),
            "hidden": fields.take("hidden_size", int, 768),
            "layers": fields.take("num_hidden_layers", int, 12),
            "heads": fields.take("num_attention_heads", int, 12),
            "ffn": fields.take("intermediate_size", int, 3072),
            "activation": fields.chosen("hidden_act", GELUS, "gelu"),
            "seq": fields.take("max_position_embeddings", int, 512),
            "norm_eps": fields.take("layer_norm_eps", float, 1e-12),
            "init_std": fields.take("initializer_range", float, 0.02),
        }

    def pieces(self, config: Config, spec: ModelSpec) -> Iterator[Piece]:
        yield Piece("embedding.tokens.weight", "bert.embeddings.word_embeddings.weight")
        yield Piece("embedding.position.weight", "bert.embeddings.position_embeddings.weight")
        yield from both("embedding.norm", "bert.embeddings.LayerNorm")
        for index in range(config.model.layers):
            ours, theirs = f"layers.{index}", f"bert.encoder.layer.{index}"
            for part, name in zip("qkv", ("query", "key", "value")):
                yield from both(f"{ours}.attention.qkv.{part}", f"{theirs}.attention.self.{name}")
            yield from both(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
            yield from both(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
            yield from both(f"{ours}.mlp.up.up", f"{theirs}.intermediate.dense")
            yield from both(f"{ours}.mlp.down", f"{theirs}.output.dense")
            yield from both(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
        yield from both("head.transform", "cls.predictions.transform.dense")
        yield from both("head.norm", "cls.predictions.transform.LayerNorm")
        if config.model.head_bias:
            yield Piece("head.head.bias", "cls.predictions.bias")

    def spellings(self, key: str) -> tuple[str, ...]:
        """Files of before 2019, such as the published ones, have TensorFlow's names of the norms' parameters."""
        older = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return tuple(dict.fromkeys((*super().spellings(key), *super().spellings(older))))

    def constants(self, config: Config, spec: ModelSpec) -> dict[str, FixedTensor]:
        types = FixedTensor((1, config.model.hidden), 0.0, added_to="embedding.position.weight")
        bias = {} if config.model.head_bias else {"cls.predictions.bias": FixedTensor((spec.vocab,), 0.0)}
        return {"bert.embeddings.token_type_embeddings.weight": types, **bias}


FAMILIES = (Bert(),)
