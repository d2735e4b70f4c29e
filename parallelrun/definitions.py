"""The base classes of models and datasets, and the look-up of an instance by name. Torch-free.

A model is a package with `spec.py`, which holds `MODEL`, an instance of a subclass of `ModelDefinition`, and
`network.py`, which holds `build(config, spec, precision)` and needs torch. A dataset is a module that holds `DATASET`,
an instance of a subclass of `DatasetDefinition`. A package outside this repository adds its own through the entry
points of `parallelrun.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ModelDefinition(ABC):
    """A model before it is built. Subclasses override `make` and, where needed, attributes.

    reads_layers, reads_experts: whether it reads `model.layers` and `model.experts`, so that messages may suggest them.
    is_lesson: `network.py` has `run(config, plan, device, show)`, which replaces training, instead of `build`; a lesson
    reads no dataset, and its matrices may be cut unevenly.
    """

    reads_layers: ClassVar[bool] = False
    reads_experts: ClassVar[bool] = False
    is_lesson: ClassVar[bool] = False

    @abstractmethod
    def make(self, config: Config, vocab: int) -> ModelSpec:
        """The spec of the model that `config.model` describes, over `vocab` token ids or classes. Raises ConfigError
        with every violation that the bounds in the schema do not exclude."""


class Split(ABC):
    """Samples by index. Every rank may call its methods, which are pure functions of their arguments.

    decodes_files: samples are decoded from files, so training reads them in worker processes.
    """

    decodes_files: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(input, target): token ids int64 of shape (seq,) each, or float32 features or an image (channels, height,
        width) and one int64 class. The loss ignores a target below 0."""

    def augmented(self, index: int, sample_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The sample with training augmentation. sample_id: the global sample id, which differs in every epoch."""
        return self.sample(index)

    def check(self, index: int) -> None:
        """Raise IndexError unless there is a sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside a split of {len(self)} samples")


@dataclass(frozen=True)
class Dataset:
    """An opened dataset. vocab: number of token ids or classes; fingerprint: sha256 of the data.

    has_ignored: some targets are below 0, so valid targets must be counted before every step.
    """

    name: str
    vocab: int
    fingerprint: str
    train: Split
    val: Split
    has_ignored: bool = False


class DatasetDefinition(ABC):
    """A dataset before it is opened. Subclasses override `vocab_size`, `open` and, where needed, the rest.

    reads_path: it reads `dataset.path`. reads_bytes: token ids are the bytes of texts. vocab_follows_model: it
    generates token ids or classes of the model's vocab.
    """

    reads_path: ClassVar[bool] = False
    reads_bytes: ClassVar[bool] = False
    vocab_follows_model: ClassVar[bool] = False

    @abstractmethod
    def vocab_size(self, config: Config) -> int | None:
        """Number of token ids or classes; None if only the data determine it."""

    def image_shape(self, config: Config) -> tuple[int, int | None] | None:
        """(channels, height and width) of images, with size None if it varies; None for other samples."""
        return None

    @abstractmethod
    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        """The dataset as samples for the model. Fast enough to be called before any rank is started.

        Raises EnvironmentProblem for data that are missing, unreadable or too small for one global batch, and
        ConfigError for a model of another kind of samples.
        """

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
    found: ModelDefinition = registry.load("models", config.model.name, "spec").MODEL
    return found


def dataset(config: Config) -> DatasetDefinition:
    """The definition of `config.dataset.name`. Raises KeyError for an unknown name."""
    found: DatasetDefinition = registry.load("datasets", config.dataset.name).DATASET
    return found
