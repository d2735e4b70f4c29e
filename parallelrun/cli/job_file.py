"""The text of a job's file for Slurm, Kubernetes or SkyPilot: `parallelrun slurm|k8s|sky KEY=VALUE ...`.

The words of the run and the settings of the job are told apart, and the plan is checked before anything waits in a
queue. No torch.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from parallelrun.cli import argv as command_lines
from parallelrun.cli import help, verbs
from parallelrun.cli.argv import CommandLine
from parallelrun.config.keys import GROUPS, known_keys
from parallelrun.errors import EXIT_OK, ConfigError, Problem
from parallelrun.job_files.kubernetes import KubernetesJob
from parallelrun.job_files.nodes import JobFile
from parallelrun.job_files.skypilot import SkyPilotJob
from parallelrun.launch.directory import name_of
from parallelrun.plan.chosen import is_open
from parallelrun.plan.resolve import resolve
from parallelrun.plan.structure import Plan
from parallelrun.wording import counted

_RESUME = "resume"
_PYTHON = "python"


def k8s(words: list[str]) -> int:
    """Print a TrainJob for Kubernetes. Raises ConfigError (2) with all mistakes."""
    return _print("k8s", KubernetesJob(), words, _K8S_HELP)


def sky(words: list[str]) -> int:
    """Print a task of SkyPilot. Raises ConfigError (2) with all mistakes."""
    return _print("sky", SkyPilotJob(), words, _SKY_HELP)


def _print(verb: str, job: JobFile, words: list[str], usage: str) -> int:
    if (code := help.answered(words, usage)) is not None:
        return code
    print(text(verb, job, words, words, "python"), end="")
    return EXIT_OK


def text(verb: str, job: JobFile, given: Sequence[str], typed: Sequence[str], python: str) -> str:
    """The file of a job. verb: slurm | k8s | sky; job: with the defaults; typed: for the reader; python: by default.

    Raises ConfigError with all mistakes.
    """
    settings, rest, problems = _settings(job, given)
    python = settings.pop(_PYTHON, python)
    job = replace(job, **settings)
    problems += job.problems()
    try:
        line, plan, job = _checked(verb, job, rest)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    if problems:
        raise ConfigError(*problems)
    command = [*rest, *([] if _given(line, _RESUME) or line.verb != "run" else [f"{_RESUME}=auto"])]
    command += [word for word in job.words() if not _given(line, word.partition("=")[0])]
    if job.gpus_per_node and not _given(line, "device"):
        command.append("device=cuda")
    ranks = f"{counted(job.num_ranks, 'rank')} on {counted(job.nodes, 'node')}"
    degrees = " ".join(f"{axis}={degree}" for axis, degree in plan.degrees.items() if degree > 1)
    title = f"{plan.spec.name}, {plan.preset}: {degrees or 'one device'}, {ranks}"
    return job.text(command, python, title, shlex.join(["parallelrun", verb, *typed]))


def _settings(job: JobFile, words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """(the job's settings, the words of the run, mistakes in the settings)."""
    types = {one.name: one.type for one in fields(job)} | {_PYTHON: "str"}
    settings: dict[str, Any] = {}
    rest, problems = [], []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in types or not equals:
            is_known = key in known_keys() or key in GROUPS or not equals or not key.isidentifier()
            near = [] if is_known else difflib.get_close_matches(key, types, n=1, cutoff=0.8)
            if near:
                problems.append(Problem(f"{key}: neither a key nor a setting of the job", key, f"{near[0]}={value}"))
            else:
                rest.append(word)
        elif types[key] != "int":
            settings[key] = value
        elif value.isdecimal():
            settings[key] = int(value)
        else:
            problems.append(Problem(f"{word}: not a whole number", key, f"{key}=1"))
    return settings, rest, problems


def _checked(verb: str, job: JobFile, words: Sequence[str]) -> tuple[CommandLine, Plan, JobFile]:
    """The parsed words of the run, its plan on the job's ranks, and the job with a name."""
    line = command_lines.read(list(words))
    if line.multirun or line.verb in ("plan", "explain"):
        what = f"{verb} writes the file of one run; {'-m' if line.multirun else line.verb} starts none by itself"
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
    return line, plan, job if job.job_name else job.named(name_of(composed.config, plan))


def _given(line: CommandLine, key: str) -> bool:
    return any(override.key == key for override in line.overrides)


_K8S_HELP = """parallelrun k8s KEY=VALUE ... nodes=2 gpus_per_node=8 ...

Print a TrainJob of Kubeflow Trainer for Kubernetes, to edit and to start
by `kubectl apply -f FILE`. The keys are those of `parallelrun`, and the plan is checked here. The settings of the job:
  nodes=1 gpus_per_node=8          one rank for each GPU
  nodes=1 tasks_per_node=4         ranks on CPUs
  image=IMAGE                      a container with parallelrun, needed
  claim=CLAIM                      a PersistentVolumeClaim for the runs, which all nodes can write, needed
  namespace=default runtime=torch-distributed job_name=
  python=python                    the Python in the container"""

_SKY_HELP = """parallelrun sky KEY=VALUE ... nodes=2 gpus_per_node=8 ...

Print a task of SkyPilot, to edit and to start
by `sky jobs launch FILE`. The keys are those of `parallelrun`, and the plan is checked here. The settings of the job:
  nodes=1 accelerator=H100 gpus_per_node=8   one rank for each GPU; without both, one rank on the CPUs of each node
  bucket=NAME                      for the runs, which all nodes see, needed
  infra=aws|gcp/us-central1|k8s... spot=1 job_name=
  python=python                    the Python on the nodes"""
