"""The modules of transformer blocks, written as for one device; `spec.py` lists the same parameters.

The dims that a tensor strategy may split (hidden, heads, vocab) appear only in role layers. The other code works on any
part of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallelrun.base.precision import Precision
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import documents as packed
from parallelrun.models import functions, layers
from parallelrun.models.autograd import apply
from parallelrun.models.fused_norms import SoftCap
from parallelrun.models.local_tokens import ALL, LocalTokens
from parallelrun.models.masked_layers import AttentionProduct, HashDropout
from parallelrun.models.transformer import spec as sizes
from parallelrun.models.transformer.latent_spec import rotary_growth


class LayerFactory:
    """Builds the role layers of one model with its dtype, norm, biases and dropout."""

    def __init__(self, config: Config, vocab: int, precision: Precision):
        self.model, self.seed, self.dropout_rate = config.model, config.seed, config.dropout
        self.vocab = vocab
        self.dtype: torch.dtype = getattr(torch, precision.compute)

    def column(self, outputs: dict[str, int]) -> layers.ColumnLinear:
        return layers.ColumnLinear(self.model.hidden, outputs, self.model.bias, self.dtype)

    def projections(self) -> layers.ColumnLinear:
        """To queries, keys and values."""
        outputs, bias = sizes.projections(self.model), sizes.qkv_has_bias(self.model)
        return layers.ColumnLinear(self.model.hidden, outputs, bias, self.dtype)

    def row(self, in_features: int) -> layers.RowLinear:
        return layers.RowLinear(in_features, self.model.hidden, self.model.bias, self.dtype)

    def unsplit(self, out_features: int) -> layers.UnsplitLinear:
        return layers.UnsplitLinear(self.model.hidden, out_features, self.model.bias, self.dtype)

    def heads(self, in_features: int, head_dim: int) -> layers.ColumnLinear:
        return layers.ColumnLinear(in_features, {"": self.model.heads * head_dim}, False, self.dtype)

    def norm(self, features: int | None = None) -> layers.HiddenNorm:
        size, bias = features or self.model.hidden, sizes.norms_have_bias(self.model)
        return layers.HiddenNorm(self.model.norm, size, self.model.norm_eps, bias, self.dtype)

    def qk_norm(self, features: int) -> layers.HiddenNorm | None:
        """Of queries or keys, of `features` in all heads together."""
        if self.model.qk_norm is None:
            return None
        of_head, bias = self.model.qk_norm == "head", sizes.norms_have_bias(self.model)
        make, size = (layers.HeadNorm, sizes.head_dim(self.model)) if of_head else (layers.AllHeadsNorm, features)
        return make(self.model.norm, size, self.model.norm_eps, bias, self.dtype)

    def dropout(self, site: str) -> HashDropout:
        return HashDropout(self.dropout_rate, self.seed, site, self.model.hidden, self.dtype)

    def embedding(self) -> layers.TokenEmbedding:
        return layers.TokenEmbedding(self.vocab, self.model.hidden, self.dtype)

    def head(self, tied: layers.TokenEmbedding | None) -> layers.VocabHead:
        return layers.VocabHead(self.model.hidden, self.vocab, self.dtype, tied, self.model.head_bias)


class InputEmbedding(layers.TensorModule):
    """Tokens (batch, seq) -> x (batch, seq, hidden)."""

    def __init__(self, make: LayerFactory):
        super().__init__()
        self.tokens = make.embedding()
        self.scale = make.model.hidden**0.5 if make.model.scaled_embedding else 1.0
        learned = make.model.position == "learned"
        self.position = layers.PositionEmbedding(make.model.seq, make.model.hidden, make.dtype) if learned else None
        self.dropout = make.dropout("embedding.dropout")

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding before dropout."""
        x = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        return x if self.position is None else self.position(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embed(tokens))


def rotary(model: ModelConfig, is_local: bool = False) -> functions.Rotary:
    """The rotary frequencies of a model's layers, with a window or without."""
    if model.local_rope_theta is not None and is_local:
        return functions.Rotary(model.local_rope_theta)
    factors = (model.rope_factor, model.rope_original_seq, model.rope_low_factor, model.rope_high_factor)
    yarn = (model.rope_beta_fast, model.rope_beta_slow, rotary_growth(model), model.rope_truncate)
    return functions.Rotary(model.rope_theta, model.rope_scaling, *factors, *yarn)


class KeyValueCache:
    """Keys and values of the first `length` positions of a context, (batch, kv heads, size, head_dim) each."""

    def __init__(self, size: int):
        self.size, self.length = size, 0
        self._cached: tuple[Tensor, Tensor] | None = None

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the next positions; return those of all."""
        if self._cached is None:
            batch, heads, _, width = key.shape
            self._cached = (
                key.new_empty(batch, heads, self.size, width),
                value.new_empty(batch, heads, self.size, width),
            )
        start, self.length = self.length, self.length + key.size(2)
        for cached, new in zip(self._cached, (key, value)):
            cached[:, :, start : self.length] = new
        return self._cached[0][:, :, : self.length], self._cached[1][:, :, : self.length]


class Attention(layers.TensorModule):
    """Base of self-attention over the heads that a subclass makes of x: all of them, or those of this rank.

    value_dim: features of a head's value, which may be fewer than those of its query and key: then values have zeros
    behind them. cache: set by generation, which then passes the positions of a context in turn: first several, later
    one at a time. local_tokens: the tokens of a sample that x has.
    """

    value_dim: int
    cache: KeyValueCache | None = None
    local_tokens: LocalTokens = ALL

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, seq, hidden) -> query, key and value (batch, heads, seq, features)."""
        raise NotImplementedError

    def close(self, name: str, make: LayerFactory, num_values: int, causal: bool, window: int | None) -> None:
        """Add the layers behind the heads, which read `num_values` features of all values together."""
        site, model = f"{name}.product", make.model
        own = model.attention_softcap, model.heads if model.sinks else 0
        self.product = AttentionProduct(model.attention_dropout, make.seed, site, make.dtype, causal, window, *own)
        self.out = make.row(num_values)
        self.dropout = make.dropout(f"{name}.dropout")

    def positions(self, heads: Tensor) -> Tensor:
        """int64 (seq,): where the tokens of (batch, heads, seq, features) are in their sample; of packed documents
        (batch, seq): where they are in their document."""
        start = 0 if self.cache is None else self.cache.length
        indices = self.local_tokens.indices(heads.size(2), heads.device, start)
        if packed.SCOPE.documents is None:
            return indices
        documents = self.product.documents()
        assert documents is not None
        return documents.positions_of(indices)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        if self.cache is None:
            mixed = self.product(query, key, value)
        else:
            assert query.size(2) == 1 or self.cache.length == 0, "after the first positions, one at a time"
            key, value = self.cache.extended(key, value)
            mixed = self.product(query, key, value) if query.size(2) > 1 else self.product.of_last(query, key, value)
        if mixed.size(-1) > self.value_dim:
            mixed = mixed[..., : self.value_dim]
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))


class SelfAttention(Attention):
    """Attention whose queries, keys and values are each a product of x. growth: of queries, and so of scores."""

    def __init__(self, name: str, make: LayerFactory, causal: bool = True, window: int | None = None):
        super().__init__()
        model = make.model
        self.value_dim = sizes.head_dim(model)
        self.rotary = rotary(model, window is not None) if model.position == "rope" else None
        self.growth = (self.value_dim / (model.query_pre_attn_scalar or self.value_dim)) ** 0.5
        self.qkv = make.projections()
        outputs = sizes.projections(model)
        self.q_norm, self.k_norm = make.qk_norm(outputs["q"]), make.qk_norm(outputs["k"])
        self.norms_heads = model.qk_norm == "head"
        self.close(name, make, model.heads * self.value_dim, causal, window)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        by_head, (q, k, v) = (-1, self.value_dim), self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        query, key = q.unflatten(-1, by_head), k.unflatten(-1, by_head)
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        value = v.unflatten(-1, by_head).transpose(1, 2)
        if self.rotary is not None:
            positions = self.positions(query)
            query = functions.rotate(query, self.rotary, positions)
            key = functions.rotate(key, self.rotary, positions)
        if self.growth != 1.0:
            query = query * self.growth
        return query, key, value


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
    """Final norm, then logits (batch, seq, vocab). Given the results of modules of multi-token prediction, a tuple:
    those of x, and of each of them."""

    def __init__(self, make: LayerFactory, tied: layers.TokenEmbedding | None):
        super().__init__()
        self.norm = make.norm()
        self.head, self.softcap = make.head(tied), make.model.logit_softcap

    def forward(self, x: Tensor, ahead: Sequence[Tensor] = ()) -> Any:
        logits = self._logits(self.norm(x))
        return (logits, *map(self._logits, ahead)) if ahead else logits

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return logits if self.softcap is None or self.head.defers else apply(SoftCap, logits, self.softcap)
