"""Image datasets from their files: sizes, splits, normalisation; augmentation by hash; what is missing is named."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.data import open_dataset
from parallelrun.data.images import cifar10, mnist
from parallelrun.data.images.image_dataset import ImageView, resize, shifted
from parallelrun.data.images.imagefolder import decode
from parallelrun.data.order import Sampler
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Dataset
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.reader import Reader
from tests.plans import collate, tiny_config
from tests.vision import RESNET


def opened(**overrides: Any) -> Dataset:
    changes = {
        **RESNET,
        "model.image": None,
        "model.channels": None,
        "dataset.vocab": None,
        "dataset.val_fraction": 0.2,
    }
    config = tiny_config({**changes, **{key.replace("__", "."): value for key, value in overrides.items()}})
    classes = definitions.dataset(config).vocab_size(config)
    spec = definitions.model(config).make(config, classes)
    return open_dataset(config, spec)


def refusal(**overrides: Any) -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        opened(**overrides)
    return " ".join(f"{p.what} {p.suggestion} {p.command}" for p in caught.value.problems)


def moments(split: Any, number: int) -> tuple[float, float]:
    images, _ = collate(split, range(number))
    return float(images.mean()), float(images.std())


def test_digits_come_from_the_installed_package() -> None:
    dataset = opened(dataset__name="digits")
    assert (len(dataset.train) + len(dataset.val), dataset.vocab) == (1797, 10)
    assert len(dataset.val) == pytest.approx(0.2 * 1797, rel=0.1)
    image, label = dataset.train.sample(0)
    assert image.shape == (1, 8, 8) and image.dtype == np.float32 and label.dtype == np.int64
    assert moments(dataset.train, 1000) == pytest.approx((0, 1), abs=0.02)
    labels = collate(dataset.train, range(1000))[1]
    assert set(labels.tolist()) == set(range(10))


def test_digits_do_not_import_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)  # another test's
    opened(dataset__name="digits")
    assert not [name for name in sys.modules if name.partition(".")[0] == "sklearn"]


def test_images_are_made_as_large_and_as_colourful_as_the_model_wants() -> None:
    small, large = opened(dataset__name="digits"), opened(dataset__name="digits", model__image=32, model__channels=3)
    one, other = small.train.sample(3)[0], large.train.sample(3)[0]
    assert other.shape == (3, 32, 32) and np.array_equal(other[0], other[2])
    assert other.mean() == pytest.approx(one.mean(), abs=0.15)


def test_an_mlp_reads_pixels_as_features() -> None:
    mlp = {"model__name": "mlp", "model__preset": "mlp", "dataset__name": "digits"}
    dataset = opened(**mlp, model__hidden=64)
    assert dataset.train.sample(0)[0].shape == (64,)
    with pytest.raises(ConfigError) as caught:
        opened(**mlp, model__hidden=32)
    assert caught.value.problems[0].suggestion == "model.hidden=64"


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(1)
    for split, count in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28))
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(count) % 10)))
    return tmp_path


def test_mnist_is_read_from_its_files_gzipped_or_not(mnist_folder: Path) -> None:
    dataset = opened(dataset__name="mnist", dataset__path=str(mnist_folder))
    assert (len(dataset.train), len(dataset.val)) == (40, 20)
    assert [int(dataset.val.sample(i)[1]) for i in range(12)] == [*range(10), 0, 1]
    assert dataset.train.sample(0)[0].shape == (1, 28, 28)
    raw = np.frombuffer((mnist_folder / "train-images-idx3-ubyte").read_bytes()[16:], np.uint8)[: 28 * 28]
    expected = (raw.reshape(28, 28) / 255 - mnist.MOMENTS[0][0]) / mnist.MOMENTS[1][0]
    assert np.allclose(dataset.train.sample(0)[0][0], expected, atol=1e-5)


def test_a_torn_mnist_file_is_named(mnist_folder: Path) -> None:
    file = mnist_folder / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    assert file.name in refusal(dataset__name="mnist", dataset__path=str(mnist_folder))
    file.unlink()
    assert f"there is no {file.name}" in refusal(dataset__name="mnist", dataset__path=str(mnist_folder))


def batch_file(count: int, first: int) -> bytes:
    generator = np.random.default_rng(first)
    rows = [
        bytes([(first + i) % 10]) + generator.integers(0, 256, 3072).astype(np.uint8).tobytes() for i in range(count)
    ]
    return b"".join(rows)


@pytest.fixture
def cifar_files() -> dict[str, bytes]:
    return {name: batch_file(8, number) for number, name in enumerate((*cifar10.TRAIN, *cifar10.TEST))}


def test_cifar10_is_read_from_a_folder_or_the_archive(tmp_path: Path, cifar_files: dict[str, bytes]) -> None:
    folder = tmp_path / "plain" / cifar10.FOLDER
    folder.mkdir(parents=True)
    with tarfile.open(tmp_path / cifar10.ARCHIVE, "w:gz") as tar:
        for name, content in cifar_files.items():
            (folder / name).write_bytes(content)
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    first, second, third = (
        opened(dataset__name="cifar10", dataset__path=str(path))
        for path in (folder, folder.parent, tmp_path / cifar10.ARCHIVE)
    )
    assert first.fingerprint == second.fingerprint == third.fingerprint
    assert (len(first.train), len(first.val)) == (40, 8)
    image, label = third.train.sample(9)
    assert int(label) == 2 and image.shape == (3, 32, 32)
    red = np.frombuffer(cifar_files[cifar10.TRAIN[1]], np.uint8)[3073 + 1 : 3073 + 1025].reshape(32, 32) / 255
    assert np.allclose(image[0], (red - 0.4914) / 0.2470, atol=1e-5)


def test_pickled_cifar10_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"")
    message = refusal(dataset__name="cifar10", dataset__path=str(tmp_path))
    assert "pickled" in message and cifar10.ARCHIVE in message


def test_a_torn_cifar10_file_is_named(tmp_path: Path, cifar_files: dict[str, bytes]) -> None:
    for name, content in cifar_files.items():
        (tmp_path / name).write_bytes(content[:-1] if name == cifar10.TEST[0] else content)
    assert cifar10.TEST[0] in refusal(dataset__name="cifar10", dataset__path=str(tmp_path))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    image_module = pytest.importorskip("PIL.Image")
    for label, colour in enumerate(((200, 10, 10), (10, 200, 10), (10, 10, 200))):
        folder = tmp_path / "all" / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(12):
            image_module.new("RGB", (20 + number, 16), colour).save(folder / f"{number}.png")
    return tmp_path / "all"


def folder_dataset(path: Path, **overrides: Any) -> Dataset:
    return opened(dataset__name="imagefolder", dataset__path=str(path), model__image=16, global_batch=8, **overrides)


def test_an_image_folder_has_a_class_per_folder(image_folder: Path) -> None:
    dataset = folder_dataset(image_folder)
    assert dataset.vocab == 3 and len(dataset.train) + len(dataset.val) == 36
    for split in (dataset.train, dataset.val):
        for index in range(len(split)):
            image, label = split.sample(index)
            assert image.shape == (3, 16, 16) and int(image.mean((1, 2)).argmax()) == int(label)


def test_an_image_folder_may_bring_its_own_splits(image_folder: Path) -> None:
    image_folder.rename(image_folder.parent / "train")
    val = image_folder.parent / "val" / "class1"
    val.mkdir(parents=True)
    (image_folder.parent / "train" / "class1" / "0.png").rename(val / "0.png")
    dataset = folder_dataset(image_folder.parent)
    assert (len(dataset.train), len(dataset.val)) == (35, 1) and int(dataset.val.sample(0)[1]) == 1


def notes(dataset: Dataset, **overrides: Any) -> list[str]:
    config = tiny_config({**RESNET, **{key.replace("__", "."): value for key, value in overrides.items()}})
    classes = dataset.vocab
    spec = definitions.model(config).make(config, classes)
    return definitions.dataset(config).notes(config, spec, dataset)


def test_digits_on_a_model_for_larger_images_are_said_to_be_enlarged() -> None:
    asked = {"dataset__name": "digits", "dataset__vocab": None, "model__image": 32}
    (told,) = notes(opened(**asked), **asked)
    assert told == "the images of dataset=digits have 8 x 8 pixels, and model=resnet reads 32 x 32: they are enlarged"
    assert notes(opened(**asked), **{**asked, "model__image": 8}) == []


@pytest.mark.parametrize("width,height", [(60, 40), (33, 57), (24, 24)])
def test_resizing_only_the_middle_gives_the_middle_of_the_resized(tmp_path: Path, width: int, height: int) -> None:
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    image_module.fromarray(pixels).save(tmp_path / "a.png")
    scale = 24 / min(width, height)  # 24: the shorter side for 21 pixels
    whole = image_module.fromarray(pixels).resize((round(width * scale), round(height * scale)), 2)
    left, top = (whole.width - 21) // 2, (whole.height - 21) // 2
    expected = np.asarray(whole, np.int64)[top : top + 21, left : left + 21].transpose(2, 0, 1)
    assert np.abs(decode(tmp_path / "a.png", 21) - expected).max() <= 1


def test_a_large_jpeg_is_decoded_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_module = pytest.importorskip("PIL.Image")
    small = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    large = image_module.fromarray(small).resize((1600, 1200), 3)
    large.save(tmp_path / "a.jpg", quality=95)
    large.save(tmp_path / "a.png")
    decoded: list[tuple[int, int]] = []
    resize_image = image_module.Image.resize

    def noted(image: Any, *arguments: Any, **options: Any) -> Any:
        decoded.append(image.size)
        return resize_image(image, *arguments, **options)

    monkeypatch.setattr(image_module.Image, "resize", noted)
    from_jpeg, from_png = (decode(tmp_path / name, 112).astype(np.int64) for name in ("a.jpg", "a.png"))
    assert decoded[0] == (400, 300)  # a quarter: twice the 128 of the shorter side or more
    assert np.abs(from_jpeg - from_png).mean() < 2  # of 255


def test_a_file_that_is_no_image_is_named(image_folder: Path) -> None:
    (image_folder / "class0" / "0.png").write_bytes(b"no image")
    dataset = folder_dataset(image_folder)
    with pytest.raises(EnvironmentProblem, match=r"0\.png"):
        for split in (dataset.train, dataset.val):
            collate(split, range(len(split)))


def test_synthetic_images_can_be_learnt_from_one_look_at_each_class() -> None:
    dataset = opened(dataset__name="synthetic", dataset__vocab=5, model__image=16, dataset__samples=200)
    images, labels = collate(dataset.train, range(200))
    patterns = np.stack([images[labels == label].mean(0) for label in range(5)]).reshape(5, -1)
    val_images, val_labels = collate(dataset.val, range(len(dataset.val)))
    guesses = (val_images.reshape(len(val_images), -1) @ patterns.T).argmax(1)
    assert (guesses == val_labels).mean() > 0.9


LOOK = ImageView((1, 6, 6), ((0.0,), (1.0,)), seed=1, flip=True, crop=2)
PICTURE = np.arange(1, 37, dtype=np.float32).reshape(1, 6, 6)


def test_augmentation_mirrors_half_and_shifts_evenly() -> None:
    shown = [LOOK.show(PICTURE, number) for number in range(2000)]
    seen = {image.tobytes() for image in shown}
    assert len(seen) == 2 * 5 * 5  # mirrored or not, five shifts each way
    centre = [image for image in shown if 22.0 in image and 15.0 in image]
    mirrored = sum(np.argwhere(image[0] == 15.0)[0][1] > np.argwhere(image[0] == 16.0)[0][1] for image in centre)
    assert mirrored / len(centre) == pytest.approx(0.5, abs=0.05)


def test_augmentation_follows_from_seed_and_sample_number() -> None:
    assert np.array_equal(LOOK.show(PICTURE, 5), LOOK.show(PICTURE, 5))
    other = ImageView((1, 6, 6), ((0.0,), (1.0,)), seed=2, flip=True, crop=2)
    assert any(not np.array_equal(LOOK.show(PICTURE, n), other.show(PICTURE, n)) for n in range(8))
    assert np.array_equal(LOOK.show(PICTURE), PICTURE)


def test_what_is_shifted_in_is_the_mean() -> None:
    moved = shifted(PICTURE, 2, -1)
    assert (
        np.array_equal(moved[0, 2:, :-1], PICTURE[0, :-2, 1:]) and not moved[0, :2].any() and not moved[0, :, -1].any()
    )
    assert np.array_equal(shifted(PICTURE, -1, 2)[0, :-1, 2:], PICTURE[0, 1:, :-2])
    assert not shifted(PICTURE, 6, 0).any() and not shifted(PICTURE, 0, -9).any()


def test_resizing_keeps_flat_areas_and_averages_when_it_shrinks() -> None:
    assert np.allclose(resize(np.full((3, 7, 5), 2.5, np.float32), (16, 9)), 2.5)
    assert resize(PICTURE, (3, 3)).mean() == pytest.approx(PICTURE.mean(), rel=1e-5)
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32), (1, 8, 8))
    assert np.allclose(resize(ramp, (8, 16))[0, 0, 2:-2], (np.arange(16) * 0.5 - 0.25)[2:-2])


def test_training_sees_augmented_samples_alike_under_every_plan() -> None:
    """Two replicas together read what one reads, and a second epoch shows other images."""
    overrides = {**RESNET, "dataset.name": "digits", "dataset.flip": True, "dataset.crop": 2, "model.channels": 1,
                 "dataset.vocab": None}  # fmt: skip

    def batches(dp: int, step: int) -> np.ndarray:
        import torch

        config = tiny_config({**overrides, "dp": dp})
        plan = resolve(config)
        dataset = open_dataset(config, plan.spec)
        sampler = Sampler(len(dataset.train), plan.batch.global_batch, config.seed)
        parts = []
        for rank in range(dp):
            reader = Reader(dataset.train, sampler, plan, Mesh(plan.mesh, rank, torch.device("cpu")))
            parts.append(reader.batch(step).inputs)
        return torch.cat(parts).numpy()

    assert np.array_equal(batches(1, 1), batches(2, 1)) and np.array_equal(batches(1, 3), batches(4, 3))
    assert not np.array_equal(batches(1, 1), batches(1, 2))


def test_validation_is_not_augmented() -> None:
    dataset = opened(dataset__name="digits", dataset__flip=True, dataset__crop=2)
    plain = opened(dataset__name="digits")
    assert np.array_equal(dataset.val.sample(0)[0], plain.val.sample(0)[0])
    assert np.array_equal(dataset.val.augmented(0, 3)[0], plain.val.sample(0)[0])
