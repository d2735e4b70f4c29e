"""`dataset=mixture 'dataset.mixture=[{name: text, path: A, weight: 3}, {name: pystdlib, weight: 1}]'`.

Every global batch has each part's exact share of samples (`shares`), at places in the batch that are drawn by hash.
Each part is shuffled by itself, and repeated when it is through.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted
from parallelrun.config import presets
from parallelrun.config.keys import nearest
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.shares import counts_after, whole_weights
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Dataset, DatasetDefinition, Split
from parallelrun.planner.model.model_spec import ModelSpec

KEY = "dataset.mixture"


@dataclass(frozen=True)
class MixedPart:
    """One dataset of a mixture: its label in records, its configuration and its weight."""

    label: str
    config: Config
    weight: Fraction

    @property
    def definition(self) -> DatasetDefinition:
        return definitions.dataset(self.config)

    def num_samples(self, spec: ModelSpec) -> int | None:
        """Its samples for training; None if that is not known before the run, or the data are missing."""
        try:
            return len(self.definition.open(self.config, spec).train) if self.definition.is_ready(self.config) else None
        except EnvironmentProblem:
            return None  # the run will say what is wrong


@dataclass(frozen=True)
class MixedSplit(Split):
    """The samples of all parts, one part after the other."""

    splits: tuple[Split, ...]
    shares: tuple[definitions.BatchShare, ...]
    decodes_files: bool
    packs: bool

    def __len__(self) -> int:
        return sum(map(len, self.splits))

    def document_lengths(self, index: int) -> NDArray[np.int64]:
        split, inner = self._locate(index)
        return split.document_lengths(inner)

    def packing(self) -> definitions.Packing:
        total, packings = sum(share.weight for share in self.shares), [split.packing() for split in self.splits]
        weights = [share.weight / total for share in self.shares]

        def mean(values: Iterable[float]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True))

        return definitions.Packing(
            documents=mean(packing.documents for packing in packings),
            tokens=mean(packing.tokens for packing in packings),
            squares=mean(packing.squares for packing in packings),
            cut=sum(packing.cut for packing in packings),
            examples=tuple(
                each
                for weight, packing in zip(weights, packings)
                for each in packing.examples[:: max(1, round(1 / weight))]
            ),
        )

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        split, inner = self._locate(index)
        return split.sample(inner)

    def augmented(self, index: int, sample_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        split, inner = self._locate(index)
        return split.augmented(inner, sample_id)

    def rest(self, part: int = 0) -> tuple[NDArray[Any], NDArray[Any]] | None:
        return self.splits[part].rest()

    def _locate(self, index: int) -> tuple[Split, int]:
        self.check(index)
        ends = list(itertools.accumulate(map(len, self.splits)))
        part = bisect.bisect_right(ends, index)
        return self.splits[part], index - ends[part] + len(self.splits[part])


class Mixture(DatasetDefinition):
    """Several datasets, with weights. Keys of `dataset` that a part does not give apply to it from outside."""

    reads_tokenizer = reads_mixture = packs = True
    unread = ()

    def vocab_size(self, config: Config) -> int | None:
        self.tokenizer(config)
        sizes = [part.definition.vocab_size(part.config) for part in parts_of(config)]
        return max((size for size in sizes if size is not None), default=None)

    def tokenizer(self, config: Config) -> definitions.TextTokens | None:
        """Raises ConfigError if two parts have different ones: a token id would stand for two texts."""
        tokenizers = [
            (part.label, made) for part in parts_of(config) if (made := part.definition.tokenizer(part.config))
        ]
        for label, made in tokenizers[1:]:
            if made.sha256 != tokenizers[0][1].sha256:
                names = " and ".join(f"{name} by {of.path or of.sha256}" for name, of in (tokenizers[0], (label, made)))
                raise ConfigError(Problem(f"the parts of a mixture need one tokenizer: {names}", KEY))
        return tokenizers[0][1] if tokenizers else None

    def has_ignored(self, config: Config) -> bool:
        return any(part.definition.has_ignored(part.config) for part in parts_of(config))

    def sample_kinds(self, config: Config) -> tuple[str, ...]:
        """What all parts give. Raises ConfigError if there is nothing."""
        kinds_of = {part.label: part.definition.sample_kinds(part.config) for part in parts_of(config)}
        shared = tuple(kind for kind in definitions.EXAMPLES if all(kind in kinds for kinds in kinds_of.values()))
        if not shared:
            each = " and ".join(
                f"{label} gives {' or '.join(kinds) or 'undeclared samples'}" for label, kinds in kinds_of.items()
            )
            raise ConfigError(Problem(f"the parts of a mixture need samples of one kind: {each}", KEY))
        return shared

    def settings(self, config: Config) -> dict[str, Any]:
        parts = parts_of(config)
        settings: dict[str, Any] = {"dataset.name": config.dataset.name, KEY: counted(len(parts), "part")}
        for number, (part, weight) in enumerate(zip(parts, whole_weights([part.weight for part in parts]))):
            of_part = {**part.definition.settings(part.config), "dataset.weight": weight}
            settings |= {key.replace("dataset", f"{KEY}[{number}]", 1): value for key, value in of_part.items()}
        return settings

    def image_shape(self, config: Config) -> tuple[int, int | None] | None:
        shapes = {part.definition.image_shape(part.config) for part in parts_of(config)}
        return shapes.pop() if len(shapes) == 1 else None

    def is_ready(self, config: Config) -> bool:
        return all(part.definition.is_ready(part.config) for part in parts_of(config))

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        parts = parts_of(config)
        opened = [part.definition.open(part.config, spec) for part in parts]
        weights = whole_weights([part.weight for part in parts])
        wholes = [dataset.whole for dataset in opened if dataset.whole is not None]
        train, val, whole = (
            MixedSplit(
                tuple(splits),
                tuple(
                    definitions.BatchShare(part.label, len(split), weight)
                    for part, split, weight in zip(parts, splits, weights)
                ),
                any(split.decodes_files for split in splits),
                all(split.packs for split in splits),
            )
            for splits in ([dataset.train for dataset in opened], [dataset.val for dataset in opened], wholes)
        )
        identity = [[dataset.fingerprint, share] for dataset, share in zip(opened, weights)]
        fingerprint = hashlib.sha256(json.dumps(["mixture", 1, identity]).encode()).hexdigest()
        vocab, has_ignored = max(dataset.vocab for dataset in opened), any(dataset.has_ignored for dataset in opened)
        scored = whole if len(wholes) == len(opened) else None
        return Dataset(config.dataset.name, vocab, fingerprint, train, val, has_ignored, whole=scored)

    def uses(self, config: Config, spec: ModelSpec, global_batch: int) -> list[definitions.PartUse]:
        parts = parts_of(config)
        weights = whole_weights([part.weight for part in parts])
        read = counts_after(weights, global_batch, config.steps)
        sizes = [part.num_samples(spec) for part in parts]
        return [
            definitions.PartUse(part.label, weight / sum(weights), size, count, count / size if size else None)
            for part, weight, size, count in zip(parts, weights, sizes, read)
        ]


def parts_of(config: Config) -> list[MixedPart]:
    """The parts that the configuration names. Raises ConfigError with every violation."""
    entries = config.dataset.mixture
    if not entries:
        example = "'dataset.mixture=[{name: text, path: FILE, weight: 3}, {name: pystdlib, weight: 1}]'"
        raise ConfigError(Problem("dataset=mixture needs its parts", KEY, example))
    problems = [problem for number, part in enumerate(entries) for problem in _violations(part, f"{KEY}[{number}]")]
    if problems:
        raise ConfigError(*problems)
    labels: dict[str, int] = {}
    parts = []
    for part in entries:
        fields = {key: value for key, value in part.items() if key != "weight"}
        name = fields["name"]
        preset = presets.values("dataset", name) if name in presets.options("dataset") else {}
        settings: dict[str, Any] = {"mixture": [], **preset, **fields}
        label = Path(fields["path"]).name.partition(".")[0] if fields.get("path") else name
        labels[label] = labels.get(label, 0) + 1
        label = label if labels[label] == 1 else f"{label}_{labels[label]}"
        own = replace(config, dataset=replace(config.dataset, **settings), global_batch=1, local_batch=None)
        parts.append(MixedPart(label, own, Fraction(str(part.get("weight", 1)))))
    return parts


def _violations(part: Any, where: str) -> Iterator[Problem]:
    if not isinstance(part, dict) or not isinstance(part.get("name"), str):
        yield Problem(f"{where} must be a mapping with the name of a dataset: {part!r}", where)
        return
    weight = part.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not (math.isfinite(weight) and weight > 0):
        yield Problem(f"{where}: weight={weight!r} must be a number above 0", where)
    if part["name"] == "mixture" or not registry.has("datasets", part["name"]):
        datasets = [name for name in registry.names("datasets") if name != "mixture"]
        yield Problem(f"{where}: no such dataset: {part['name']}", where, ", ".join(nearest(part["name"], datasets)))
    hints = typing.get_type_hints(DatasetConfig)
    for outside in ("mixture", "cache"):  # `config.recipes.untrusted` limits where the one cache may be
        del hints[outside]
    for key, value in part.items():
        if key == "weight":
            continue
        if key not in hints:
            yield Problem(f"{where}: no such key of a dataset: {key}", where, ", ".join(nearest(str(key), hints)))
        elif not _fits(value, hints[key]):
            yield Problem(f"{where}: {key}={value!r} is no {hints[key]}", where)


def _fits(value: Any, hint: Any) -> bool:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)


DATASET = Mixture()
