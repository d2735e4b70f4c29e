"""Modules that people bring, written without a thought of this project, and awkward in one way each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Recurrent(nn.Module):
    """torch's recurrent layers keep weak references to their weights, and return tuples."""

    def __init__(self, vocab: int, kind: str):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)
        self.layers = getattr(nn, kind)(8, 8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0])


class Shaped(nn.Module):
    """Returns logits in some form; its forward may read the values of a tensor, and its dropout's rate."""

    def __init__(self, vocab: int, form: str = "tensor", reads_values: bool = False):
        super().__init__()
        self.embed, self.head, self.drop = nn.Embedding(vocab, 8), nn.Linear(8, vocab), nn.Dropout(0.0)
        self.form, self.reads_values = form, reads_values

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens) * (1.0 - self.drop.p)
        if self.reads_values and (tokens.float().mean() > 3).item():
            x = x * 2
        logits = self.head(self.drop(x))
        return {"tensor": logits, "tuple": (logits, x), "dict": {"loss": None, "logits": logits}}[self.form]


def recurrent(vocab: int, kind: str) -> nn.Module:
    return Recurrent(vocab, kind)


def shaped(vocab: int, form: str = "tensor", reads_values: bool = False) -> nn.Module:
    return Shaped(vocab, form, reads_values)
