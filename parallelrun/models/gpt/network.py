"""The gpt as modules, written as for one device; `spec.py` lists the same parameters.

What a tensor strategy may split (hidden, heads, vocab) sits in role layers; everything else works on whatever part it
sees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec, RouterSpec
from parallelrun.models import functions, layers
from parallelrun.models.gpt import spec as sizes
from parallelrun.models.moe.layer import MoE
from parallelrun.models.moe.spec import has_experts
from parallelrun.models.network import Network, store
from parallelrun.precision import Precision


class Factory:
    """Makes the role layers of one model: one place that knows its dtype, norm, biases and dropout."""

    def __init__(self, config: Config, vocab: int, precision: Precision):
        self.model, self.seed, self.dropout_rate = config.model, config.seed, config.dropout
        self.vocab = vocab
        self.dtype: torch.dtype = getattr(torch, precision.compute)

    def columns(self, outputs: dict[str, int]) -> layers.Columns:
        return layers.Columns(self.model.hidden, outputs, self.model.bias, self.dtype)

    def row(self, in_features: int) -> layers.Row:
        return layers.Row(in_features, self.model.hidden, self.model.bias, self.dtype)

    def linear(self, features: int) -> layers.Linear:
        return layers.Linear(features, features, self.model.bias, self.dtype)

    def norm(self) -> layers.Norm:
        bias = self.model.bias and self.model.norm == "layernorm"
        return layers.Norm(self.model.norm, self.model.hidden, self.model.norm_eps, bias, self.dtype)

    def dropout(self, site: str) -> layers.Dropout:
        return layers.Dropout(self.dropout_rate, self.seed, site, self.model.hidden, self.dtype)

    def product(self, site: str, causal: bool) -> layers.AttentionProduct:
        return layers.AttentionProduct(self.model.attention_dropout, self.seed, site, self.dtype, causal)


class Embeddings(nn.Module):
    """Tokens (batch, seq) -> x (batch, seq, hidden)."""

    def __init__(self, make: Factory):
        super().__init__()
        self.tokens = layers.Embedding(make.vocab, make.model.hidden, make.dtype)
        learned = make.model.position == "learned"
        self.position = layers.Position(make.model.seq, make.model.hidden, make.dtype) if learned else None
        self.dropout = make.dropout("embedding.dropout")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.position is not None:
            x = self.position(x)
        return self.dropout(x)


class Attention(nn.Module):
    """Self-attention over the heads it sees: their number follows from what `qkv` returns."""

    def __init__(self, name: str, make: Factory, causal: bool = True):
        super().__init__()
        model = make.model
        self.head_dim = model.hidden // model.heads
        self.rope_theta = model.rope_theta if model.position == "rope" else None
        self.qkv = make.columns(sizes.projections(model))
        self.product = make.product(f"{name}.product", causal)
        self.out = make.row(model.hidden)
        self.dropout = make.dropout(f"{name}.dropout")

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x))
        if self.rope_theta is not None:
            query, key = functions.rotate(query, self.rope_theta), functions.rotate(key, self.rope_theta)
        mixed = self.product(query, key, value)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))


class Mlp(nn.Module):
    """up (or gate and up), activation, down."""

    def __init__(self, name: str, make: Factory):
        super().__init__()
        self.up = make.columns(sizes.expansions(make.model))
        self.activation = layers.Activation(make.model.activation)
        self.down = make.row(sizes.ffn_size(make.model))
        self.dropout = make.dropout(f"{name}.dropout")

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(*self.up(x))))


class Transformer(nn.Module):
    """One pre-LN layer: x plus attention of its norm, then plus the MLP, or the experts (router given), of its norm."""

    def __init__(self, name: str, make: Factory, router: RouterSpec | None = None):
        super().__init__()
        self.attention_norm = make.norm()
        self.attention = Attention(f"{name}.attention", make)
        self.mlp_norm = make.norm()
        if router is None:
            self.mlp = Mlp(f"{name}.mlp", make)
        else:
            self.moe = MoE(f"{name}.moe", make, router)
        self.has_experts = router is not None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        rows = self.mlp_norm(x)
        return x + (self.moe(rows) if self.has_experts else self.mlp(rows))


class OutputHead(nn.Module):
    """Final norm, then logits (batch, seq, vocab)."""

    def __init__(self, make: Factory, tied: layers.Embedding | None):
        super().__init__()
        self.norm = make.norm()
        self.head = layers.Head(make.model.hidden, make.vocab, make.dtype, tied)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Gpt(Network):
    """Blocks `embedding`, `layers.0` ..., `head`."""

    def __init__(self, make: Factory, spec: ModelSpec):
        super().__init__(spec, layers.TokenLoss(make.model.label_smoothing))
        self.embedding = Embeddings(make)
        self.layers = nn.ModuleDict()
        for index in range(make.model.layers):
            router = spec.router if has_experts(index, make.model) else None
            self.layers[str(index)] = Transformer(f"layers.{index}", make, router)
        self.head = OutputHead(make, self.embedding.tokens if make.model.tied_embeddings else None)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The whole network, its parameters uninitialised: call it under `torch.device("meta")` and keep your blocks."""
    network = Gpt(Factory(config, spec.vocab, precision), spec)
    store(network, precision.stored)
    return network
