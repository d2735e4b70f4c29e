"""Modules whose forward is no chain of modules: blocks take masks and tables that forward makes, and positions are
added outside of any module. Some cannot be cut into stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention over what the mask shows, with rotated queries and keys."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor, cosine: Tensor, *, sine: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        q, k = (y * cosine + y.roll(1, -1) * sine for y in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2)) * 2


class Net(nn.Module):
    """twist: what else its forward does."""

    def __init__(self, vocab: int, seq: int, hidden: int, layers: int, tied: bool, twist: str):
        super().__init__()
        self.twist = twist
        self.embed, self.positions, self.drop = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden), nn.Dropout(0.0)
        self.layers = nn.ModuleList(Block(hidden, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if twist == "a weight of a block":
            self.table = self.embed.weight
        if twist == "two names":
            self.first = self.last = nn.Parameter(torch.ones(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        _, seq = tokens.shape
        numbers = torch.arange(seq, device=tokens.device)
        x = start = self.drop(self.embed(tokens) + self.positions(numbers)) * 1.5
        if self.twist == "two names":
            x = x * self.first
        mask = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        if self.twist == "mask of values":
            mask = mask & ((tokens % 2 == 0)[:, None, None] | torch.eye(seq, dtype=torch.bool, device=x.device))
        if self.twist == "branch on values" and tokens.float().mean() > 3:
            x = x * 2
        angle = numbers.to(x.dtype)[:, None] * torch.arange(1, x.size(-1) // 2 + 1, device=x.device) * 0.1
        for _ in range(2 if self.twist == "looped" else 1):
            for layer in self.layers:
                x = layer(x, mask, angle.cos(), sine=angle.sin())
                if self.twist == "between blocks":
                    x = x * 0.9 + numbers.to(x)[:, None] * 0.01
                if self.twist == "between blocks, in place":
                    x *= 0.9
        if self.twist == "skip":
            x = x + start
        if self.twist == "skip, in place":
            x.add_(start)
        if self.twist == "skip, into a tensor":
            torch.add(x.detach(), start.detach(), out=(both := torch.empty_like(x.detach())))
            x = x + both
        return self.head(self.norm(x) * self.last if self.twist == "two names" else self.norm(x))


def build(vocab: int, seq: int, hidden: int, layers: int = 2, tied: bool = False, twist: str = "") -> nn.Module:
    return Net(vocab, seq, hidden, layers, tied, twist)


class Encoder(nn.Module):
    def __init__(self, hidden: int, tokens: int):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, tokens, hidden) * 0.1)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(hidden, 2, 16, 0.0, batch_first=True) for _ in "123"))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.positions)


class Patches(nn.Module):
    """An image classifier: all of what is in front of its blocks is in one module, and its head reads a mean. With
    tokens, forward has parameters of its own: a class token, positions, and the scale of the result."""

    sample_shape = (3, 8, 8)

    def __init__(self, num_classes: int, tokens: bool):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, num_classes)
        self.scale = nn.Parameter(torch.ones(8)) if tokens else 1.0
        self.class_token = nn.Parameter(torch.randn(1, 1, 8)) if tokens else None
        self.encoder = Encoder(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        first = x[:, :1] if self.class_token is None else self.class_token.expand(x.shape[0], -1, -1)
        x = self.encoder(torch.cat([first, x], 1))
        return self.head(x.mean(1) * self.scale)


def patches(num_classes: int, tokens: bool = False) -> nn.Module:
    return Patches(num_classes, tokens)
