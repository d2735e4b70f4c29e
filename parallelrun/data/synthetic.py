"""`dataset=synthetic`: samples computed from a seed, with structure to learn, for any model and without any file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.dataset import Dataset, Split, require_samples
from parallelrun.data.images import resize
from parallelrun.data.order import derive_key
from parallelrun.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_VOCAB = 256
# Each token has four likely successors; one token in twenty is drawn from the whole vocab instead.
SUCCESSORS = (0.6, 0.2, 0.1, 0.1)
NOISE = 0.05
# A class is what a fixed random linear map of the features says; one label in twenty is drawn at random.
_TRAIN, _VAL, _TABLE = 1, 2, 3
# An image is the coarse pattern of its class plus noise, cut from one sheet of it: drawing it anew would be the slowest
# part of a step.
COARSE = 4
SHEET = 2**20


def vocab_size(config: Config) -> int:
    """`dataset.vocab`, else the model's own, else 256 (token ids, or classes)."""
    return config.dataset.vocab or config.model.vocab or DEFAULT_VOCAB


def image_shape(config: Config) -> tuple[int, int | None]:
    """(channels, None): images of every size."""
    return 3, None


def open(config: Config, spec: ModelSpec) -> Dataset:
    """`dataset.samples` training samples and `val_fraction` as many again for validation, from `seed`.

    Token models get windows of a noisy Markov chain over the vocab, feature models get normal features with the class
    of a noisy linear teacher, image models a coarse pattern per class under noise. Raises EnvironmentProblem when there
    are fewer samples than a global batch.
    """
    vocab = min(vocab_size(config), spec.vocab - (spec.mask_token is not None))
    num_val = max(1, round(config.dataset.samples * config.dataset.val_fraction))
    kinds: dict[str, Callable[..., Split]] = {"tokens": MarkovChain, "features": Teacher, "images": Pictures}
    kind = kinds[spec.kind]

    def split(number: int, size: int) -> Split:
        return kind(config.seed, number, size, tuple(spec.sample_shape), vocab)

    identity = ["synthetic", 1, spec.kind, config.seed, config.dataset.samples, num_val, list(spec.sample_shape), vocab]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    dataset = Dataset("synthetic", vocab, fingerprint, split(_TRAIN, config.dataset.samples), split(_VAL, num_val))
    return require_samples(dataset, config, spec, f"dataset.samples={config.dataset.samples}")


@dataclass(frozen=True)
class _Seeded:
    seed: int
    number: int
    size: int
    shape: tuple[int, ...]
    vocab: int

    def __len__(self) -> int:
        return self.size

    def generator(self, number: int, index: int = 0) -> np.random.Generator:
        """Random numbers of their own for each sample, so that any rank can compute any sample alone."""
        return np.random.Generator(np.random.PCG64(derive_key(self.seed, number, index)))

    def check(self, index: int) -> None:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} is outside a split of {self.size} samples")


class MarkovChain(_Seeded):
    """Tokens of which each mostly decides the next: a model that learns the bigrams reaches about 1.4 nats a token."""

    @cached_property
    def successors(self) -> list[list[int]]:
        """(vocab, 4): the same table for both splits, so that what is learnt carries over."""
        return self.generator(_TABLE).integers(self.vocab, size=(self.vocab, len(SUCCESSORS))).tolist()

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        generator = self.generator(self.number, index)
        length = self.shape[0] + 1
        choices = np.searchsorted(np.cumsum(SUCCESSORS)[:-1], generator.random(length), side="right").tolist()
        strays = generator.integers(self.vocab, size=length)
        is_stray = generator.random(length) < NOISE
        tokens = strays.tolist()
        successors = self.successors
        for place, stray in enumerate(is_stray[1:].tolist(), start=1):
            if not stray:
                tokens[place] = successors[tokens[place - 1]][choices[place]]
        array = np.array(tokens, dtype=np.int64)
        return array[:-1], array[1:]


class Teacher(_Seeded):
    """Features from a normal distribution; the class is the largest output of a fixed random linear map."""

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        return self.generator(_TABLE).standard_normal((prod(self.shape), self.vocab))

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        generator = self.generator(self.number, index)
        features = generator.standard_normal(self.shape)
        label = int(np.argmax(features.reshape(-1) @ self.weights))
        if generator.random() < NOISE:
            label = int(generator.integers(self.vocab))
        return features.astype(np.float32), np.array(label, dtype=np.int64)


class Pictures(_Seeded):
    """Images (channels, height, width): a coarse random pattern for each class, under noise as strong as itself."""

    @cached_property
    def noise(self) -> NDArray[np.float32]:
        return self.generator(_TABLE, 1).standard_normal(max(SHEET, 2 * prod(self.shape)), dtype=np.float32)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        key = derive_key(self.seed, self.number, index)
        label, size = key % self.vocab, prod(self.shape)
        start = (key >> 16) % (self.noise.size - size)
        pattern = self.generator(_TABLE, 2 + label).standard_normal((self.shape[0], COARSE, COARSE), dtype=np.float32)
        image = resize(pattern, self.shape[1:]) + self.noise[start : start + size].reshape(self.shape)
        return image, np.array(label, dtype=np.int64)
