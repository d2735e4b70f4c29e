"""`dataset=imagefolder path=FOLDER`: your own images, one folder a class (`cat/1.jpg`, `dog/2.png`), read by pillow.

Where the folder has `train` and `val` (or `test`) inside, those are the splits; else images are split by the hash of
their names. The shorter side is brought to 8/7 of what the model reads, and the middle is cut out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from parallelrun.config.schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.byte_files import hash_name
from parallelrun.data.dataset import Dataset, held_out, require_samples
from parallelrun.data.images import Look, look_for
from parallelrun.data.text import resolve_path
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.packages import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOMENTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
VAL_FOLDERS = ("val", "test")
NUM_LOOKED_AT = 200  # images whose size is read before a run


def vocab_size(config: Config) -> int | None:
    """As many as there are class folders; None before a path is given."""
    if not config.dataset.path:
        return config.dataset.vocab
    root = resolve_path(config, "a folder of class folders")
    train, _ = _split_folders(root)
    return len(_classes(train)) or None


def image_shape(config: Config) -> tuple[int, int | None]:
    """(channels, None): images of every size."""
    return 3, None


@dataclass(frozen=True)
class FolderSplit:
    """Image files, decoded when they are asked for: enough work for processes of its own (`decodes_files`)."""

    decodes_files: ClassVar[bool] = True

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    look: Look

    def __len__(self) -> int:
        return len(self.files)

    def sample(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.look.show(decode(self.files[index], self.look.shape[1])), np.array(self.labels[index])

    def augmented(self, index: int, sample_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The sample as training sees it: a function of the index and the global sample id, whatever the plan."""
        image = decode(self.files[index], self.look.shape[1])
        return self.look.show(image, sample_id), np.array(self.labels[index])


def open(config: Config, spec: ModelSpec) -> Dataset:
    """The images below `dataset.path`. Raises EnvironmentProblem when there are none, or pillow is not installed."""
    require("PIL", "dataset=imagefolder", "dataset")
    root = resolve_path(config, "a folder of class folders")
    if not root.is_dir():
        raise EnvironmentProblem(Problem(f"no such folder: {root}", where="dataset.path"))
    if spec.kind != "images":
        what = f"dataset=imagefolder gives images, and model={config.model.preset} reads {spec.kind}"
        raise ConfigError(Problem(what, "dataset", "model=resnet"))
    look = look_for(config, spec, (3, None), MOMENTS)
    plain = replace(look, flip=False, crop=0)
    train_folder, val_folder = _split_folders(root)
    classes = _classes(train_folder)
    files, labels = _list(train_folder, classes)
    if val_folder is not None:
        splits = FolderSplit(files, labels, look), FolderSplit(*_list(val_folder, classes), plain)
    else:
        names = [file.relative_to(root).as_posix() for file in files]
        is_val = held_out(np.array([hash_name(name) for name in names], dtype=np.uint64), config.dataset.val_fraction)
        chosen = [[place for place, val in enumerate(is_val) if bool(val) == wanted] for wanted in (False, True)]
        train, val = (
            FolderSplit(tuple(files[i] for i in places), tuple(labels[i] for i in places), seen)
            for places, seen in zip(chosen, (look, plain))
        )
        splits = train, val
    dataset = Dataset("imagefolder", len(classes), _fingerprint(root, splits), *splits)
    num_images = sum(map(len, splits))
    return require_samples(dataset, config, spec, f"{root} ({len(classes)} classes, {num_images} images)")


def shorter_side(size: int) -> int:
    """To what the shorter side of an image is brought before its middle of `size` pixels is cut out."""
    return size * 8 // 7


def notes(config: Config, spec: ModelSpec, dataset: Dataset) -> list[str]:
    """Says that images are smaller than what the model reads, judged by some of them: that costs sharpness for nothing
    but computation."""
    from PIL import Image

    split = dataset.train
    assert isinstance(split, FolderSplit)
    wanted = shorter_side(split.look.shape[1])
    looked_at = [
        split.files[place] for place in np.linspace(0, len(split) - 1, min(NUM_LOOKED_AT, len(split))).astype(int)
    ]
    sizes = []
    for file in looked_at:
        with contextlib.suppress(OSError, ValueError, SyntaxError), Image.open(file) as opened:  # training names it
            sizes.append((min(opened.size), opened.size, file))
    small = [one for one in sizes if one[0] < wanted]
    if not small:
        return []
    _, (width, height), file = min(small)
    part = "all" if len(small) == len(sizes) else f"{len(small)} of {len(sizes)}"
    typical = sorted(side for side, _, _ in sizes)[len(sizes) // 2]
    return [
        f"{part} images looked at are smaller than {wanted} pixels and are enlarged (the smallest: {file}, "
        f"{width} x {height}); model.image={max(1, typical * 7 // 8)} would read most without enlarging them"
    ]


def decode(path: Path, size: int) -> NDArray[np.float32]:
    """A file's image as float32 (3, size, size) in [0, 1]: the middle, its shorter side first brought to 8/7 of size.

    Raises EnvironmentProblem naming a file that is no image.
    """
    from PIL import Image

    shorter = shorter_side(size)
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise EnvironmentProblem(Problem(f"cannot read the image {path}: {error}", where="dataset.path")) from error
    scale = shorter / min(image.size)
    image = image.resize([max(shorter, round(side * scale)) for side in image.size], Image.Resampling.BILINEAR)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    cut = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float32)
    return cut.transpose(2, 0, 1) / np.float32(255)


def _split_folders(root: Path) -> tuple[Path, Path | None]:
    """(folder of the training classes, folder of the validation classes if there is one)."""
    val = next((root / name for name in VAL_FOLDERS if (root / name).is_dir()), None)
    return (root / "train", val) if (root / "train").is_dir() and val else (root, None)


def _classes(folder: Path) -> list[str]:
    """Names of the class folders, sorted: their places are the labels."""
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise EnvironmentProblem(Problem(f"cannot read {folder}: {error.strerror}", where="dataset.path")) from error
    return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _list(folder: Path, classes: list[str]) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    """(files, labels) of every image below the class folders, by class and name."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        files += found
        labels += [label] * len(found)
    return tuple(files), tuple(labels)


def _fingerprint(root: Path, splits: tuple[FolderSplit, ...]) -> str:
    """sha256 over names, sizes and labels: reading every image would take longer than training on some."""
    digest = hashlib.sha256()
    for split in splits:
        for file, label in zip(split.files, split.labels):
            digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0{label}\n".encode())
        digest.update(b"\0")
    return digest.hexdigest()
