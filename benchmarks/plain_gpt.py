"""A GPT as a torch user writes it, for the peers' side of the benchmarks: plain nn.Linear, no parallelrun inside.

Parameter names equal parallelrun's, so that both sides start from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """One benchmark size. batch: sequences a global step; microbatches: for pipelines."""

    name: str
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int
    microbatches: int

    @property
    def overrides(self) -> dict[str, object]:
        """The same model as parallelrun overrides."""
        return {
            "model.layers": self.layers,
            "model.hidden": self.hidden,
            "model.heads": self.heads,
            "model.seq": self.seq,
            "model.vocab": self.vocab,
            "model.tied_embeddings": False,
            "dataset.name": "synthetic",
            "dataset.vocab": self.vocab,
            "dataset.samples": 512,
            "global_batch": self.batch,
        }


SIZES = {
    "overhead": Sizes("overhead", 4, 64, 4, 64, 256, 8, 4),
    "small": Sizes("small", 4, 128, 4, 64, 256, 8, 4),
    "mixed": Sizes("mixed", 4, 256, 8, 128, 1024, 8, 4),
    "product": Sizes("product", 4, 512, 8, 256, 1024, 8, 4),
}


class Projections(nn.Module):
    """q, k, v as three plain linear layers."""

    def __init__(self, hidden: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.qkv = Projections(hidden)
        self.out = nn.Linear(hidden, hidden)
        self.head_dim = hidden // heads

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.qkv.q(x), self.qkv.k(x), self.qkv.v(x))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Up(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)


class Mlp(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.up = Up(hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up.up(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embeddings(nn.Module):
    def __init__(self, vocab: int, seq: int, hidden: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(seq, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))


class OutputHead(nn.Module):
    def __init__(self, hidden: int, vocab: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class PlainGpt(nn.Module):
    """Blocks that are None are left out: a pipeline stage is the same class with the others removed."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding: nn.Module | None = Embeddings(sizes.vocab, sizes.seq, sizes.hidden)
        self.layers = nn.ModuleDict({str(i): Layer(sizes.hidden, sizes.heads) for i in range(sizes.layers)})
        self.head: nn.Module | None = OutputHead(sizes.hidden, sizes.vocab)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over every token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
