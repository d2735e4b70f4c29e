"""`dataset=imagefolder path=FOLDER`: your own images, one folder a class (`cat/1.jpg`, `dog/2.png`), read by pillow.

A folder that has `train` and `val` (or `test`) inside brings its own splits; otherwise images are split by the hash of
their names. The shorter side is resized to 8/7 of the size that the model reads, and the middle is cut out.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelrun.base.packages import require
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import NDArray, np
from parallelrun.data.files import hash_name, path_problem, resolve_path
from parallelrun.data.images.image_dataset import ImageDataset, ImageSet, ImageSplit

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
VAL_FOLDERS = ("val", "test")
REDUCED = 2.0  # pillow's choice in `thumbnail`: as good as resizing from the full size, to the eye
UNREADABLE = (OSError, ValueError, SyntaxError)  # pillow's errors on files that are no images


@dataclass(frozen=True, kw_only=True)
class ImageFiles(ImageSet):
    """Image files below `root`, decoded when they are read."""

    root: Path
    files: list[Path]

    def load(self, index: int, size: int) -> NDArray[np.uint8]:
        return decode(self.files[index], size)

    def keys(self) -> NDArray[np.uint64]:
        return np.array([hash_name(self._name(file)) for file in self.files], dtype=np.uint64)

    def fingerprint(self, config: Config, splits: Sequence[ImageSplit]) -> str:
        """sha256 over names, sizes and labels: hashing the content of every image would take too long."""
        digest = hashlib.sha256()
        for split in splits:
            for file, label in ((self.files[index], self.labels[index]) for index in split.indices):
                digest.update(f"{self._name(file)}\0{file.stat().st_size}\0{label}\n".encode())
            digest.update(b"\0")
        return digest.hexdigest()

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


class ImageFolder(ImageDataset):
    """Images of any size below `dataset.path`, normalised by ImageNet's moments."""

    shape, moments = (3, None), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    reads_path = decodes_files = True

    def vocab_size(self, config: Config) -> int | None:
        """The number of class folders; `dataset.vocab` before a path is given."""
        if not config.dataset.path:
            return config.dataset.vocab
        train, _ = _split_folders(resolve_path(config, "a folder of class folders"))
        return len(_classes(train)) or None

    def read(self, config: Config) -> ImageFiles:
        require("PIL", "dataset=imagefolder", "dataset")
        root = resolve_path(config, "a folder of class folders")
        if not root.is_dir():
            raise path_problem(f"no such folder: {root}")
        train, val = _split_folders(root)
        classes = _classes(train)
        images = _list(train, classes)
        num_train = None if val is None else len(images)
        images += [] if val is None else _list(val, classes)
        labels = np.array([label for _, label in images], dtype=np.int64)
        files = [file for file, _ in images]
        return ImageFiles(str(root), labels, num_train, root=root, files=files)


def shorter_side(size: int) -> int:
    """The length to which an image's shorter side is resized before its middle of `size` pixels is cut out."""
    return size * 8 // 7


def decode(path: Path, size: int) -> NDArray[np.uint8]:
    """A file's image as uint8 (3, size, size): its middle, after resizing to `shorter_side(size)`.

    A JPEG more than twice as large is decoded at a half, a quarter or an eighth of its size, which takes less time and
    leaves `REDUCED` pixels for each one that is kept; other large images are averaged that far before they are resized.

    Raises EnvironmentProblem naming a file that is no image.
    """
    from PIL import Image

    shorter = shorter_side(size)
    try:
        with Image.open(path) as opened:
            opened.draft(None, (int(shorter * REDUCED),) * 2)
            opened.load()
            image = opened if opened.mode == "RGB" else opened.convert("RGB")
    except UNREADABLE as error:
        raise path_problem(f"cannot read the image {path}: {error}") from error
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + size) * across, (top + size) * down)  # the rest would be cut off
    cut = image.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=REDUCED)
    return np.asarray(cut).transpose(2, 0, 1)


def _split_folders(root: Path) -> tuple[Path, Path | None]:
    """(folder of the training classes, folder of the validation classes if there is one)."""
    val = next((root / name for name in VAL_FOLDERS if (root / name).is_dir()), None)
    return (root / "train", val) if (root / "train").is_dir() and val else (root, None)


def _classes(folder: Path) -> list[str]:
    """Names of the class folders, sorted: a label is an index into them."""
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise path_problem(f"cannot read {folder}: {error.strerror}") from error
    return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _list(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """(file, label) of every image below the class folders, by class and name."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
    ]


DATASET = ImageFolder()
