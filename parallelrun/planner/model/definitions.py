"""The base classes of models and datasets, and the look-up of an instance by name.

A model is a package with `spec.py`, which holds `MODEL`, an instance of a subclass of `ModelDefinition`, and
`network.py`, which holds `build(config, spec, precision)` and needs torch. A dataset is a module that holds `DATASET`,
an instance of a subclass of `DatasetDefinition`. A package outside this repository adds its own through the entry
points of `parallelrun.base.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from parallelrun.base import registry
from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.text import LABELLED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ModelDefinition(ABC):
    """A model before it is built. Subclasses override `make` and, where needed, attributes.

    own_keys: the keys of the section `model` that it reads, and `dropout` if it has any; others are refused. None: all.
    packs: its attention and positions know of documents that are packed into samples (`models.documents`).
    their_prefix: its parameters are those of a class of transformers, whose names follow this prefix; None: its own.
    is_lesson: `network.py` has `run(config, plan, device, show)`, which replaces training, instead of `build`; a lesson
    reads no dataset, and its matrices may be cut unevenly.
    """

    own_keys: ClassVar[frozenset[str] | None] = None
    is_lesson: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    their_prefix: ClassVar[str | None] = None

    @abstractmethod
    def make(self, config: Config, vocab: int) -> ModelSpec:
        """The spec of the model that `config.model` describes, over `vocab` token ids or classes. Raises ConfigError
        with every violation that the bounds in the schema do not exclude."""


@dataclass(frozen=True)
class BatchShare:
    """A part of a mixture: its label in records, its number of samples, and its weight, a whole number."""

    label: str
    num_samples: int
    weight: int


@dataclass(frozen=True)
class PartUse:
    """Use of one part of a mixture by a run. share: its fraction of each global batch; num_samples: its training
    samples; used: samples that the run reads; epochs: used / num_samples. None: not known before the run."""

    label: str
    share: float
    num_samples: int | None
    used: int
    epochs: float | None


@dataclass(frozen=True)
class Packing:
    """How documents fill the samples of a split, on average over its samples.

    documents: of a sample; tokens: of a sample, without padding; squares: the sum of the squared lengths of its
    documents, which the time of attention follows. cut: documents that are longer than a sample, of the whole split.
    examples: the lengths of the documents of some samples, evenly from the split.
    """

    documents: float
    tokens: float
    squares: float
    cut: int
    examples: tuple[tuple[int, ...], ...] = ()


NUM_EXAMPLES = 32  # of `Packing`


Sample: TypeAlias = tuple[Any, Any]  # (input, target): see `Split.sample`


class Split(ABC):
    """Samples by index. Every rank may call its methods, which are pure functions of their arguments.

    decodes_files: samples are decoded from files, so training reads them in worker processes. shares: of a mixture,
    whose samples are those of its parts, one part after the other. packs: documents are packed into samples, and
    `document_lengths` and `packing` tell how.
    """

    decodes_files: bool = False
    shares: tuple[BatchShare, ...] = ()
    packs: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """(input, target): token ids int64 of shape (seq,) each, or float32 features or an image (channels, height,
        width) and one int64 class. The loss ignores a target below 0. An input may be a dict of arrays, which the
        module's forward takes by name."""

    def augmented(self, index: int, sample_id: int) -> Sample:
        """The sample with training augmentation. sample_id: the global sample id, which differs in every epoch."""
        return self.sample(index)

    def rest(self, part: int = 0) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """(input, target) of the tokens behind the last sample, fewer than a sample's; None if there are none.

        part: of a mixture, the number of its part. Training leaves them out; a score counts them.
        """
        return None

    def document_lengths(self, index: int) -> NDArray[np.int64]:
        """The lengths of the documents that are packed into a sample, in order; what they leave is padding."""
        raise NotImplementedError(f"{type(self).__name__} packs no documents")

    def packing(self) -> Packing:
        """How documents fill the samples, or those of them that are looked at."""
        raise NotImplementedError(f"{type(self).__name__} packs no documents")

    def check(self, index: int) -> None:
        """Raise IndexError unless there is a sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside a split of {len(self)} samples")


BYTES = "bytes"  # a token per byte
# Keys of `dataset` that say where the data are, how they are read, or what another record has the sha256 of.
_NO_SETTINGS = frozenset({"description", "path", "cache", "num_workers", "tokenizer", "chat_template", "mixture"})
IGNORED = -1  # as a target
EVAL = "eval"  # the verb that scores weights, on data of any size


@dataclass(frozen=True)
class TextTokens:
    """The tokenizer of a dataset. sha256: of its file, or `bytes`. path: of that file, where known."""

    sha256: str
    path: Path | None = None

    @property
    def is_bytes(self) -> bool:
        return self.sha256 == BYTES


@dataclass(frozen=True)
class Dataset:
    """An opened dataset. vocab: number of token ids or classes; fingerprint: sha256 of the data.

    has_ignored: some targets are below 0, so valid targets must be counted before every step. tokenizer: the sha256 of
    what made token ids of texts, where known. whole: all data in their own order, undivided, to be scored; None: train,
    then val. settings: by key, everything that decides which sample comes when, beside the data and the global batch.
    """

    name: str
    vocab: int
    fingerprint: str
    train: Split
    val: Split
    has_ignored: bool = False
    tokenizer: str | None = None
    whole: Split | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """The dataset's entry in a checkpoint."""
        names = {"name": self.name, "fingerprint": self.fingerprint, "tokenizer": self.tokenizer}
        return {**names, "settings": dict(self.settings)}


class DatasetDefinition(ABC):
    """A dataset before it is opened. Subclasses override `vocab_size`, `open` and, where needed, the rest.

    kinds: of its samples, which a model must read: `tokens`, `labelled texts`, `features`, `images`; several where it
    follows the model. reads_path: it reads `dataset.path`. reads_source: it calls `dataset.source`. reads_tokenizer: it
    reads `dataset.tokenizer` and other keys of text, but for those in unread. reads_mixture: it reads
    `dataset.mixture`. vocab_follows_model: it generates token ids or classes of the model's vocab. packs: it reads
    `dataset.pack`.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    reads_path: ClassVar[bool] = False
    reads_source: ClassVar[bool] = False
    reads_tokenizer: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ("chat_template",)
    reads_mixture: ClassVar[bool] = False
    vocab_follows_model: ClassVar[bool] = False
    packs: ClassVar[bool] = False

    @abstractmethod
    def vocab_size(self, config: Config) -> int | None:
        """Number of token ids or classes; None if only the data determine it."""

    def example(self, config: Config) -> Sample | None:
        """Return one sample where the data say what samples are; None where the model says it. Raises ConfigError."""
        return None

    def has_ignored(self, config: Config) -> bool:
        """Return whether some targets are ignored, because the loss is on a part of the tokens only."""
        return False

    def tokenizer(self, config: Config) -> TextTokens | None:
        """Return the tokenizer; None if the data are not text or it is unknown. Raises ConfigError."""
        return None

    def chat_template(self, config: Config) -> str | None:
        """Return the jinja2 template of its conversations; None if it has none. Raises ConfigError."""
        return None

    def settings(self, config: Config) -> dict[str, Any]:
        """Return the keys of `dataset` that decide which samples there are and in which order, with plain values.

        A change of one of them is refused on resuming. Override this to add what else decides, by a name of its own.
        """
        keys = vars(config.dataset).items()
        return {f"dataset.{key}": value for key, value in keys if key not in _NO_SETTINGS}

    def image_shape(self, config: Config) -> tuple[int, int | None] | None:
        """(channels, height and width) of images, with size None if it varies; None for other samples."""
        return None

    def sample_kinds(self, config: Config) -> tuple[str, ...]:
        """The `kinds` of the data that `config` names. Raises ConfigError."""
        return self.kinds

    @abstractmethod
    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        """The dataset as samples for the model. Fast enough to be called before any rank is started.

        Raises EnvironmentProblem for data that are missing, unreadable or too small for one global batch, and
        ConfigError for a model of other sizes. `check_samples` has accepted the kind of the model's samples.
        """

    def is_ready(self, config: Config) -> bool:
        """Whether `open` reads only: it writes nothing, and takes no long time."""
        return True

    def uses(self, config: Config, spec: ModelSpec, global_batch: int) -> list[PartUse]:
        """Return the use of each part of a mixture; empty for any other dataset. Writes nothing."""
        return []

    def notes(self, config: Config, spec: ModelSpec, dataset: Dataset) -> list[str]:
        """Notes for the user before a run, such as that images are enlarged."""
        _, size = self.image_shape(config) or (0, None)
        wanted = spec.sample_shape[-1] if len(spec.sample_shape) == 3 else 0
        if size is None or size >= wanted:
            return []
        sizes = f"{size} x {size} pixels, and model={config.model.preset} reads {wanted} x {wanted}"
        return [f"the images of dataset={config.dataset.name} have {sizes}: they are enlarged"]


def model(config: Config) -> ModelDefinition:
    """The definition of `config.model.name`. Raises KeyError for an unknown name."""
    definition: ModelDefinition = registry.load("models", config.model.name, "spec").MODEL
    return definition


def dataset(config: Config) -> DatasetDefinition:
    """The definition of `config.dataset.name`. Raises KeyError for an unknown name."""
    definition: DatasetDefinition = registry.load("datasets", config.dataset.name).DATASET
    return definition


EXAMPLES = {
    "tokens": ("pystdlib", "gpt"),
    LABELLED: ("labelled", "hf"),
    "features": ("synthetic", "mlp"),
    "images": ("digits", "resnet"),
}


def check_samples(config: Config, spec: ModelSpec) -> list[Problem]:
    """Refuse a dataset whose samples the model does not read, or that does not declare what they are."""
    if model(config).is_lesson:
        return []
    name, definition = config.dataset.name, dataset(config)
    kinds = definition.sample_kinds(config)
    kind = spec.sample_kind
    if kind in kinds:
        return []
    if not kinds or not EXAMPLES.keys() >= set(kinds):
        owner = f"{type(definition).__module__}.{type(definition).__name__}"
        message = f"dataset={name} does not declare its samples: {owner}.kinds is {kinds}, not some of {list(EXAMPLES)}"
        return [Problem(message, "dataset", f'kinds = ("{kind}",) in {owner}, if these are its samples')]
    message = f"dataset={name} gives {' or '.join(kinds)}, and model={config.model.preset} reads {kind}"
    fix = f"dataset={EXAMPLES[kind][0]} or model={EXAMPLES[kinds[0]][1]}"
    return [Problem(message, "dataset", fix, "parallelrun ls datasets", kind="undefined")]
