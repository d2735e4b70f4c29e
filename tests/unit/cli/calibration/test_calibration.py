"""A calibration from measurements whose constants are known, its files, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import yaml

from parallelrun.base.errors import ConfigError, EnvironmentProblem
from parallelrun.cli.calibration import constants, devices, file, training
from parallelrun.cli.calibration.constants import calibrated, plan_of_exchange, plan_of_step, step_seconds
from parallelrun.cli.calibration.devices import EXCHANGED, OPERATIONS, PRODUCTS, shapes
from parallelrun.cli.calibration.measurements import Measurements, Sample, TimedExchange, TimedProduct, TimedStep
from parallelrun.cli.calibration.session import composed, highest_rates
from parallelrun.config import presets
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.freeze import freeze
from tests.unit.config.test_presets import composed as composed_by_user

FACTS = {"date": "2026-11-22T12:00:00Z", "host": "here", "device": "CPU", "backend": "shm", "versions": {"torch": "2"}}
EMPTY = Measurements("cpu", 2, FACTS, {"fp32": 1e11, "bf16": 2e11}, 2e10, memory_bytes=8e9)
TRUE = {
    "product_efficiency": 0.7, "product_ramp": 60.0, "attention_efficiency": 0.4, "memory_efficiency": 0.3,
    "operation_us": 9.0, "step_us": 2000.0, "thread_efficiency": 0.5, "convolution_efficiency": 0.2,
    "collective_us": 150.0, "hop_us": 20.0, "link_efficiency": 0.6,
}  # fmt: skip
SEEN = {
    "small": ("strategy=single", "model.hidden=32", "model.layers=2"),
    "large": ("strategy=single", "model.hidden=256", "model.layers=3"),
    "ddp": ("strategy=ddp", "dp=2", "model.hidden=64"),
    "tiny": ("strategy=ddp", "dp=2", "model.hidden=16", "model.layers=2", "model.seq=16"),
    "tp": ("strategy=tp", "tp=2", "model.hidden=128"),
    "long": ("strategy=ddp", "dp=2", "model.seq=512", "model.layers=2"),
    "images": ("model=resnet", "strategy=ddp", "dp=2", "model.image=32"),
    "stages": ("strategy=1f1b", "pp=4", "microbatches=4"),
}  # fmt: skip
UNSEEN = {
    "fsdp": ("strategy=fsdp", "dp=4", "model.hidden=96"),
    "2D": ("strategy=tp2d", "tp=4"),
    "ps": ("strategy=ps", "dp=2", "servers=1"),
    "alexnet": ("model=alexnet", "strategy=single", "model.image=64"),
}


@cache
def truth():
    """Measurements of a machine whose constants are TRUE, each off by up to 3 %, and that machine."""
    exchanges = [TimedExchange(name, size, ranks, Sample(1.0)) for ranks in (2, 4)
                 for name in ("all_reduce", "all_gather", "send") for size in (2**10, 2**16, 2**22)]  # fmt: skip
    machine = replace(constants.base(EMPTY, "true"), intra_gb_s=4.0, **TRUE)
    wobble = [1.0, 1.03, 0.98, 1.01, 0.97]

    def sample(seconds, index):
        return Sample(seconds * wobble[index % 5], 0.02)

    sizes = [(rows, inner, 4 * inner) for rows in (64, 1024) for inner in (32, 128, 512)]
    products = [TimedProduct(*size, Sample(1.0)) for size in sizes]
    products = [replace(one, sample=sample(constants.product_seconds(one, machine), index))
                for index, one in enumerate(products)]  # fmt: skip
    plans = {ranks: plan_of_exchange(ranks, "cpu") for ranks in (2, 4)}
    exchanges = [replace(one, sample=sample(constants.exchange_seconds(one, plans[one.ranks], machine), index))
                 for index, one in enumerate(exchanges)]  # fmt: skip
    steps = [timed(name, words, lambda plan: step_seconds(plan, machine)) for name, words in SEEN.items()]
    steps = [replace(one, sample=sample(one.sample.seconds, index)) for index, one in enumerate(steps)]
    return replace(EMPTY, products=tuple(products), exchanges=tuple(exchanges), steps=tuple(steps)), machine


def timed(name, words, seconds):
    """A step of a plan that takes seconds(plan)."""
    frozen, plan = planned(words)
    return TimedStep(name, frozen, Sample(seconds(plan)))


@cache
def planned(words):
    """(the frozen configuration of a plan, the plan)."""
    model = () if any(word.startswith("model=") for word in words) else ("model=gpt",)
    config, plan = composed([*model, "dataset=synthetic", *words])
    return freeze(config, plan), plan


@cache
def calibration():
    """What is found from the measurements of `truth`."""
    return calibrated(truth()[0], "mine")


def test_rates_of_a_machine_are_bytes_that_are_read_written_and_sent(monkeypatch):
    """A copy reads and writes; of 4 ranks, each sends 2 x 3/4 of what is summed, and 3/4 of what is gathered."""
    monkeypatch.setattr(devices.Clock, "sample", lambda self, body, calls=None: Sample(1.0))
    assert devices.copies(devices.Clock(torch.device("cpu"))) == 2 * 2**24
    exchanges = [TimedExchange(name, 10**6, 4, Sample(1e-3)) for name in ("all_reduce", "all_gather", "send")]
    measured = replace(EMPTY, exchanges=tuple(exchanges), memory_bytes=80e9)
    assert constants.fastest_exchange(measured) == pytest.approx(1.5e9)
    base = constants.base(measured, "mine")
    assert (base.intra_gb_s, base.memory_gb, base.memory_gb_s) == pytest.approx((1.5, 80.0, 20.0)), "GB, not GiB"


def test_constants_that_are_known_are_found_again():
    machine, found = truth()[1], calibration()
    assert set(found.fitted) == set(TRUE)
    close = {"product_efficiency": 0.1, "operation_us": 0.2, "collective_us": 0.2, "convolution_efficiency": 0.2}
    for key, within in {**close, "memory_efficiency": 0.35}.items():  # small tensors tell little about memory
        assert getattr(found.cluster, key) == pytest.approx(TRUE[key], rel=within), key
    assert found.error < 0.03
    for name, words in UNSEEN.items():
        plan = planned(words)[1]
        assert step_seconds(plan, found.cluster) == pytest.approx(step_seconds(plan, machine), rel=0.1), name


def test_constants_of_gpus_are_found_again_from_the_products_and_trainings_that_are_timed_there():
    measured = replace(EMPTY, device="cuda", cores=2, multiprocessors=108, memory_bytes=80e9, memory_bytes_s=1.8e12,
                       peaks={"fp32": 19e12, "bf16": 270e12})  # fmt: skip
    true = {"product_efficiency": 0.8, "product_ramp": 320.0, "attention_efficiency": 0.5, "memory_efficiency": 0.8,
            "operation_us": 5.0, "kernel_us": 3.0, "convolution_efficiency": 0.3, "collective_us": 30.0,
            "link_efficiency": 0.7}  # fmt: skip
    machine = replace(constants.base(measured, "true"), intra_gb_s=200.0, **true)
    products = [TimedProduct(rows, inner, columns, Sample(1.0), PRODUCTS["cuda"].precision)
                for _, rows, inner, columns in shapes(PRODUCTS["cuda"])]  # fmt: skip
    exchanges = [TimedExchange(name, size, 2, Sample(1.0)) for name in OPERATIONS for size in EXCHANGED]
    plan = plan_of_exchange(2, "cuda")
    timings = [*(constants.product_seconds(one, machine) for one in products),
               *(constants.exchange_seconds(one, plan, machine) for one in exchanges)]  # fmt: skip
    large = max(range(len(products)), key=timings.__getitem__)
    assert products[large].flops_s / timings[large] > 150e12, "by the peak of bf16, not of fp32"
    rows = [replace(one, sample=Sample(seconds))
            for one, seconds in zip((*products, *exchanges), timings, strict=True)]  # fmt: skip
    steps = []
    for name, words in training.STEPS_ON_GPUS:
        config, made = composed(["device=cuda", *training.TIMED_STEPS, *words])
        seconds = step_seconds(made, machine)
        steps.append(TimedStep(name, freeze(config, made), Sample(seconds)))
    found = calibrated(replace(measured, products=tuple(rows[: len(products)]), exchanges=tuple(rows[len(products) :]),
                               steps=tuple(steps)), "mine")  # fmt: skip
    for key in ("product_efficiency", "product_ramp", "attention_efficiency", "memory_efficiency"):
        assert getattr(found.cluster, key) == pytest.approx(true[key], rel=0.15), key
    assert found.error < 0.02


def test_the_peak_of_a_precision_is_that_of_its_fastest_product():
    square = [TimedProduct(100, 100, 100, Sample(2.0), name) for name in ("fp32", "bf16")]
    small = TimedProduct(100, 100, 10, Sample(0.1), "bf16")
    assert highest_rates([small, *square]) == {"fp32": 1e6, "bf16": 2e6}


def test_what_takes_long_is_timed_once_and_products_know_their_precision(monkeypatch):
    calls = []
    clock = devices.Clock(torch.device("cpu"), 1e-6)
    clock.sample(lambda: calls.append(None))
    assert len(calls) >= 2 + devices.REPEATS
    monkeypatch.setattr(devices, "LONG_S", 0.0)
    calls.clear()
    clock.sample(lambda: calls.append(None))
    assert len(calls) == 2, "one to warm up"
    monkeypatch.setitem(PRODUCTS, "cpu", devices.Products("bf16", (4,), (8,), (), 8))
    assert {one.precision for one in devices.products(clock, lambda: None)} == {"bf16"}
    assert devices.peak(clock, "fp16").precision == "fp16"


def test_one_device_has_no_links_to_fit_and_says_so():
    measured = replace(truth()[0], exchanges=())
    found = calibrated(measured, "mine")
    assert not {"collective_us", "link_efficiency"} & set(found.fitted)
    assert "No collectives were measured" in file.text(measured, found)
    on_gpu = replace(measured, device="cuda", multiprocessors=108)
    assert {"kernel_us", "operation_us"} <= {constant.key for constant in constants.constants_of(on_gpu)}


def test_a_calibrated_cluster_is_found_by_every_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLELRUN_CONFIG", str(tmp_path))
    measured, found = truth()[0], calibration()
    path = file.place("mine", None)
    file.prepare(path)
    file.write(path, measured, found)
    cluster = composed_by_user("model=gpt", "cluster=mine").config.cluster
    assert cluster.cores == 2 and cluster.peak_tflops == {"fp32": 0.1, "bf16": 0.2}
    assert cluster.operation_us == pytest.approx(found.cluster.operation_us, rel=1e-3)
    assert step_time(plan_of_step(measured.steps[0]), cluster) is not None
    assert [one.source for one in presets.described("cluster") if one.name == "mine"] == ["user"]
    text = path.read_text()
    for said in ("2026-11-22T12:00:00Z", "host here", "torch 2", "Median spread", "median error"):
        assert said in text, said
    assert yaml.safe_load(text)["name"] == "mine"


def test_names_that_cannot_be_written_are_refused(tmp_path):
    for name, reason in (("a100_dgx", "built in"), ("../mine", "not a name")):
        with pytest.raises(ConfigError, match=reason):
            file.place(name, None)
    (tmp_path / "cluster").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        file.prepare(file.place("mine", tmp_path))
