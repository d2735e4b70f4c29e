"""Modules that people bring, written without a thought of this project, and awkward in one way each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


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


class Diffusion(nn.Module):
    """Predicts the noise in an image, at a level of noise that a second input tells."""

    sample_shape = (1, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.out(self.down(torch.cat([x, level.expand_as(x)], 1)).relu())


def noise_loss(module: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """The noise is keyed by sample: the same under every plan."""
    images = batch.inputs
    level, noise = batch.rand(1, 1, 1).to(images), batch.randn(*images.shape[1:]).to(images)
    losses = (module(images * (1 - level) + noise * level, level) - noise).square()
    return losses.sum(), losses.numel()


class Towers(nn.Module):
    """Two inputs by name, which an encoder each reads, and a classifier of both."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, num_classes)

    def encode(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(left), self.b(right)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat(self.encode(left, right), -1))


def contrastive_loss(module: Any, batch: Any) -> tuple[Tensor, int]:
    """Which `right` belongs to a `left`, within groups of four consecutive samples."""
    left, right = (x.unflatten(0, (-1, 4)) for x in module.encode(batch["left"], batch["right"]))
    scores = left @ right.transpose(1, 2)
    mates = torch.arange(4, device=scores.device).expand(scores.shape[:2])
    return functional.cross_entropy(scores.flatten(0, 1), mates.flatten(), reduction="sum"), len(batch)


def two_tasks_loss(module: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A classification, and a size of the codes of those samples alone whose class is not 0: counts differ by rank."""
    left, _ = module.encode(batch["left"], batch["right"])
    chosen = batch.targets > 0
    classes = functional.cross_entropy(module(batch["left"], batch["right"]), batch.targets, reduction="sum")
    return classes + left[chosen].square().sum(), len(batch) + chosen.sum()


def no_pair(module: nn.Module, batch: Any) -> Tensor:
    return torch.zeros(())


def nan_count(module: Any, batch: Any) -> tuple[Tensor, float]:
    return module(batch["left"], batch["right"]).sum(), float("nan")


def negative_count(module: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return module(batch["left"], batch["right"]).sum(), torch.tensor(-3.0)


def count_of_two(module: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return module(batch["left"], batch["right"]).sum(), torch.ones(2)


def loss_of_towers_only(module: Any, batch: Any) -> tuple[Tensor, int]:
    if not isinstance(module, Towers):
        raise TypeError("the module is of another class")
    return module(batch["left"], batch["right"]).square().sum(), len(batch)


class Items(Dataset[dict[str, Any]]):
    num_classes = 3

    def __init__(self, length: int = 200) -> None:
        self._rows = torch.randn(length, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        row = self._rows[index]
        return {"left": row[:4], "right": row[2:], "labels": int(row.sum() > 0) + int(row.sum() > 1)}


def items() -> Items:
    return Items()


class DrawnItems(Items):
    """Items with noise of torch's own generator, as an augmentation has it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {**item, "left": item["left"] + torch.randn(4)}


def drawn_items() -> Items:
    return DrawnItems()


def divided_items(split: str) -> Items:
    return Items({"train": 200, "val": 40}[split])


def stream() -> Iterator[dict[str, Any]]:
    yield from (Items(120)[index] for index in range(120))


class Sentences(list[tuple[Tensor, Tensor]]):
    """Pairs of token ids and targets, some of which are ignored."""

    vocab = 50


def sentences() -> Sentences:
    rows = torch.randint(0, 50, (100, 17), generator=torch.Generator().manual_seed(1))
    return Sentences((row[:-1], torch.where(row[1:] % 5 == 0, -1, row[1:])) for row in rows)


def a_number() -> int:
    return 5


def texts() -> list[tuple[str, int]]:
    return [("a", 1)] * 100


def triples() -> list[tuple[int, int, int]]:
    return [(1, 2, 3)] * 100


def towers() -> Towers:
    return Towers()


def diffusion() -> Diffusion:
    return Diffusion()


def resnet18(num_classes: int = 1000) -> nn.Module:
    """As torchvision builds it: three channels, BatchNorm, ReLU in place, an average over any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, num_classes),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).add_(self.short(x))
        return self.relu(x)


class Nested(nn.Module):
    """All layers are inside one module, with what they need around them."""

    def __init__(self, vocab: int):
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(vocab, 8)
        self.body.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(100))
        self.body.forward = self._body  # type: ignore[method-assign]
        self.head = nn.Linear(8, vocab)

    def _body(self, tokens: Tensor) -> Tensor:
        x = self.body.embed(tokens)
        for layer in self.body.layers:
            x = layer(x).tanh()
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


def nested(vocab: int) -> nn.Module:
    return Nested(vocab)


def regression() -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(3, 8, 8), torch.tensor(0.5))] * 100
