"""Shared by image datasets: images by index, the size a model reads, normalisation, augmentation by hash."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.files import digest_array
from parallelrun.data.order import derive_key, mix
from parallelrun.data.tokens import held_out, require_samples
from parallelrun.planner.model.definitions import Dataset, DatasetDefinition, Split
from parallelrun.planner.model.model_spec import ModelSpec

_AUGMENT = 0x696D61
Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel, of values in [0, 1]


@dataclass(frozen=True)
class ImageView:
    """How images reach the model. shape: (channels, height, width); flat: as one row of features instead.

    flip: mirror half of the training samples; crop: shift them by up to so many pixels, filling with the mean.
    """

    shape: tuple[int, int, int]
    moments: Moments
    seed: int
    flip: bool = False
    crop: int = 0
    flat: bool = False

    def show(self, image: NDArray[Any], sample_id: int | None = None, brightest: float = 1) -> NDArray[np.float32]:
        """(channels, height, width) in [0, brightest], of any size, as float32 for the model; augmented by hash of
        sample_id where one is given."""
        channels = self.shape[0]
        if image.shape[0] != channels:  # grey is repeated; colour becomes its mean, repeated
            image = np.repeat(image.mean(0, keepdims=True, dtype=np.float32), channels, axis=0)
        mean, std = (
            np.array(values if len(values) == channels else (sum(values) / len(values),) * channels, dtype=np.float32)
            * np.float32(brightest)
            for values in self.moments
        )
        image = resize(image, self.shape[1:])
        shown = np.empty(self.shape, np.float32)  # in the order of memory that the model reads, whatever the image's
        np.subtract(image, mean[:, None, None], out=shown)
        shown /= std[:, None, None]
        if sample_id is not None:
            shown = self._augment(shown, sample_id)
        return np.ascontiguousarray(shown.reshape(-1) if self.flat else shown)

    def _augment(self, image: NDArray[np.float32], sample_id: int) -> NDArray[np.float32]:
        bits = derive_key(self.seed, _AUGMENT, sample_id)
        if self.flip and bits & 1:
            image = image[:, :, ::-1]
        if self.crop:
            span = 2 * self.crop + 1
            image = shifted(image, (bits >> 8) % span - self.crop, (bits >> 32) % span - self.crop)
        return image


@dataclass(frozen=True)
class ImageSet(ABC):
    """All images of a dataset with their labels. source: where they come from, for messages.

    num_train: the number of training images, which come first; None: split all by hash (`dataset.val_fraction`).
    brightest: the value of full brightness.
    """

    source: str
    labels: NDArray[np.int64]
    num_train: int | None = None
    brightest: int = 255

    @abstractmethod
    def load(self, index: int, size: int) -> NDArray[np.uint8]:
        """An image (channels, height, width), as it is or in the `size` that the model reads."""

    @abstractmethod
    def fingerprint(self, config: Config, splits: Sequence[ImageSplit]) -> str:
        """sha256 of the images and their splits."""

    def keys(self) -> NDArray[np.uint64]:
        """The number of each image whose hash decides its split."""
        return mix(np.arange(len(self.labels), dtype=np.uint64))


@dataclass(frozen=True, kw_only=True)
class Pixels(ImageSet):
    """Images in memory. pixels: uint8 (images, channels, height, width)."""

    pixels: NDArray[np.uint8]

    def load(self, index: int, size: int) -> NDArray[np.uint8]:
        return np.asarray(self.pixels[index])

    def fingerprint(self, config: Config, splits: Sequence[ImageSplit]) -> str:
        content = digest_array(self.pixels) + digest_array(self.labels)
        return hashlib.sha256(content + f"{self.num_train}/{config.dataset.val_fraction}".encode()).hexdigest()


@dataclass(frozen=True)
class ImageSplit(Split):
    """The images of `data` with these indices."""

    data: ImageSet
    indices: NDArray[np.int64]
    view: ImageView
    decodes_files: bool

    def __len__(self) -> int:
        return int(self.indices.size)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.augmented(index, None)

    def augmented(self, index: int, sample_id: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
        self.check(index)
        number = int(self.indices[index])
        image = self.data.load(number, self.view.shape[1])
        return self.view.show(image, sample_id, self.data.brightest), self.data.labels[number]


class ImageDataset(DatasetDefinition):
    """Base of datasets of labelled images. shape: (channels, height and width), with size None if it varies."""

    kinds = ("images", "features")
    classes: ClassVar[int]
    shape: ClassVar[tuple[int, int | None]]
    moments: ClassVar[Moments]
    decodes_files: ClassVar[bool] = False  # see `Split`

    def vocab_size(self, config: Config) -> int | None:
        return self.classes

    def image_shape(self, config: Config) -> tuple[int, int | None]:
        return self.shape

    @abstractmethod
    def read(self, config: Config) -> ImageSet:
        """The images. Raises EnvironmentProblem naming a missing or wrong file."""

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        view = view_for(config, spec, self.shape, self.moments)
        data = self.read(config)
        if data.num_train is None:
            is_val = held_out(data.keys(), config.dataset.val_fraction)
        else:
            is_val = np.arange(len(data.labels)) >= data.num_train
        train, val = (
            ImageSplit(data, np.flatnonzero(is_in), seen, self.decodes_files)
            for is_in, seen in ((~is_val, view), (is_val, replace(view, flip=False, crop=0)))
        )
        num_classes = self.vocab_size(config) or 0
        dataset = Dataset(config.dataset.name, num_classes, data.fingerprint(config, (train, val)), train, val)
        counts = f"{num_classes} classes, {len(data.labels)} images"
        return require_samples(dataset, config, spec, f"{data.source} ({counts})")


def view_for(config: Config, spec: ModelSpec, own: tuple[int, int | None], moments: Moments) -> ImageView:
    """How the model sees images of own = (channels, size). Raises ConfigError for a model that reads other samples."""
    (channels, size), shape = own, spec.sample_shape
    is_flat = spec.kind == "features"
    if len(shape) != 3:
        if not (is_flat and size and prod(shape) == channels * size**2):
            wanted = f"{prod(shape)} features" if is_flat else spec.kind
            message = f"dataset={config.dataset.name} gives images, and model={config.model.preset} reads {wanted}"
            fix = f"model.hidden={channels * size**2}" if size and is_flat else "model=resnet"
            raise ConfigError(Problem(message, "dataset", fix))
        shape = (channels, size, size)
    settings = config.dataset
    return ImageView((shape[0], shape[1], shape[2]), moments, config.seed, settings.flip, settings.crop, is_flat)


def resize(image: NDArray[Any], size: Sequence[int]) -> NDArray[Any]:
    """(channels, height, width) to that height and width, bilinear between pixel centres; smaller sizes average.

    Float32; an image of that size already is returned as it is."""
    if image.shape[1:] == tuple(size):
        return image
    rows, columns = _weights(image.shape[1], size[0]), _weights(image.shape[2], size[1])
    return np.asarray(rows @ image @ columns.T, dtype=np.float32)


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> NDArray[np.float32]:
    """(new, old): the share of each old pixel in each new one, a tent as wide as the coarser of the two grids."""
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    width = max(1.0, old / new)
    tent = np.clip(1 - np.abs(np.arange(old)[None] - centres[:, None]) / width, 0, None)
    return np.asarray(tent / tent.sum(1, keepdims=True), dtype=np.float32)


def shifted(image: NDArray[np.float32], down: int, right: int) -> NDArray[np.float32]:
    """The image moved by so many pixels; zeros come in."""
    height, width = image.shape[1:]
    down, right = (max(-size, min(size, by)) for size, by in ((height, down), (width, right)))
    moved = np.zeros_like(image)
    moved[:, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = image[
        :, max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)
    ]
    return moved
