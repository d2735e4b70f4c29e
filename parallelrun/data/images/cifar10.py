"""`dataset=cifar10 path=FOLDER`: 60,000 colour images of 32 x 32 pixels (Krizhevsky 2009), from its binary version.

The other version of the same images is pickled, and no pickle is ever read from disk: loading one runs the code in it.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from parallelrun.config.schema.run_schema import Config
from parallelrun.data.arrays import np
from parallelrun.data.files import path_problem, resolve_path
from parallelrun.data.images.image_dataset import ImageDataset, Pixels

CLASSES, SIZE = 10, 32
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
RECORD = 1 + 3 * SIZE * SIZE  # a label, then red, green and blue


class Cifar10(ImageDataset):
    """50,000 training and 10,000 test images."""

    classes, shape, moments = CLASSES, (3, SIZE), ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    reads_path = True

    def read(self, config: Config) -> Pixels:
        root = resolve_path(config, f"the folder of {TRAIN[0]} ... {TEST[0]}, or {ARCHIVE}")
        batches = dict(_files(root))
        missing = [name for name in (*TRAIN, *TEST) if name not in batches]
        if missing:
            pickled = any((folder / "data_batch_1").is_file() for folder in (root, root / "cifar-10-batches-py"))
            why = "; the folder holds the pickled version, which is not read" if pickled else ""
            fix = f"the binary version of CIFAR-10 ({ARCHIVE})"
            raise path_problem(f"there is no {missing[0]} in {root}{why}", fix)
        arrays = {}
        for name in (*TRAIN, *TEST):
            records = np.frombuffer(batches[name], dtype=np.uint8)
            if not records.size or records.size % RECORD or records[::RECORD].max() >= CLASSES:
                size = f"{records.size} bytes"
                raise path_problem(
                    f"{name} of {root} ({size}) does not consist of records of {RECORD} bytes, label first"
                )
            arrays[name] = records.reshape(-1, RECORD)
        table = np.concatenate([arrays[name] for name in (*TRAIN, *TEST)])
        pixels = np.ascontiguousarray(table[:, 1:]).reshape(-1, 3, SIZE, SIZE)
        num_train = sum(len(arrays[name]) for name in TRAIN)
        return Pixels(str(root), table[:, 0].astype(np.int64), num_train, pixels=pixels)


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of CIFAR's files in the folder, in the folder inside it, or else in the archive."""
    wanted, folders = {*TRAIN, *TEST}, (root, root / FOLDER)
    try:
        for folder in folders:
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.name in wanted:
                    yield path.name, path.read_bytes()
        archive = root if root.is_file() else root / ARCHIVE
        if archive.is_file() and not any((folder / TEST[0]).is_file() for folder in folders):
            with tarfile.open(archive) as tar:
                for member in tar:
                    content = tar.extractfile(member) if Path(member.name).name in wanted else None
                    if content is not None:
                        yield Path(member.name).name, content.read()
    except (OSError, tarfile.TarError, EOFError) as error:
        raise path_problem(f"cannot read {root}: {error}") from error


DATASET = Cifar10()
