"""The class of transformers that computes what a bert does: BertForMaskedLM.

It has token types, which our model does not: they are exported as zeros, and of stored ones that of type 0, which
every token has here, is added to the position embeddings: the sum of both is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.config_fields import Fields
from parallelrun.models.hugging_face import PLAIN, Family, Field, FixedTensor, Piece, both, options
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

    table = (
        Field("vocab_size", "vocab", int, 30522),
        Field("hidden_size", "hidden", int, 768),
        Field("num_hidden_layers", "layers", int, 12),
        Field("num_attention_heads", "heads", int, 12),
        Field("intermediate_size", "ffn", int, 3072),
        Field("hidden_act", "activation", GELUS, "gelu"),
        Field("max_position_embeddings", "seq", int, 512),
        Field("layer_norm_eps", "norm_eps", float, 1e-12),
        Field("initializer_range", "init_std", float, 0.02),
    )
    fixed = {"tie_word_embeddings": True}
    expected = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

    def differences(self, config: Config, spec: ModelSpec) -> list[Problem]:
        model = config.model
        allowed = {**PLAIN, "bias": (True,), "norm_bias": (None, True), "kv_heads": (None, model.heads),
                   "head_dim": (None, model.hidden // model.heads), "qk_norm": (None,),
                   "qkv_bias": (None, True)}  # fmt: skip
        return options(config.model, "model", self.architecture, allowed)

    def fields(self, config: Config, spec: ModelSpec) -> dict[str, Any]:
        dropout = {
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": config.model.attention_dropout,
        }
        return {**super().fields(config, spec), **dropout, "type_vocab_size": 1}

    def values(self, fields: Fields) -> dict[str, Any]:
        fields.take("type_vocab_size", int, 2)
        return {**super().values(fields), "head_bias": True}

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
