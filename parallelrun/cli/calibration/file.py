"""The file of a calibrated cluster: `<name>.yaml`, which Hydra reads."""

from __future__ import annotations

import statistics
from pathlib import Path

import yaml

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.records import write_text
from parallelrun.base.wording import counted
from parallelrun.cli.calibration.constants import Calibration
from parallelrun.cli.calibration.measurements import Measurements
from parallelrun.config import presets
from parallelrun.config.recipes.recipe_files import NAME

DIGITS = 4
_MEASURED = ("peak_tflops", "memory_gb", "memory_gb_s", "intra_gb_s", "multiprocessors", "cores", "kernel_us")


def place(name: str, config_dir: Path | None) -> Path:
    """The YAML file of a cluster: in the folder of `--config-dir`, else in the user's own, which every command finds.

    Raises ConfigError for the name of a built-in cluster, or one that is no file name.
    """
    if not NAME.match(name):
        raise ConfigError(Problem(f"cluster={name}: not a name for a cluster", "cluster", "cluster=mine"))
    if (presets.folder() / presets.CLUSTER / f"{name}.yaml").is_file():
        cause = f"cluster={name} is built in, and a calibration does not replace it"
        raise ConfigError(Problem(cause, "cluster", "cluster=mine"))
    folder = config_dir.expanduser() / presets.CLUSTER if config_dir else presets.own_clusters()
    if folder.parts[0].startswith("~"):
        cause = "no folder for your own clusters: you have no home directory, and HOME is not set"
        raise EnvironmentProblem(Problem(cause, "calibrate", command="parallelrun calibrate ... --config-dir FOLDER"))
    return folder / f"{name}.yaml"


def prepare(path: Path) -> None:
    """Create the folder of `path`. Raises EnvironmentProblem if nothing can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".{path.name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        cause = f"cannot write {path}: {error.strerror}"
        raise EnvironmentProblem(Problem(cause, "cluster", command="--config-dir FOLDER, a writable folder")) from error


def write(path: Path, measured: Measurements, calibration: Calibration) -> None:
    """Write the file. Raises EnvironmentProblem."""
    try:
        write_text(path, text(measured, calibration))
    except OSError as error:
        raise EnvironmentProblem(Problem(f"cannot write {path}: {error.strerror}", "cluster")) from error


def text(measured: Measurements, calibration: Calibration) -> str:
    """The YAML of a calibrated cluster, with its provenance as comments."""
    facts, cluster = measured.facts, calibration.cluster
    crowd = f"{measured.cores} {'cores' if measured.device == 'cpu' else 'GPUs'}"
    values: dict[str, object] = {
        "name": cluster.name,
        "description": f"calibrated {facts['date'][:10]} on {facts['host']}: {crowd}",
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
    }
    values |= {key: rounded(getattr(cluster, key)) for key in (*_MEASURED, *calibration.fitted)}
    present = {key: value for key, value in values.items() if value is not None}
    comments = [f"# {line}\n" for line in provenance(measured, calibration)]
    return "".join(comments) + str(yaml.safe_dump(present, sort_keys=False, width=118))


def provenance(measured: Measurements, calibration: Calibration) -> list[str]:
    """Lines on when, where, with what and how well the constants were measured."""
    facts = measured.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    samples = [row.sample for row in measured.products]
    samples += [row.sample for row in measured.exchanges] + [row.sample for row in measured.steps]
    spread = statistics.median([sample.spread for sample in samples] or [0.0])
    load = f"; load average before: {facts['load']}" if facts.get("load") is not None else ""
    lines = [
        f"Written by `parallelrun calibrate` on {facts['date']}, host {facts['host']}, in {measured.seconds:.0f} s.",
        f"Device: {facts['device']}, {measured.cores}; collectives: {facts['backend']}; {versions}.",
        f"Median spread of a measurement (quartiles over median): {spread:.0%}{load}.",
        f"Fitted to {len(measured.products)} products, {len(measured.exchanges)} collectives and "
        f"{counted(len(calibration.ratios), 'training')}, whose steps it predicts with a median error of "
        f"{calibration.error:.1%}: {', '.join(calibration.fitted)}.",
    ]
    lines += [f"Not measured: {part}" for part in measured.skipped]
    if not measured.exchanges:
        lines.append(f"No collectives were measured: intra_gb_s={calibration.cluster.intra_gb_s:g} is a guess, and "
                     "link_efficiency, collective_us and hop_us have their defaults.")  # fmt: skip
    return lines


def rounded(value: object) -> object:
    """Numbers with DIGITS digits."""
    if isinstance(value, dict):
        return {key: rounded(number) for key, number in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
