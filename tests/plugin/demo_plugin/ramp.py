"""`dataset=ramp`: random features whose class is the number of positive ones, capped."""

from __future__ import annotations

import numpy as np

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.definitions import Dataset, DatasetDefinition, Split
from parallelrun.planner.model.model_spec import ModelSpec

CLASSES = 4


class RampSplit(Split):
    """Sample `index` depends on its index and the split only."""

    def __init__(self, stream: int, size: int, num_features: int):
        self.stream, self.size, self.num_features = stream, size, num_features

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int):
        x = np.random.default_rng((self.stream, index)).standard_normal(self.num_features).astype(np.float32)
        return x, np.array(min(int((x > 0).sum()), CLASSES - 1), dtype=np.int64)


class Ramp(DatasetDefinition):
    """Four classes. Without `kinds`, no model would read it."""

    kinds = ("features",)

    def vocab_size(self, config: Config) -> int:
        return CLASSES

    def open(self, config: Config, spec: ModelSpec) -> Dataset:
        (size,) = spec.sample_shape
        return Dataset("ramp", CLASSES, "ramp-1", RampSplit(1, 512, size), RampSplit(2, 96, size))


DATASET = Ramp()
