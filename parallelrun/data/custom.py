"""`dataset=custom dataset.source=./data.py:build`: the samples of a dataset that the user's function returns.

The function returns anything with a length and items by index, such as a torch Dataset, or an iterable, which is read
into memory up to `dataset.samples` items. It is called with `split="train"` and `split="val"` if its signature has
`split`; else `dataset.val_fraction` of the items are held out. An item is a pair (input, target), a dict whose entries
go to the module's forward by name (`labels` is the target), or one input. numpy only: tensors become arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from parallelrun.base import user_functions
from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.base.user_functions import failed
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.order import mix
from parallelrun.data.tokens import held_out, require_samples
from parallelrun.planner.model.definitions import IGNORED, Dataset, DatasetDefinition, Sample, Split
from parallelrun.planner.model.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = "dataset.source"
LABELS = "labels"  # the entry of a dict that is the target
NUM_HASHED = 16  # items that enter the fingerprint


class CustomSplit(Split):
    """The items with these indices of what the user's function returned."""

    def __init__(self, items: Any, indices: NDArray[np.int64], source: str):
        self._items, self._indices, self._source = items, indices, source

    def __len__(self) -> int:
        return int(self._indices.size)

    def sample(self, index: int) -> Sample:
        self.check(index)
        try:
            item = self._items[int(self._indices[index])]
        except Exception as error:  # the user's code may raise anything
            raise failed(f"item {self._indices[index]} of {self._source} fails", error, KEY) from error
        return as_sample(item, self._source)


def as_sample(item: Any, source: str) -> Sample:
    """Return (input, target) of an item: arrays of float32 or int64, the input a dict of them if the item is one."""
    if isinstance(item, Mapping):
        entries = {str(name): _array(value, source) for name, value in item.items()}
        return entries, entries.pop(LABELS, np.array(IGNORED))
    if isinstance(item, (tuple, list)):
        if len(item) != 2:
            message = f"an item of {source} has {len(item)} parts; it must be (input, target) or a dict"
            raise ConfigError(Problem(message, KEY, 'return {"name": value, ...}'))
        return _array(item[0], source), _array(item[1], source)
    return _array(item, source), np.array(IGNORED)


def _array(value: Any, source: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        message = f"an item of {source} holds {with_article(type(value).__name__)}, which is no tensor, array or number"
        raise ConfigError(Problem(message, KEY))
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


class CustomDataset(DatasetDefinition):
    """The samples of the user's function."""

    kinds = ("tokens", "features", "images")
    reads_source = True

    def vocab_size(self, config: Config) -> int | None:
        """`vocab`, `num_classes`, or the number of `classes`, if what the function returned has one of them."""
        items, _ = _items(config, "train")
        for name in ("vocab", "num_classes"):
            if isinstance(number := getattr(items, name, None), int):
                return number
        return len(getattr(items, "classes", None) or ()) or None

    def has_ignored(self, config: Config) -> bool:
        """Return whether its targets may be ignored: those of sequences."""
        return config.model.loss is None and self.example(config)[1].ndim > 0

    def example(self, config: Config) -> Sample:
        items, _ = _items(config, "train")
        return CustomSplit(items, np.arange(len(items)), str(config.dataset.source)).sample(0)

    def image_shape(self, config: Config) -> tuple[int, int | None] | None:
        inputs, _ = self.example(config)
        return (inputs.shape[0], inputs.shape[1]) if isinstance(inputs, np.ndarray) and inputs.ndim == 3 else None

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        source = str(config.dataset.source)
        inputs, target = self.example(config)
        if target.dtype.kind == "f" and config.model.loss is None:
            message = f"a target of {source} is no class or token id, but a number with a fraction"
            raise ConfigError(Problem(message, KEY, "model.loss=./net.py:loss", kind="undefined"))
        if isinstance(inputs, np.ndarray) and inputs.shape != spec.sample_shape:
            message = f"an input of {source} has the shape {inputs.shape}, and the model reads {spec.sample_shape}"
            fix = f"model.seq={inputs.shape[0]}" if spec.kind == "tokens" and inputs.ndim == 1 else ""
            raise ConfigError(Problem(message, KEY, fix, kind="arithmetic"))
        (train, is_whole), (val, _) = _items(config, "train"), _items(config, "val")
        if is_whole:
            is_val = held_out(mix(np.arange(len(train), dtype=np.uint64)), config.dataset.val_fraction)
            indices = np.flatnonzero(~is_val), np.flatnonzero(is_val)
        else:
            indices = np.arange(len(train)), np.arange(len(val))
        splits = CustomSplit(train, indices[0], source), CustomSplit(val, indices[1], source)
        dataset = Dataset(
            config.dataset.name, spec.vocab, _fingerprint(splits), *splits, has_ignored=self.has_ignored(config)
        )
        return require_samples(dataset, config, spec, f"{source} ({len(train)} items)")

    def notes(self, config: Config, spec: ModelSpec, dataset: Dataset) -> list[str]:
        items, _ = _items(config, "train")
        if not isinstance(items, ItemsOfIterable):
            return []
        text = f"{config.dataset.source} returned an iterable: its first {len(items)} items were read into memory"
        return [f"{text}, and later ones are never read (dataset.samples)"] if items.is_cut else [text]


class ItemsOfIterable(list[Any]):
    """The first items of an iterable. is_cut: there are more."""

    is_cut = False


def _items(config: Config, split: str) -> tuple[Any, bool]:
    """(what the user's function returned for a split, whether that is for both splits)."""
    source = config.dataset.source
    function = user_functions.load(KEY, source)
    has_split = "split" in user_functions.parameters_of(function)
    return _called(function, source, split if has_split else "", config.dataset.samples), not has_split


@lru_cache(maxsize=4)
def _called(function: Callable[..., Any], source: str | None, split: str, limit: int) -> Any:
    """Call the user's function once in a process: data may take long to load. function: another one if its file has
    changed."""
    items = user_functions.call(KEY, source, {"split": split}, {})
    if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
        return items
    if not isinstance(items, Iterable):
        message = f"{source} gave {with_article(type(items).__name__)}, which has no items by index and is no iterable"
        raise ConfigError(Problem(message, KEY, "return a torch Dataset with __len__ and __getitem__"))
    stream = iter(items)
    read = ItemsOfIterable(islice(stream, limit))
    read.is_cut = next(stream, None) is not None
    return read


def _fingerprint(splits: tuple[CustomSplit, CustomSplit]) -> str:
    """sha256 of the number of items, and of some of them unless they differ when they are read again."""
    digest = _digest(splits)
    if digest == _digest(splits):
        return digest
    return hashlib.sha256(f"drawn/1/{[len(split) for split in splits]}".encode()).hexdigest()


def _digest(splits: tuple[CustomSplit, CustomSplit]) -> str:
    """sha256 of the number of items, and of some of them, evenly over each split."""
    content = hashlib.sha256()
    for split in splits:
        content.update(str(len(split)).encode())
        for index in range(0, len(split), max(1, len(split) // NUM_HASHED)):
            inputs, target = split.sample(index)
            arrays = [*inputs.values()] if isinstance(inputs, dict) else [inputs]
            for array in (*arrays, target):
                content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


DATASET = CustomDataset()
