"""`dataset=synthetic`: samples computed from a seed, with structure to learn, for any model, without files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.images.image_dataset import resize
from parallelrun.data.order import derive_key
from parallelrun.data.tokens import require_samples
from parallelrun.planner.model.definitions import IGNORED, NUM_EXAMPLES, Dataset, DatasetDefinition, Packing, Split
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.text import LABELLED

DEFAULT_VOCAB = 256
# Each token has four likely successors; one token in twenty is drawn from all of the vocab instead.
SUCCESSORS = (0.6, 0.2, 0.1, 0.1)
NOISE = 0.05
_TRAIN, _VAL, _TABLE, _LENGTHS = 1, 2, 3, 4  # streams of random numbers
NUM_MEASURED = 256  # samples whose documents are looked at
# An image is the coarse pattern of its class plus noise. The noise is cut from one sheet: drawing it for each image
# would be the slowest part of a step.
COARSE = 4
SHEET = 2**20


class Synthetic(DatasetDefinition):
    """`dataset.samples` training samples and `val_fraction` as many again for validation, from `seed`.

    Token models get windows of a noisy Markov chain over the vocab, feature models get normal features with the class
    of a noisy linear teacher, image models a coarse pattern per class under noise.
    """

    kinds = ("tokens", LABELLED, "images", "features")
    vocab_follows_model = packs = True

    def vocab_size(self, config: Config) -> int:
        return config.dataset.vocab or config.model.vocab or DEFAULT_VOCAB

    def image_shape(self, config: Config) -> tuple[int, int | None]:
        return 3, None

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        chain = PackedChains if config.dataset.pack else MarkovChain
        kinds: dict[str, Callable[..., Split]] = {"tokens": chain, "features": Teacher, "images": Pictures}
        if spec.text is not None:
            kinds[LABELLED] = partial(LabelledChains, ids=spec.text.num_ids, pad=spec.text.pad_token)
        kind, shape, num_train = kinds[spec.sample_kind], tuple(spec.sample_shape), config.dataset.samples
        vocab = min(self.vocab_size(config), spec.vocab - (spec.mask_token is not None))
        num_val = max(1, round(num_train * config.dataset.val_fraction))
        identity = ["synthetic", 1, spec.sample_kind, config.seed, num_train, num_val, list(shape), vocab]
        identity += ["packed"] if config.dataset.pack else []
        fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        train, val = (
            kind(config.seed, stream, size, shape, vocab) for stream, size in ((_TRAIN, num_train), (_VAL, num_val))
        )
        dataset = Dataset("synthetic", vocab, fingerprint, train, val, has_ignored=train.packs)
        return require_samples(dataset, config, spec, f"dataset.samples={num_train}")


@dataclass(frozen=True)
class _GeneratedSplit(Split):
    seed: int
    stream: int
    size: int
    shape: tuple[int, ...]
    vocab: int

    def __len__(self) -> int:
        return self.size

    def generator(self, stream: int, index: int = 0) -> np.random.Generator:
        """Independent random numbers for each sample, so that any rank can compute any sample by itself."""
        return np.random.Generator(np.random.PCG64(derive_key(self.seed, stream, index)))


class MarkovChain(_GeneratedSplit):
    """Tokens that mostly follow from the one before: a model that learns the bigrams reaches about 1.4 nats a token."""

    @cached_property
    def successors(self) -> list[list[int]]:
        """(vocab, 4): the same table for both splits, so that a model can generalise."""
        table: list[list[int]] = (
            self.generator(_TABLE).integers(self.vocab, size=(self.vocab, len(SUCCESSORS))).tolist()
        )
        return table

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        tokens = self.tokens(self.generator(self.stream, index), self.shape[0] + 1)
        return tokens[:-1], tokens[1:]

    def tokens(self, generator: np.random.Generator, length: int) -> NDArray[np.int64]:
        choices = np.searchsorted(np.cumsum(SUCCESSORS)[:-1], generator.random(length), side="right").tolist()
        strays = generator.integers(self.vocab, size=length)
        is_stray = generator.random(length) < NOISE
        tokens = strays.tolist()
        successors = self.successors
        for at, stray in enumerate(is_stray[1:].tolist(), start=1):
            if not stray:
                tokens[at] = successors[tokens[at - 1]][choices[at]]
        return np.array(tokens, dtype=np.int64)


@dataclass(frozen=True)
class LabelledChains(_GeneratedSplit):
    """Texts of at least half the length with padding behind, whose class is the first token modulo their number. ids:
    number of token ids; pad: the one of padding."""

    ids: int
    pad: int

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        generator, seq = self.generator(self.stream, index), self.shape[0]
        tokens = generator.integers(self.ids - 1, size=seq)
        tokens += tokens >= self.pad
        label = int(tokens[0]) % self.vocab
        tokens[int(generator.integers((seq + 1) // 2, seq + 1)) :] = self.pad
        return tokens, np.array(label, dtype=np.int64)


class PackedChains(MarkovChain):
    """Several chains in a sample, of lengths that are even on a logarithmic scale. Of a rest of at most a sixteenth of
    the sample padding is made."""

    packs = True

    def document_lengths(self, index: int) -> NDArray[np.int64]:
        self.check(index)
        generator, left = self.generator(_LENGTHS, 2 * index + self.stream % 2), self.shape[0]
        lengths: list[int] = []
        while left > max(1, self.shape[0] // 16) or not lengths:
            drawn = int(np.exp(generator.uniform(0.0, np.log(self.shape[0] + 1))))
            lengths.append(min(left, drawn))
            left -= lengths[-1]
        return np.array(lengths, dtype=np.int64)

    def packing(self) -> Packing:
        lengths = [self.document_lengths(index) for index in range(min(len(self), NUM_MEASURED))]
        sizes = np.concatenate(lengths).astype(np.float64)
        number = len(lengths)
        examples = tuple(tuple(each.tolist()) for each in lengths[:NUM_EXAMPLES])
        return Packing(sizes.size / number, float(sizes.sum()) / number, float(sizes @ sizes) / number, 0, examples)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        generator, seq, lengths = self.generator(self.stream, index), self.shape[0], self.document_lengths(index)
        inputs, targets = np.zeros(seq, np.int64), np.full(seq, IGNORED, np.int64)
        for stop, length in zip(np.cumsum(lengths).tolist(), lengths.tolist()):
            tokens = self.tokens(generator, length + 1)
            inputs[stop - length : stop], targets[stop - length : stop] = tokens[:-1], tokens[1:]
        return inputs, targets


class Teacher(_GeneratedSplit):
    """Normal features; the class is the largest output of a fixed random linear map, or one in twenty times random."""

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        return self.generator(_TABLE).standard_normal((prod(self.shape), self.vocab))

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        generator = self.generator(self.stream, index)
        features = generator.standard_normal(self.shape)
        label = int(np.argmax(features.reshape(-1) @ self.weights))
        if generator.random() < NOISE:
            label = int(generator.integers(self.vocab))
        return features.astype(np.float32), np.array(label, dtype=np.int64)


class Pictures(_GeneratedSplit):
    """Images (channels, height, width): a coarse random pattern for each class, under noise as strong as itself."""

    @cached_property
    def noise(self) -> NDArray[np.float32]:
        return self.generator(_TABLE, 1).standard_normal(max(SHEET, 2 * prod(self.shape)), dtype=np.float32)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        key = derive_key(self.seed, self.stream, index)
        label, size = key % self.vocab, prod(self.shape)
        start = (key >> 16) % (self.noise.size - size)
        pattern = self.generator(_TABLE, 2 + label).standard_normal((self.shape[0], COARSE, COARSE), dtype=np.float32)
        image = resize(pattern, self.shape[1:]) + self.noise[start : start + size].reshape(self.shape)
        return image, np.array(label, dtype=np.int64)


DATASET = Synthetic()
