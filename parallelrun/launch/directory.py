"""The run directory: made exclusively, private, never outside its root; what is written into it before a rank starts.

Torch-free. `<runs>/<model>-<strategy>-<degrees>/<utc>-<random>/` holds config.yaml, plan.json, manifest.json,
status.json and logs/ from here; metrics, checkpoints and summaries come from the workers.
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
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import parallelrun
from parallelrun import reserve
from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.launch.environment import num_cores
from parallelrun.plan.structure import Plan
from parallelrun.records import write_json, write_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRET = re.compile(r"(^|[._-])(api_?key|key|token|secret|passwords?|passwd|credentials?)s?($|[._-])", re.IGNORECASE)
_VERSIONS = ("torch", "numpy", "hydra-core", "omegaconf", "rich", "safetensors")


def name_of(config: Config, plan: Plan) -> str:
    """`gpt-ptdp-tp2pp2`, or `config.name`. Raises ConfigError for a name that is no plain file name."""
    degrees = "".join(f"{axis}{plan.degrees[axis]}" for axis in ("dp", "tp", "pp", "ep") if plan.degrees[axis] > 1)
    degrees += f"servers{plan.servers}" if plan.servers else ""
    name = config.name if config.name is not None else f"{config.model.preset}-{plan.preset}-{degrees or 'one'}"
    if not NAME.fullmatch(name):
        raise ConfigError(
            Problem(
                f"name={name[:80]!r} cannot name a directory: letters, digits, '.', '_' and '-', at most 64, "
                "beginning with a letter or digit",
                where="name",
                suggestion="name=" + (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "my-run"),
            )
        )
    return name


def create(root: Path, name: str, run_root: Path | None = None) -> Path:
    """Make this run's own directory, with `logs/` in it, and return its absolute path.

    run_root: the very directory to use (a user's `hydra.run.dir`, a sweep's point) instead of a fresh one under
    `root/name`. Raises EnvironmentProblem when it cannot be made, holds another run, or leads out of `root`.
    """
    try:
        if run_root is not None:
            return _claim(Path(run_root).expanduser().absolute())
        root = root.expanduser()
        root.mkdir(parents=True, exist_ok=True)
        group = root / name
        group.mkdir(mode=0o700, exist_ok=True)
        if not group.resolve().is_relative_to(root.resolve()):
            raise EnvironmentProblem(
                Problem(f"{group} leads out of {root} (to {group.resolve()})", where="runs", suggestion="another name")
            )
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        directory = group.resolve() / f"{stamp}-{secrets.token_hex(3)}"
        directory.mkdir(mode=0o700)
        (directory / "logs").mkdir(mode=0o700)
        _point_latest(root.resolve(), directory)
        return directory
    except OSError as error:
        place = run_root or root
        raise EnvironmentProblem(
            Problem(f"cannot make the run directory in {place}: {error.strerror}: {error.filename}",
                    where="hydra.run.dir" if run_root else "runs", command="runs=<a writable folder>")
        ) from error  # fmt: skip


def _claim(directory: Path) -> Path:
    """Use exactly this directory; whoever makes `logs` in it first owns it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = [
        name for name in ("config.yaml", "status.json", "metrics.jsonl", "checkpoints") if (directory / name).exists()
    ]
    with contextlib.suppress(FileExistsError):
        if not held:
            (directory / "logs").mkdir(mode=0o700)
            return directory
    raise EnvironmentProblem(
        Problem(f"{directory} holds another run ({(held or ['logs'])[0]})", where="hydra.run.dir",
                suggestion="another directory, or resume=<that directory> with a new one")
    )  # fmt: skip


def _point_latest(root: Path, directory: Path) -> None:
    """`<runs>/latest` -> the newest run; replaced atomically, because two runs may start at once."""
    temporary = root / f".latest-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):  # a file system without links: only a convenience is lost
        temporary.symlink_to(directory.relative_to(root), target_is_directory=True)
        os.replace(temporary, root / "latest")


def describe(
    directory: Path,
    config: Config,
    plan: Plan,
    argv: Sequence[str],
    overrides: Sequence[str],
    resumed: dict[str, Any] | None = None,
) -> None:
    """Write config.yaml, plan.json and manifest.json. resumed: of the checkpoint the run goes on from, if any."""
    from parallelrun.plan.freeze import freeze
    from parallelrun.report.plan import document

    if not reserve.set_aside(directory):
        print(f"warning: the disk of {directory} is almost full: records of this run may be lost", file=sys.stderr)
    write_text(directory / "config.yaml", freeze(config, plan))
    write_json(directory / "plan.json", document(plan, config))
    write_json(directory / "manifest.json", {**manifest(config, plan, argv, overrides), "resumed": resumed})


def manifest(config: Config, plan: Plan, argv: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """Where, when, by what command and with which code a run was started; secrets in the command are left out."""
    cores = num_cores()
    return {
        "argv": [redact(argument) for argument in argv],
        "overrides": [redact(override) for override in overrides],
        "verb": config.verb,
        "started_utc": utc_now(),
        "versions": {"parallelrun": parallelrun.__version__, "python": platform.python_version(), **_installed()},
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
    }


def redact(argument: str) -> str:
    """`tracker.api_key=abc` -> `tracker.api_key=<redacted>`; the password of a URL likewise."""
    key, separator, _ = argument.partition("=")
    if separator and _SECRET.search(key):
        return f"{key}=<redacted>"
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]+@", r"\1<redacted>@", argument)


def code_fingerprint() -> str:
    """sha256 over parallelrun's own Python and YAML files (path and content): equal code, equal text."""
    from hashlib import sha256
    from importlib.util import find_spec

    digest = sha256()
    for package in ("parallelrun", "parallelrun.strategies", "parallelrun.conf"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in (".py", ".yaml")):
                digest.update(f"{package}/{path.relative_to(folder)}\0".encode())
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def git_state() -> dict[str, Any] | None:
    """sha and dirtiness of the checkout that parallelrun runs from, else of the working directory; None without git."""
    source = Path(parallelrun.__file__).resolve().parents[1]
    for folder in (source if (source / ".git").exists() else None, Path.cwd()):
        if folder is not None and (sha := _git(folder, "rev-parse", "HEAD")):
            return {"sha": sha, "dirty": bool(_git(folder, "status", "--porcelain")), "folder": str(folder)}
    return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed() -> dict[str, str]:
    versions = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def utc_now() -> str:
    """Now, as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
