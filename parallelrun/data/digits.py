"""`dataset=digits`: 1,797 handwritten digits of 8 x 8 grey pixels (UCI, Alpaydin and Kaynak 1998), offline.

They come with scikit-learn, which need only be installed: its file is read, the package itself is not imported (that
would take a second on every rank).
"""

from __future__ import annotations

import gzip
from pathlib import Path

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.dataset import Dataset
from parallelrun.data.images import Pixels, open_pixels
from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.packages import require

CLASSES, SIZE, TOP = 10, 8, 16
MOMENTS = ((0.3053,), (0.3760,))
FILE = Path("datasets", "data", "digits.csv.gz")


def vocab_size(config: Config) -> int:
    """Ten classes."""
    return CLASSES


def image_shape(config: Config) -> tuple[int, int | None]:
    """(channels, height and width)."""
    return 1, SIZE


def open(config: Config, spec: ModelSpec) -> Dataset:
    """The digits, train and val by hash. Raises EnvironmentProblem when scikit-learn is not installed."""
    folder = require("sklearn", "dataset=digits", "dataset", "dataset=synthetic, which needs no package")
    if not (folder / FILE).is_file():
        what = f"dataset=digits is not in this scikit-learn: there is no {folder / FILE}"
        raise EnvironmentProblem(Problem(what, "dataset", "dataset=synthetic"))
    table = np.array(gzip.decompress((folder / FILE).read_bytes()).replace(b"\n", b",").rstrip(b",").split(b","), float)
    table = table.reshape(-1, SIZE * SIZE + 1).astype(np.int64)
    pixels = table[:, :-1].reshape(-1, 1, SIZE, SIZE).astype(np.uint8)
    data = Pixels(pixels, np.ascontiguousarray(table[:, -1]), MOMENTS, top=TOP)
    return open_pixels("digits", CLASSES, data, config, spec, f"{folder / FILE} ({len(table)} images)")
