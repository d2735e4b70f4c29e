"""`dataset=digits`: 1,797 handwritten digits of 8 x 8 grey pixels (UCI, Alpaydin and Kaynak 1998), offline.

scikit-learn ships them, and must be installed: its file is read without importing the package, which would take a
second on every rank.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.base.packages import require
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.images.image_dataset import ImageDataset, Pixels

SIZE, BRIGHTEST = 8, 16
FILE = Path("datasets", "data", "digits.csv.gz")


class Digits(ImageDataset):
    """Images of ten classes, split into train and val by hash."""

    classes, shape, moments = 10, (1, SIZE), ((0.3053,), (0.3760,))

    def read(self, config: Config) -> Pixels:
        folder = require("sklearn", "dataset=digits", "dataset", "dataset=synthetic, which needs no package")
        if not (folder / FILE).is_file():
            message = f"dataset=digits is not in this scikit-learn: there is no {folder / FILE}"
            raise EnvironmentProblem(Problem(message, "dataset", "dataset=synthetic"))
        numbers = gzip.decompress((folder / FILE).read_bytes()).replace(b"\n", b",").rstrip(b",").split(b",")
        table = np.array(numbers, float).reshape(-1, SIZE * SIZE + 1).astype(np.int64)
        pixels = table[:, :-1].reshape(-1, 1, SIZE, SIZE).astype(np.uint8)
        labels = np.ascontiguousarray(table[:, -1])
        return Pixels(str(folder / FILE), labels, pixels=pixels, brightest=BRIGHTEST)


DATASET = Digits()
