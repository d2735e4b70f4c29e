"""`dataset=mnist path=FOLDER`: handwritten digits of 28 x 28 grey pixels (LeCun et al. 1998), from its four idx files.

Anything in the same files will do (Fashion-MNIST, KMNIST), with ten classes.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.dataset import Dataset
from parallelrun.data.images import Pixels, open_pixels
from parallelrun.data.text import resolve_path
from parallelrun.errors import EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES, SIZE = 10, 28
MOMENTS = ((0.1307,), (0.3081,))
FOLDERS = (".", "MNIST/raw", "raw")
UNSIGNED_BYTES = 8  # the idx code of what the files hold


def vocab_size(config: Config) -> int:
    """Ten classes."""
    return CLASSES


def image_shape(config: Config) -> tuple[int, int | None]:
    """(channels, height and width)."""
    return 1, SIZE


def open(config: Config, spec: ModelSpec) -> Dataset:
    """Its 60,000 training and 10,000 test images. Raises EnvironmentProblem naming a missing or wrong file."""
    root = resolve_path(config, "the folder of train-images-idx3-ubyte and its three companions")
    parts = []
    for split in ("train", "t10k"):
        images, labels = _read(root, f"{split}-images-idx3-ubyte", 3), _read(root, f"{split}-labels-idx1-ubyte", 1)
        if len(images) != len(labels) or images.shape[1:] != (SIZE, SIZE) or labels.max(initial=0) >= CLASSES:
            what = f"{root}: the {split} files hold images {images.shape} and labels {labels.shape}"
            wanted = f"not {SIZE} x {SIZE} with labels below {CLASSES}"
            raise EnvironmentProblem(Problem(f"{what}, {wanted}", where="dataset.path"))
        parts.append((images, labels))
    pixels = np.concatenate([images for images, _ in parts])[:, None]
    classes = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    data = Pixels(pixels, classes, MOMENTS, num_train=len(parts[0][1]))
    return open_pixels("mnist", CLASSES, data, config, spec, f"{root} ({len(classes)} images)")


def _read(root: Path, name: str, dims: int) -> NDArray[np.uint8]:
    """An idx file, gzipped or not: two zero bytes, the type, the number of dims, their sizes (big-endian), the data."""
    for folder in FOLDERS:
        for path in (root / folder / name, root / folder / f"{name}.gz", root / folder / name.replace("-idx", ".idx")):
            if path.is_file():
                return _decode(path, dims)
    where = "dataset.path"
    raise EnvironmentProblem(Problem(f"there is no {name} (nor {name}.gz) in {root}", where=where))


def _decode(path: Path, dims: int) -> NDArray[np.uint8]:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError) as error:
        raise EnvironmentProblem(Problem(f"cannot read {path}: {error}", where="dataset.path")) from error
    start = 4 + 4 * dims
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims))
    if content[:4] != bytes((0, 0, UNSIGNED_BYTES, dims)) or len(content) != start + int(np.prod(shape)):
        what = f"{path} is no whole idx file of bytes with {dims} dims ({len(content)} bytes)"
        raise EnvironmentProblem(Problem(what, where="dataset.path"))
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
