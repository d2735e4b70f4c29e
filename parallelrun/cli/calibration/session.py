"""A calibration from start to end: which ranks are started, in which order, within a budget of seconds."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.records import typed
from parallelrun.cli.calibration import training
from parallelrun.cli.calibration.measurements import Measurements, Sample, TimedExchange, TimedProduct, TimedStep
from parallelrun.config import compose
from parallelrun.config import overrides as override_checks
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host.environment import num_cores, visible_gpus
from parallelrun.launch.host.preflight import available_bytes
from parallelrun.launch.ranks.task import run_task, task_root
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import filled, freeze
from parallelrun.planner.resolve.resolve_config import resolve

WORKERS = "parallelrun.cli.calibration.worker"
LEAST_S = 30.0  # a smaller budget hardly reaches the first training
MEASUREMENT_S, SHORT_S = 0.08, 0.01  # of one product or copy
ALLOWED_S = 15.0  # the longest that a training of the list is expected to take


@dataclass
class Session:
    """seconds: the budget. backend: of CPU collectives. timed: how trainings are timed. say: hears progress."""

    seconds: float = 100.0
    backend: str = "auto"
    device: str = "auto"
    timed: Sequence[str] = ()
    say: Callable[[str], None] = lambda text: None
    _began: float = field(default_factory=time.monotonic)
    _skipped: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.monotonic() - self._began)

    def measure(self) -> Measurements:
        """Measure this machine. Raises EnvironmentProblem if not even products can be measured, ConfigError."""
        if self.seconds < LEAST_S:
            cause = f"seconds={self.seconds:g} is not enough to measure anything"
            raise ConfigError(Problem(cause, "seconds", f"seconds={LEAST_S:g}"))
        gpus = visible_gpus() if self.device != "cpu" else 0
        on_cpu, own = not gpus, gpus or num_cores()
        with task_root("calibrate") as root:
            ranks = list(self._devices(root, own, on_cpu))
            products = _over_ranks([row["products"] for row in ranks])
            exchanges = list(self._exchanges(root, own, on_cpu))
            steps = list(self._trainings(root, own, on_cpu))
        if not steps:
            cause = f"no training was timed in seconds={self.seconds:g}: {self._skipped[-1]}"
            raise ConfigError(Problem(cause, "seconds", f"seconds={max(100.0, 2 * self.seconds):g}"))
        peaks = _over_ranks([list(row["peaks"].values()) for row in ranks])
        return Measurements(
            device="cpu" if on_cpu else "cuda",
            cores=own,
            facts=_facts(ranks[0], self.backend, on_cpu),
            peaks=highest_rates([*peaks, *products]),
            memory_bytes_s=_median(row["memory_bytes_s"] for row in ranks),
            multiprocessors=ranks[0].get("multiprocessors", 0),
            memory_bytes=ranks[0].get("memory_bytes") or (available_bytes() or 0) / own,
            products=tuple(products),
            exchanges=tuple(exchanges),
            steps=tuple(steps),
            skipped=tuple(self._skipped),
            seconds=time.monotonic() - self._began,
        )

    def _devices(self, root: Path, own: int, on_cpu: bool) -> Iterator[dict[str, Any]]:
        self.say(f"matrix products and memory of {own} {'core' if on_cpu else 'GPU'}{'s' * (own > 1)}")
        seconds = MEASUREMENT_S if self.left_s > 60 else SHORT_S
        yield from self._measured(root, own, on_cpu, ["products"], seconds)

    def _exchanges(self, root: Path, own: int, on_cpu: bool) -> Iterator[TimedExchange]:
        """Groups as large as the cores or GPUs, half as large, and on CPUs twice as large."""
        sizes = sorted({size for size in ((2, 2 * own) if on_cpu else (own, own // 2)) if size > 1})
        if not sizes:
            self._skipped.append("collectives: one GPU has nobody to exchange with; the rates of links are not fitted")
        for size in sizes:
            self.say(f"collectives of {size} ranks")
            by_rank = self._measured(root, size, on_cpu, ["exchanges"], SHORT_S)
            for same in zip(*(typed(tuple[TimedExchange, ...], rank["exchanges"]) for rank in by_rank)):
                slowest = max(row.sample.seconds for row in same)
                yield replace(same[0], sample=Sample(slowest, _median(row.sample.spread for row in same)))

    def _measured(self, root: Path, ranks: int, on_cpu: bool, parts: list[str], seconds: float) -> list[dict[str, Any]]:
        device = "cpu" if on_cpu else "cuda"
        config = replace(Config(), dp=ranks, global_batch=ranks, device=device, backend=self.backend)
        plan = resolve(config)
        folder = run_task(root, config, plan, f"{WORKERS}:measure", {"parts": parts, "seconds": seconds})
        return [json.loads((folder / f"measured_{rank}.json").read_text()) for rank in range(ranks)]

    def _trainings(self, root: Path, own: int, on_cpu: bool) -> Iterator[TimedStep]:
        longest = ALLOWED_S
        for name, words in training.STEPS if on_cpu else training.STEPS_ON_GPUS:
            if self.left_s < longest:
                self._skipped.append(f"{name}: no time was left")
                continue
            self.say(f"training: {name}")
            began = time.monotonic()
            try:
                step = self.training(root, name, words, own, on_cpu)
            except (ConfigError, EnvironmentProblem) as error:
                self._skipped.append(f"{name}: {error}")
                continue
            longest = max(longest, time.monotonic() - began)
            yield step

    def training(self, root: Path, name: str, words: Sequence[str], own: int, on_cpu: bool) -> TimedStep:
        """Bench one training on this machine. Raises ConfigError, EnvironmentProblem."""
        config, plan = composed(
            [
                f"backend={self.backend}",
                f"device={'cpu' if on_cpu else 'cuda'}",
                *(self.timed or training.TIMED_STEPS),
                *words,
            ]
        )
        if not on_cpu and plan.world > own:
            raise EnvironmentProblem(f"{plan.world} ranks on {own} GPUs")
        folder = run_task(root, filled(config, plan), plan, f"{WORKERS}:steps")
        return TimedStep(name, freeze(config, plan), sample_of(json.loads((folder / "bench.json").read_text())))


def highest_rates(products: Sequence[TimedProduct]) -> dict[str, float]:
    """FLOP/s of the fastest product of each precision: another one may beat the large square one."""
    measured: dict[str, float] = {}
    for product in products:
        measured[product.precision] = max(product.flops_s, measured.get(product.precision, 0.0))
    return measured


def composed(words: Sequence[str]) -> tuple[Config, Plan]:
    """The configuration and plan of `words` of a bench. Raises ConfigError."""
    overrides, problems = override_checks.read(list(words), False, "calibrate")
    if problems:
        raise ConfigError(*problems)
    made, _ = compose.compose_once(compose.prepare(overrides, (), "bench", False))
    return made.config, resolve(made.config, given=made.given)


def sample_of(bench: dict[str, Any]) -> Sample:
    """The sample of a bench.json."""
    spread = (bench["upper_quartile_s"] - bench["lower_quartile_s"]) / bench["median_s"]
    return Sample(bench["median_s"], spread)


def _over_ranks(rows: list[list[dict[str, Any]]]) -> list[TimedProduct]:
    """The same measurements of several ranks, each by its medians."""
    medians = []
    for same in zip(*(typed(tuple[TimedProduct, ...], row) for row in rows)):
        middle = (_median(getattr(row.sample, name) for row in same) for name in ("seconds", "spread"))
        medians.append(replace(same[0], sample=Sample(*middle)))
    return medians


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _facts(rank: dict[str, Any], backend: str, on_cpu: bool) -> dict[str, Any]:
    names = ("parallelrun", "torch", "numpy")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "host": platform.node(),
        "device": rank.get("device") or f"CPU {platform.machine()}",
        "backend": rank.get("backend") or backend,
        "load": round(os.getloadavg()[0], 1) if on_cpu else None,
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in names},
    }
