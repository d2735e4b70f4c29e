"""The modules of transformer blocks, written as for one device; `spec.py` lists the same parameters.

The dims that a tensor strategy may split (hidden, heads, vocab) appear only in role layers. The other code works on any
part of a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallelrun.config.schema import Config
from parallelrun.models import functions, layers
from parallelrun.models.transformer import spec as sizes
from parallelrun.precision import Precision


class LayerFactory:
    """Builds the role layers of one model with its dtype, norm, biases and dropout."""

    def __init__(self, config: Config, vocab: int, precision: Precision):
        self.model, self.seed, self.dropout_rate = config.model, config.seed, config.dropout
        self.vocab = vocab
        self.dtype: torch.dtype = getattr(torch, precision.compute)

    def column(self, outputs: dict[str, int]) -> layers.ColumnLinear:
        return layers.ColumnLinear(self.model.hidden, outputs, self.model.bias, self.dtype)

    def row(self, in_features: int) -> layers.RowLinear:
        return layers.RowLinear(in_features, self.model.hidden, self.model.bias, self.dtype)

    def norm(self) -> layers.HiddenNorm:
        bias = self.model.bias and self.model.norm == "layernorm"
        return layers.HiddenNorm(self.model.norm, self.model.hidden, self.model.norm_eps, bias, self.dtype)

    def dropout(self, site: str) -> layers.HashDropout:
        return layers.HashDropout(self.dropout_rate, self.seed, site, self.model.hidden, self.dtype)

    def embedding(self) -> layers.TokenEmbedding:
        return layers.TokenEmbedding(self.vocab, self.model.hidden, self.dtype)

    def head(self, tied: layers.TokenEmbedding | None) -> layers.VocabHead:
        return layers.VocabHead(self.model.hidden, self.vocab, self.dtype, tied)


class InputEmbedding(layers.TensorModule):
    """Tokens (batch, seq) -> x (batch, seq, hidden)."""

    def __init__(self, make: LayerFactory):
        super().__init__()
        self.tokens = make.embedding()
        learned = make.model.position == "learned"
        self.position = layers.PositionEmbedding(make.model.seq, make.model.hidden, make.dtype) if learned else None
        self.dropout = make.dropout("embedding.dropout")

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding before dropout."""
        x = self.tokens(tokens)
        return x if self.position is None else self.position(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embed(tokens))


class SelfAttention(layers.TensorModule):
    """Self-attention over the heads that `qkv` returns: all of them, or those of this rank."""

    def __init__(self, name: str, make: LayerFactory, causal: bool = True):
        super().__init__()
        model = make.model
        self.head_dim = model.hidden // model.heads
        self.rope_theta = model.rope_theta if model.position == "rope" else None
        self.qkv = make.column(sizes.projections(model))
        site, rate = f"{name}.product", model.attention_dropout
        self.product = layers.AttentionProduct(rate, make.seed, site, make.dtype, causal)
        self.out = make.row(model.hidden)
        self.dropout = make.dropout(f"{name}.dropout")

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x)]
        if self.rope_theta is not None:
            query, key = functions.rotate(query, self.rope_theta), functions.rotate(key, self.rope_theta)
        mixed = self.product(query, key, value)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))


class FeedForward(layers.TensorModule):
    """The MLP: up (or gate and up), activation, down. Without a name it has no dropout."""

    def __init__(self, make: LayerFactory, ffn: int, name: str | None):
        super().__init__()
        self.up = make.column(sizes.expansions(make.model, ffn))
        self.activation = layers.Activation(make.model.activation)
        self.down = make.row(ffn)
        self.dropout = make.dropout(f"{name}.dropout") if name is not None else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.activation(*self.up(x)))
        return y if self.dropout is None else self.dropout(y)


class OutputHead(layers.TensorModule):
    """Final norm, then logits (batch, seq, vocab)."""

    def __init__(self, make: LayerFactory, tied: layers.TokenEmbedding | None):
        super().__init__()
        self.norm = make.norm()
        self.head = make.head(tied)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))
