"""`parallelrun slurm KEY=VALUE ... nodes= gpus_per_node= time= [--submit]`: a batch file of Slurm for a run.

The plan is checked here, before the job waits in a queue. Only `--submit` starts anything. No torch.
"""

from __future__ import annotations

import difflib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from parallelrun.cli import argv as command_lines
from parallelrun.cli import verbs
from parallelrun.cli.argv import CommandLine
from parallelrun.config.keys import GROUPS, known_keys
from parallelrun.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.job_files.slurm import SlurmJob
from parallelrun.launch.directory import name_of
from parallelrun.plan.chosen import is_open
from parallelrun.plan.resolve import resolve
from parallelrun.plan.structure import Plan
from parallelrun.wording import counted

SUBMIT = "--submit"
_SETTINGS = {one.name: one.type for one in fields(SlurmJob)} | {"python": "str"}
_RESUME = "resume"
_ANSWER_S = 30.0  # how long Slurm may take to accept a job


def main(words: list[str]) -> int:
    """Print the batch file, or submit it. Raises ConfigError (2) with all mistakes, EnvironmentProblem (3)."""
    if words in ([], ["-h"], ["--help"]):
        print(_HELP)
        return EXIT_OK
    settings, rest, problems = _settings([word for word in words if word != SUBMIT])
    python = settings.pop("python", sys.executable)
    job = SlurmJob(**settings)
    problems += job.problems()
    try:
        line, plan, job = _checked(job, rest)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    if problems:
        raise ConfigError(*problems)
    command = [*rest, *([] if _given(line, _RESUME) or line.verb != "run" else [f"{_RESUME}=auto"])]
    if job.gpus_per_node and not _given(line, "device"):
        command.append("device=cuda")
    ranks = f"{counted(job.num_ranks, 'rank')} on {counted(job.nodes, 'node')}"
    degrees = " ".join(f"{axis}={degree}" for axis, degree in plan.degrees.items() if degree > 1)
    title = f"{plan.spec.name}, {plan.preset}: {degrees or 'one device'}, {ranks}"
    text = job.text(command, python, title, shlex.join(["parallelrun", "slurm", *words]))
    print(_submitted(text) if SUBMIT in words else text, end="")
    return EXIT_OK


def _settings(words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """(the job's settings, the words of the run, mistakes in the settings)."""
    settings: dict[str, Any] = {}
    rest, problems = [], []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _SETTINGS or not equals:
            is_known = key in known_keys() or key in GROUPS or not equals or not key.isidentifier()
            near = [] if is_known else difflib.get_close_matches(key, _SETTINGS, n=1, cutoff=0.8)
            if near:
                problems.append(Problem(f"{key}: neither a key nor a setting of the job", key, f"{near[0]}={value}"))
            else:
                rest.append(word)
        elif _SETTINGS[key] != "int":
            settings[key] = value
        elif value.isdecimal():
            settings[key] = int(value)
        else:
            problems.append(Problem(f"{word}: not a whole number", key, f"{key}=1"))
    return settings, rest, problems


def _checked(job: SlurmJob, words: Sequence[str]) -> tuple[CommandLine, Plan, SlurmJob]:
    """The parsed words of the run, its plan on the job's ranks, and the job with a name."""
    line = command_lines.read(list(words))
    if line.multirun or line.verb in ("plan", "explain"):
        what = f"slurm writes the file of one run; {'-m' if line.multirun else line.verb} starts none by itself"
        command = "parallelrun -m hydra/launcher=submitit_slurm ..." if line.multirun else "parallelrun plan ..."
        raise ConfigError(Problem(what, "command line", command=command))
    on_gpus = ["device=cuda"] if job.gpus_per_node and not _given(line, "device") else []
    world = job.num_ranks or None
    found = verbs.compose_line(command_lines.read([*words, *on_gpus]), None)
    if found is None:
        raise ConfigError(Problem("Hydra's own flags answer at once; no job is needed", "command line"))
    composed, _ = found
    if is_open(composed.config, composed.given):
        what = "a search for the best plan belongs before the job"
        raise ConfigError(Problem(what, "strategy", command=f"parallelrun plan gpus={world or 8} ..."))
    plan = resolve(composed.config, given=composed.given, world=world, gpus=job.gpus_per_node * job.nodes)
    return line, plan, job if job.job_name else replace(job, job_name=name_of(composed.config, plan))


def _given(line: CommandLine, key: str) -> bool:
    return any(override.key == key for override in line.overrides)


def _submitted(text: str) -> str:
    """Hand the file to sbatch; what it answers. Raises EnvironmentProblem if there is no Slurm, or it refuses."""
    try:
        done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, timeout=_ANSWER_S)
    except FileNotFoundError as error:
        what = "sbatch is not installed here"
        command = "leave --submit out, and submit the file on a login node of the cluster"
        raise EnvironmentProblem(Problem(what, SUBMIT, command=command)) from error
    except subprocess.TimeoutExpired as error:
        what = f"sbatch has not answered in {_ANSWER_S:g} s: the job may have been submitted"
        raise EnvironmentProblem(Problem(what, SUBMIT, command="squeue --me")) from error
    if done.returncode:
        raise EnvironmentProblem(Problem(f"sbatch: {done.stderr.strip()}", SUBMIT, command="sinfo"))
    return done.stdout


_HELP = """parallelrun slurm KEY=VALUE ... nodes=2 gpus_per_node=8 time=04:00:00 [--submit]

Print a batch file of Slurm for a run, to edit and to submit by `sbatch`; --submit submits it at once. The keys are
those of `parallelrun`, and the plan is checked here. The settings of the job:
  nodes=1 gpus_per_node=8          one rank for each GPU
  nodes=1 tasks_per_node=4         ranks on CPUs; cpus_per_task=8: the cores of each
  time=04:00:00                    its limit: hours:minutes:seconds, days-hours
  save_s=300                       the ranks save so many seconds before the limit, and the job is queued again
  partition= account= qos= constraint= job_name= output=
  container=IMAGE                  by the plug-in pyxis
  python=PATH                      the Python on the nodes (default: the one that runs this command)"""
