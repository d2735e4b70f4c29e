"""A user's module for tests: a small decoder in plain torch, written without a thought of parallelism."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.models.layers import PositionEmbedding


class Embed(nn.Module):
    def __init__(self, vocab: int, hidden: int, seq: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.register_buffer("places", torch.sin(torch.arange(seq * hidden).view(seq, hidden) * 0.1))
        self.place: nn.Module | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.place is not None:
            return self.place(self.tokens(tokens))
        return self.tokens(tokens) + self.places[: tokens.size(1)]


class TwoTables(Embed):
    """A second embedding, whose rows are not those of the vocabulary, and a weight without dims."""

    def __init__(self, vocab: int, hidden: int, seq: int):
        super().__init__(vocab, hidden, seq)
        self.kinds = nn.Embedding(3, hidden)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens) + self.kinds(tokens % 3)


class Layer(nn.Module):
    def __init__(self, hidden: int, head_dim: int, dropout: float):
        super().__init__()
        self.head_dim = head_dim
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop, self.widen = nn.Dropout(dropout), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.fc2(self.widen(functional.relu(self.fc1(self.norm2(x))))))


class Net(nn.Module):
    def __init__(self, vocab: int, hidden: int, seq: int, depth: int, dropout: float, tied: bool, head_dim: int = 4):
        super().__init__()
        self.embed = Embed(vocab, hidden, seq)
        self.layers = nn.ModuleList(Layer(hidden, head_dim, dropout) for _ in range(depth))
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(
    vocab: int, seq: int, hidden: int, depth: int = 2, dropout: float = 0.0, tied: bool = False, frozen: str = "",
    head_dim: int = 4,
) -> nn.Module:  # fmt: skip
    """frozen: patterns of parameter names, with `|` between them."""
    net = Net(vocab, hidden, seq, depth, dropout, tied, head_dim)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in frozen.split("|")))
    return net


def _numbered(x: Tensor) -> Tensor:
    """(seq, hidden): grows with the position in x, whatever x is a slice of."""
    return torch.outer(*(torch.arange(size, device=x.device) * 0.1 for size in x.shape[1:]))


def build_sliceable(vocab: int, seq: int, hidden: int, dropout: float = 0.0, flaw: str = "") -> nn.Module:
    """Fit for sequence parallel: positions by a role layer. flaw: what a slice must not do, in a layer of this name."""
    net = Net(vocab, hidden, seq, 2, dropout, False)
    net.embed.place = PositionEmbedding(seq, hidden, torch.float32)
    nn.init.normal_(net.embed.place.weight)
    for name, module in net.named_modules():
        if flaw and name == flaw:
            module.register_forward_hook(lambda *seen: seen[2] + _numbered(seen[2]))
    for layer in net.layers:
        layer.widen = nn.Dropout(dropout)
    return net


def build_two_tables(vocab: int, seq: int, hidden: int) -> nn.Module:
    net = Net(vocab, hidden, seq, 1, 0.0, False)
    net.embed = TwoTables(vocab, hidden, seq)
    return net


def build_fixed(vocab: int, seq: int, hidden: int) -> nn.Module:
    """Breaks the contract: a global size in forward."""

    class Fixed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(x.size(0), x.size(1), hidden)
            return x + self.out(q)

    net = Net(vocab, hidden, seq, 1, 0.0, False)
    net.layers[0] = Fixed(hidden, 4, 0.0)
    return net


def build_dropped(vocab: int, seq: int, hidden: int) -> nn.Module:
    """Drops probabilities of attention, which are (batch, heads, seq, seq)."""

    class Dropped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            parts = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
            q, k, v = parts
            y = self.drop((q @ k.transpose(-1, -2)).softmax(-1)) @ v
            return x + self.fc2(self.fc1(x + self.out(y.transpose(1, 2).flatten(-2))))

    net = Net(vocab, hidden, seq, 1, 0.1, False)
    net.layers[0] = Dropped(hidden, 4, 0.1)
    return net


def build_batchnorm(vocab: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden, track_running_stats=False), nn.Linear(hidden, vocab)
    )


def build_classifier(vocab: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, vocab))


def build_images(vocab: int, channels: int = 4) -> nn.Module:
    """Convolutions with torch's BatchNorm, one of them frozen."""
    norm, frozen = nn.BatchNorm2d(channels, momentum=0.3), nn.BatchNorm2d(channels).requires_grad_(False)
    net = nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1), norm, nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2), frozen, nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 8), nn.BatchNorm1d(8), nn.Linear(8, vocab),
    )  # fmt: skip
    net.sample_shape = (2, 8, 8)  # type: ignore[assignment]
    return net


class Patches(nn.Module):
    """An image classifier whose attributes are called as some of ours are, and mean something else."""

    sample_shape = (3, 16, 16)

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, hidden, 4, 4)
        self.layers = nn.Sequential(Layer(hidden, 4, 0.0), Layer(hidden, 4, 0.0))
        self.heads = nn.Sequential(nn.Linear(hidden, vocab))
        self.layer_role, self.local_tokens, self.kind, self.uncompiled = "row_parallel", 3, "relu", 7

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        return self.heads(self.layers(x).mean(1))


def build_patches(vocab: int, hidden: int) -> nn.Module:
    return Patches(vocab, hidden)
