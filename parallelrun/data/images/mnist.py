"""`dataset=mnist path=FOLDER`: handwritten digits of 28 x 28 grey pixels (LeCun et al. 1998), from its four idx files.

Other data in the same format with ten classes work too (Fashion-MNIST, KMNIST).
"""

from __future__ import annotations

import gzip
from pathlib import Path

from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.files import path_problem, resolve_path
from parallelrun.data.images.image_dataset import ImageDataset, Pixels

CLASSES, SIZE = 10, 28
MOMENTS = ((0.1307,), (0.3081,))
FOLDERS = (".", "MNIST/raw", "raw")
UNSIGNED_BYTES = 8  # the idx code of the element type


class Mnist(ImageDataset):
    """60,000 training and 10,000 test images."""

    classes, shape, moments, reads_path = CLASSES, (1, SIZE), MOMENTS, True

    def read(self, config: Config) -> Pixels:
        root = resolve_path(config, "the folder of train-images-idx3-ubyte and its three companions")
        parts = []
        for split in ("train", "t10k"):
            images, labels = _read(root, f"{split}-images-idx3-ubyte", 3), _read(root, f"{split}-labels-idx1-ubyte", 1)
            if len(images) != len(labels) or images.shape[1:] != (SIZE, SIZE) or labels.max(initial=0) >= CLASSES:
                message = f"{root}: the {split} files hold images {images.shape} and labels {labels.shape}"
                raise path_problem(f"{message}, not {SIZE} x {SIZE} with labels below {CLASSES}")
            parts.append((images, labels))
        pixels = np.concatenate([images for images, _ in parts])[:, None]
        classes = np.concatenate([labels for _, labels in parts]).astype(np.int64)
        return Pixels(str(root), classes, len(parts[0][1]), pixels=pixels)


def _read(root: Path, name: str, num_dims: int) -> NDArray[np.uint8]:
    """An idx file, gzipped or not: two zero bytes, the type, the number of dims, their sizes (big-endian), the data."""
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
    paths = [root / folder / file for folder in FOLDERS for file in names]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise path_problem(f"there is no {name} (nor {name}.gz) in {root}")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError) as error:
        raise path_problem(f"cannot read {path}: {error}") from error
    start = 4 + 4 * num_dims
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_dims))
    if content[:4] != bytes((0, 0, UNSIGNED_BYTES, num_dims)) or len(content) != start + int(np.prod(shape)):
        raise path_problem(f"{path} is not a complete idx file of bytes with {num_dims} dims ({len(content)} bytes)")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


DATASET = Mnist()
