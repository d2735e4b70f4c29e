"""What image datasets share: pixels in memory, the size a model wants, normalisation, augmentation by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.byte_files import digest_array
from parallelrun.data.dataset import Dataset, held_out, require_samples
from parallelrun.data.order import derive_key, mix
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AUGMENT = 0x696D61
Moments = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel, of values in [0, 1]


@dataclass(frozen=True)
class Look:
    """How an image reaches the model. shape: (channels, height, width); flat: as one row of features instead.

    flip: mirror half of the training samples; crop: shift them by up to so many pixels, filling with the mean.
    """

    shape: tuple[int, int, int]
    moments: Moments
    seed: int
    flip: bool = False
    crop: int = 0
    flat: bool = False

    def show(self, image: NDArray[Any], sample_id: int | None = None) -> NDArray[np.float32]:
        """(channels, height, width) in [0, 1], of any size, as float32 for the model; augmented by hash of sample_id
        where one is given."""
        image = _with_channels(image.astype(np.float32), self.shape[0])
        mean, std = (np.array(_per_channel(values, self.shape[0]), dtype=np.float32) for values in self.moments)
        image = (resize(image, self.shape[1:]) - mean[:, None, None]) / std[:, None, None]
        if sample_id is not None:
            image = self._augment(image, sample_id)
        return np.ascontiguousarray(image.reshape(-1) if self.flat else image)

    def _augment(self, image: NDArray[np.float32], sample_id: int) -> NDArray[np.float32]:
        bits = derive_key(self.seed, _AUGMENT, sample_id)
        if self.flip and bits & 1:
            image = image[:, :, ::-1]
        if self.crop:
            span = 2 * self.crop + 1
            image = shifted(image, (bits >> 8) % span - self.crop, (bits >> 32) % span - self.crop)
        return image


@dataclass(frozen=True)
class ImageSplit:
    """Images in memory. pixels: uint8 (images, channels, height, width), of which `chosen` make up the split; top: the
    value that stands for full brightness."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    chosen: NDArray[np.int64]
    look: Look
    top: int = 255

    def __len__(self) -> int:
        return int(self.chosen.size)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._sample(index, None)

    def augmented(self, index: int, sample_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The sample as training sees it: a function of the index and the global sample id, whatever the plan."""
        return self._sample(index, sample_id)

    def _sample(self, index: int, sample_id: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside a split of {len(self)} samples")
        place = self.chosen[index]
        return self.look.show(self.pixels[place] / np.float32(self.top), sample_id), self.labels[place]


@dataclass(frozen=True)
class Pixels:
    """A dataset in memory: see `ImageSplit`. num_train: how many are its own training images; None: all, to be split by
    hash (`dataset.val_fraction`)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    moments: Moments
    num_train: int | None = None
    top: int = 255


def look_for(config: Config, spec: ModelSpec, own: tuple[int, int | None], moments: Moments) -> Look:
    """How the model of `spec` sees images of own = (channels, size). Raises ConfigError for one that reads others."""
    channels, size = own
    if len(spec.sample_shape) == 3:
        shape = spec.sample_shape
    elif spec.kind == "features" and size and prod(spec.sample_shape) == channels * size**2:
        shape = (channels, size, size)
    else:
        wanted = f"{prod(spec.sample_shape)} features" if spec.kind == "features" else spec.kind
        what = f"dataset={config.dataset.name} gives images, and model={config.model.preset} reads {wanted}"
        fix = f"model.hidden={channels * size**2}" if size and spec.kind == "features" else "model=resnet"
        raise ConfigError(Problem(what, "dataset", fix))
    return Look((shape[0], shape[1], shape[2]), moments, config.seed, config.dataset.flip, config.dataset.crop,
                flat=spec.kind == "features")  # fmt: skip


def open_pixels(name: str, classes: int, data: Pixels, config: Config, spec: ModelSpec, source: str) -> Dataset:
    """The dataset over images in memory. Raises EnvironmentProblem when there are fewer than a global batch."""
    count, channels, size = len(data.labels), data.pixels.shape[1], data.pixels.shape[2]
    numbers = np.arange(count, dtype=np.int64)
    if data.num_train is None:
        is_val = held_out(mix(numbers.astype(np.uint64)), config.dataset.val_fraction)
    else:
        is_val = numbers >= data.num_train
    look = look_for(config, spec, (channels, size), data.moments)
    plain = replace(look, flip=False, crop=0)
    train = ImageSplit(data.pixels, data.labels, numbers[~is_val], look, data.top)
    val = ImageSplit(data.pixels, data.labels, numbers[is_val], plain, data.top)
    content = digest_array(data.pixels) + digest_array(data.labels)
    fingerprint = hashlib.sha256(content + f"{data.num_train}/{config.dataset.val_fraction}".encode()).hexdigest()
    return require_samples(Dataset(name, classes, fingerprint, train, val), config, spec, source)


def resize(image: NDArray[np.float32], size: Sequence[int]) -> NDArray[np.float32]:
    """(channels, height, width) to that height and width, bilinear between pixel centres; smaller sizes average."""
    if image.shape[1:] == tuple(size):
        return image
    rows, columns = _weights(image.shape[1], size[0]), _weights(image.shape[2], size[1])
    return np.asarray(rows @ image @ columns.T, dtype=np.float32)


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> NDArray[np.float32]:
    """(new, old): what each new pixel takes of each old one, a tent as wide as the coarser of the two grids."""
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    width = max(1.0, old / new)
    tent = np.clip(1 - np.abs(np.arange(old)[None] - centres[:, None]) / width, 0, None)
    return (tent / tent.sum(1, keepdims=True)).astype(np.float32)


def shifted(image: NDArray[np.float32], down: int, right: int) -> NDArray[np.float32]:
    """The image moved by so many pixels; zeros come in."""
    out = np.zeros_like(image)
    height, width = image.shape[1:]
    if abs(down) < height and abs(right) < width:
        out[:, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
            :, max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)
        ]
    return out


def _with_channels(image: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    """Grey is repeated; colour becomes its mean, repeated, where another number of channels is wanted."""
    if image.shape[0] == channels:
        return image
    return np.repeat(image.mean(0, keepdims=True), channels, axis=0)


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values if len(values) == channels else (sum(values) / len(values),) * channels
