"""The run directory: created exclusively and private, with what is known before the ranks start.

The launcher writes config.yaml, plan.json, manifest.json, status.json and logs/ to
`<runs>/<model>-<strategy>-<degrees>/<utc>-<random>/`. The workers write metrics, checkpoints and summaries.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallelrun.base import errors, reserve, version
from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.records import redact, write_json, write_text
from parallelrun.base.version import __version__
from parallelrun.base.wording import print_note
from parallelrun.config.kept_model import keep
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host.environment import num_cores
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model import definitions
from parallelrun.report.records import attempts

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STATUS_EVERY_S = 2.0
_STATES = {  # by exit code; with any other a run has failed
    errors.EXIT_OK: "done",
    errors.EXIT_PREEMPTED: "preempted",
    **dict.fromkeys((errors.EXIT_INTERRUPTED, errors.EXIT_TERMINATED), "interrupted"),
}
_FILES_OF_A_RUN = ("config.yaml", "status.json", "metrics.jsonl", "checkpoints")
_VERSIONS = ("torch", "numpy", "hydra-core", "omegaconf", "rich", "safetensors")


def name_of(config: Config, plan: Plan) -> str:
    """Return `config.name`, else a name such as `gpt-ptdp-tp2pp2`. Raises ConfigError if it is not a file name."""
    degrees = "".join(
        f"{axis}{plan.degrees[axis]}" for axis in ("dp", "cp", "tp", "pp", "ep") if plan.degrees[axis] > 1
    )
    degrees += f"servers{plan.servers}" if plan.servers else ""
    name = config.name if config.name is not None else f"{config.model.preset}-{plan.preset}-{degrees or 'one'}"
    if not NAME.fullmatch(name):
        message = (
            f"name={name[:80]!r} cannot be the name of a directory: use at most 64 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit"
        )
        legal = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "my-run"
        raise ConfigError(Problem(message, "name", f"name={legal}"))
    return name


def create(root: Path, name: str, run_root: Path | None = None) -> Path:
    """Create this run's directory with `logs/` in it. Return its absolute path.

    run_root: use exactly this directory (the user's `hydra.run.dir`, a point of a sweep) instead of a new one in
    `root/name`. Raises EnvironmentProblem if it cannot be created, holds another run, or is outside `root`.
    """
    try:
        if run_root is not None:
            return _claim(run_root.expanduser().absolute())
        root = root.expanduser()
        root.mkdir(parents=True, exist_ok=True)
        group = root / name
        group.mkdir(mode=0o700, exist_ok=True)
        if not group.resolve().is_relative_to(root.resolve()):
            message = f"{group} is a link to {group.resolve()}, which is outside {root}"
            raise EnvironmentProblem(Problem(message, "runs", "another name"))
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        directory = group.resolve() / f"{stamp}-{secrets.token_hex(3)}"
        directory.mkdir(mode=0o700)
        (directory / "logs").mkdir(mode=0o700)
        with contextlib.suppress(OSError):  # the link is a convenience, and some file systems have no links
            temporary = root / f".latest-{secrets.token_hex(4)}"
            temporary.symlink_to(Path(name, directory.name), target_is_directory=True)
            os.replace(temporary, root / "latest")  # atomic, because two runs may start at once
        return directory
    except OSError as error:
        message = f"cannot create the run directory in {run_root or root}: {error.strerror}: {error.filename}"
        where = "hydra.run.dir" if run_root else "runs"
        raise EnvironmentProblem(Problem(message, where, command="runs=<a writable folder>")) from error


def _claim(directory: Path) -> Path:
    """Use exactly this directory. It belongs to the process that creates `logs` in it first."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [name for name in _FILES_OF_A_RUN if (directory / name).exists()]
    with contextlib.suppress(FileExistsError):
        if not files:
            (directory / "logs").mkdir(mode=0o700)
            return directory
    message = f"{directory} holds another run ({(files or ['logs'])[0]})"
    fix = "another directory; to continue that run, resume=<that directory> in a new one"
    raise EnvironmentProblem(Problem(message, "hydra.run.dir", fix))


def describe(
    directory: Path,
    config: Config,
    plan: Plan,
    argv: Sequence[str],
    overrides: Sequence[str],
    resumed: dict[str, Any] | None = None,
) -> None:
    """Write config.yaml, plan.json and manifest.json. resumed: facts about the checkpoint that the run starts from."""
    from parallelrun.planner.facts.document import document
    from parallelrun.planner.resolve.freeze import freeze

    if not reserve.set_aside(directory):
        print_note(f"warning: the disk of {directory} is almost full: records of this run may be lost")
    write_text(directory / "config.yaml", freeze(config, plan))
    keep(config, directory)
    write_json(directory / "plan.json", document(plan, config))
    cores = num_cores()
    manifest = {
        "argv": [redact(argument) for argument in argv],
        "overrides": [redact(override) for override in overrides],
        "verb": config.verb,
        "started_utc": utc_now(),
        "versions": {
            "parallelrun": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _VERSIONS},
        },
        "code_sha256": code_fingerprint(),
        "git": git_state(),
        "hosts": [socket.gethostname()],
        "platform": platform.platform(),
        "pid": os.getpid(),
        "executable": sys.executable,
        "device": plan.device,
        "cores": cores,
        "world": plan.world,
        "ranks_per_core": plan.world / cores if plan.device == "cpu" else None,
        "seeds": {"seed": config.seed},
        "tokenizer": definitions.dataset(config).tokenizer(config),
        "resumed": resumed,
    }
    write_json(directory / "manifest.json", manifest)


def code_fingerprint() -> str:
    """Return the sha256 of parallelrun's own Python and YAML files (paths and contents)."""
    digest = sha256()
    for package in ("parallelrun", "parallelrun.strategies", "parallelrun.conf"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in (".py", ".yaml")):
                digest.update(f"{package}/{path.relative_to(folder)}\0".encode())
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def git_state() -> dict[str, Any] | None:
    """Return the git state of parallelrun's checkout, else of the working directory; None without git."""
    source = Path(version.__file__).resolve().parents[2]
    for folder in (*([source] if (source / ".git").exists() else []), Path.cwd()):
        command = ["git", "-C", str(folder), "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
            if match := re.match(r"# branch\.oid ([0-9a-f]+)$", done.stdout, re.MULTILINE):
                dirty = any(not line.startswith("#") for line in done.stdout.splitlines())
                return {"sha": match[1], "dirty": dirty, "folder": str(folder)}
    return None


def utc_now() -> str:
    """Return the time as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Status:
    """The writer of status.json, which shows people and schedulers the state of a run.

    failed_save_step: the last step whose checkpoint could not be written; 0 if none failed.
    """

    directory: Path
    step: int = 0
    failed_save_step: int = 0
    next_update: float = 0.0

    def update(self, step: int, failed_save_step: int, ranks: Callable[[], list[dict[str, Any]]] = list) -> None:
        """Record progress, at most every STATUS_EVERY_S seconds. ranks: returns a row for each rank that is seen."""
        if time.monotonic() >= self.next_update:
            self.next_update = time.monotonic() + STATUS_EVERY_S
            self.running(step, failed_save_step, ranks())

    def running(self, step: int = 0, failed_save_step: int = 0, ranks: Sequence[dict[str, Any]] = ()) -> None:
        """Record that the run has reached `step`. A full disk must not end a run because of this."""
        self.step, self.failed_save_step = step, failed_save_step
        with contextlib.suppress(OSError):
            self._write("running", None, None, None, ranks=ranks)

    def ended(
        self,
        exit_code: int,
        error: str | None = None,
        failed_rank: int | None = None,
        stalled: dict[str, Any] | None = None,
    ) -> None:
        """Record the end of the run. error: one line; failed_rank: the rank that failed first; stalled: the operation
        that did not end, and where the ranks were that had not come to it."""
        state = _STATES.get(exit_code, "failed")
        write = partial(self._write, state, exit_code, error, failed_rank, stall=stalled)
        with contextlib.suppress(OSError):
            reserve.insist(self.directory, reserve.STATUS, write)
        reserve.release(self.directory)

    def _write(
        self, state: str, exit_code: int | None, error: str | None, failed_rank: int | None, **optional: object
    ) -> None:
        fields: dict[str, Any] = {
            "state": state,
            "exit_code": exit_code,
            "error": error,
            "failed_rank": failed_rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": self.step,
            "updated_utc": utc_now(),
        }
        optional["failed_save_step"] = self.failed_save_step
        fields |= {name: value for name, value in optional.items() if value}
        fields |= attempts.status(self.directory)
        write_json(self.directory / "status.json", fields)
