"""The text of a job's file for Slurm, Kubernetes or SkyPilot: `parallelrun slurm|k8s|sky KEY=VALUE ...`.

The words of the run and the settings of the job are told apart, and the plan is checked before anything waits in a
queue. Only `slurm --submit` starts anything.
"""

from __future__ import annotations

import difflib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from parallelrun.base.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted
from parallelrun.cli import argv as command_lines
from parallelrun.cli import help, verbs
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.tool_settings import keys_of, read_settings
from parallelrun.config.compose import Composed
from parallelrun.config.keys import GROUPS, Key, known_keys
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host.directory import name_of
from parallelrun.launch.job_files.job_file import JobFile
from parallelrun.launch.job_files.kubernetes import KubernetesJob
from parallelrun.launch.job_files.skypilot import SkyPilotJob
from parallelrun.launch.job_files.slurm import SlurmJob
from parallelrun.planner.contract.degrees import LARGEST
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.search.open_keys import is_open

SUBMIT = "--submit"
_ANSWER_S = 30.0  # how long Slurm may take to accept a job
_RESUME = "resume"
_PYTHON = "python"


def slurm(words: list[str]) -> int:
    """Print a batch file of Slurm, or submit it. Raises ConfigError (2) with all mistakes, EnvironmentProblem (3)."""
    if (code := help.answered(words, _SLURM_HELP)) is not None:
        return code
    batch = text("slurm", SlurmJob(), [word for word in words if word != SUBMIT], words, sys.executable)
    print(_submitted(batch) if SUBMIT in words else batch, end="")
    return EXIT_OK


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


def _submitted(text: str) -> str:
    """Hand the file to sbatch; what it answers. Raises EnvironmentProblem if there is no Slurm, or it refuses."""
    try:
        done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, timeout=_ANSWER_S)
    except FileNotFoundError as error:
        message = "sbatch is not installed here"
        command = "leave --submit out, and submit the file on a login node of the cluster"
        raise EnvironmentProblem(Problem(message, SUBMIT, command=command)) from error
    except subprocess.TimeoutExpired as error:
        message = f"sbatch has not answered in {_ANSWER_S:g} s: the job may have been submitted"
        raise EnvironmentProblem(Problem(message, SUBMIT, command="squeue --me")) from error
    if done.returncode:
        raise EnvironmentProblem(Problem(f"sbatch: {done.stderr.strip()}", SUBMIT, command="sinfo"))
    return done.stdout


def text(verb: str, job: JobFile, words: Sequence[str], typed: Sequence[str], python: str) -> str:
    """The file of a job. verb: slurm | k8s | sky; job: with the defaults; typed: for the reader; python: by default.

    Raises ConfigError with all mistakes.
    """
    settings, rest, problems = _settings(job, words)
    python = settings.pop(_PYTHON, python)
    job = replace(job, **settings)
    try:
        line, composed = _composed(verb, job, rest)
        if "gpus_per_node" not in settings and job.num_ranks == 0 and (gpus := _gpus_of_cluster(composed)):
            job = replace(job, gpus_per_node=gpus)
            line, composed = _composed(verb, job, rest)
        problems += job.problems()
        plan = _planned(job, composed)
    except ConfigError as error:
        raise ConfigError(*dict.fromkeys([*problems, *job.problems(), *error.problems])) from error
    if problems:
        raise ConfigError(*problems)
    job = job if job.job_name else job.named(name_of(composed.config, plan))
    command = [*rest, *([] if _given(line, _RESUME) or line.verb != "run" else [f"{_RESUME}=auto"])]
    command += [word for word in job.words() if not _given(line, word.partition("=")[0])]
    if job.gpus_per_node and not _given(line, "device"):
        command.append("device=cuda")
    ranks = f"{counted(job.num_ranks, 'rank')} on {counted(job.nodes, 'node')}"
    degrees = " ".join(f"{axis}={degree}" for axis, degree in plan.degrees.items() if degree > 1)
    head = [f"{plan.spec.name}, {plan.preset}: {degrees or 'one device'}, {plan.precision.name}, {ranks}"]
    for warning in _warnings(composed) if line.verb == "run" else ():
        head.append(f"warning: {warning}")
        print(head[-1], file=sys.stderr)
    return job.text(command, python, "\n# ".join(head), shlex.join(["parallelrun", verb, *typed]))


def _warnings(composed: Composed) -> list[str]:
    """What a user who waits in a queue would not want to have left at its default."""
    config, user_keys, lines = composed.config, composed.given, []
    if "steps" not in user_keys and config.steps == Config().steps:
        lines.append(f"steps={config.steps}, the default, is a trial: steps=10000")
    if config.dataset.name == DatasetConfig().name and not any(key.startswith("dataset") for key in user_keys):
        lines.append(f"dataset={config.dataset.name}, the default, is Python's own source text: dataset=text path=FILE")
    return lines


def _gpus_of_cluster(composed: Composed) -> int | None:
    """The GPUs of a node of the cluster that the user has named."""
    cluster = composed.config.cluster
    is_named = any(key.split(".")[0] == "cluster" for key in composed.given)
    return cluster.gpus_per_node if is_named and not cluster.cores and composed.config.device != "cpu" else None


def _settings(job: JobFile, words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """(the job's settings, the words of the run, mistakes in the settings)."""
    kinds = {setting.name: "int" if setting.type == "int" else "str" for setting in fields(job)} | {_PYTHON: "str"}
    own, rest, problems = [], [], []
    for word in words:
        key, equals, value = word.partition("=")
        is_of_run = key in known_keys() or key in GROUPS or not equals or not key.isidentifier()
        near = [] if is_of_run else difflib.get_close_matches(key, kinds, n=1, cutoff=0.8)
        if key in kinds and equals:
            own.append(word)
        elif near:
            problems.append(Problem(f"{key}: neither a key nor a setting of the job", key, f"{near[0]}={value}"))
        else:
            rest.append(word)
    settings, mistakes = read_settings(own, keys_of(*(Key(name, kind, False) for name, kind in kinds.items())), {})
    return settings, rest, [*problems, *mistakes]


def _composed(verb: str, job: JobFile, words: Sequence[str]) -> tuple[CommandLine, Composed]:
    """The parsed words of the run, and its configuration."""
    line = command_lines.read(list(words))
    if line.multirun or line.verb in ("plan", "explain"):
        message = f"{verb} writes the file of one run; {'-m' if line.multirun else line.verb} starts none by itself"
        command = "parallelrun -m hydra/launcher=submitit_slurm ..." if line.multirun else "parallelrun plan ..."
        raise ConfigError(Problem(message, "command line", command=command))
    on_gpus = ["device=cuda"] if job.gpus_per_node and not _given(line, "device") else []
    answer = verbs.compose_line(command_lines.read([*words, *on_gpus]), None)
    if answer is None:
        raise ConfigError(Problem("Hydra's own flags answer at once; no job is needed", "command line"))
    composed, _ = answer
    if is_open(composed.config, composed.given):
        message = "a search for the best plan belongs before the job"
        raise ConfigError(Problem(message, "strategy", command=f"parallelrun plan gpus={job.num_ranks or 8} ..."))
    return line, composed


def _planned(job: JobFile, composed: Composed) -> Plan:
    """The plan on the job's ranks. Raises ConfigError, with the number of nodes that the plan would fill."""
    config, user_keys, gpus = composed.config, composed.given, job.gpus_per_node * job.nodes
    if job.num_ranks > LARGEST:  # whose divisors would be searched for hours
        raise ConfigError(Problem(f"nodes={job.nodes} have {job.num_ranks} ranks, more than {LARGEST:,}", "nodes"))
    try:
        return resolve(config, given=user_keys, world=job.num_ranks or None, gpus=gpus)
    except ConfigError as error:
        needed = _world_of_plan(config, user_keys)
        on_a_node = job.num_ranks // job.nodes if job.nodes > 0 else 0
        if not needed or not on_a_node or needed % on_a_node or needed == job.num_ranks:
            raise
        message = f"the plan has {counted(needed, 'rank')}, and {counted(job.nodes, 'node')} of {on_a_node} have "
        more = Problem(f"{message}{job.num_ranks}", "nodes", f"nodes={needed // on_a_node}", kind="arithmetic")
        raise ConfigError(more, *(problem for problem in error.problems if problem.where != "world")) from error


def _world_of_plan(config: Config, user_keys: frozenset[str]) -> int | None:
    """The number of ranks that the given degrees ask for; None if the plan is wrong in itself."""
    try:
        return resolve(config, given=user_keys).world
    except ConfigError:
        return None


def _given(line: CommandLine, key: str) -> bool:
    return any(override.key == key for override in line.overrides)


_SLURM_HELP = """parallelrun slurm KEY=VALUE ... nodes=2 gpus_per_node=8 time=04:00:00 [--submit]

Print a batch file of Slurm for a run, to edit and to submit by `sbatch`; --submit submits it at once. The keys are
those of `parallelrun`, and the plan is checked here. The settings of the job:
  nodes=1 gpus_per_node=8          one rank for each GPU; cpus_per_task=8: the cores of each
  nodes=1 tasks_per_node=4         ranks on CPUs; cpus_per_task=1: the cores of each
  time=04:00:00                    its limit: hours:minutes:seconds, days-hours
  save_s=300                       the ranks save so many seconds before the limit, and the job is queued again
  partition= account= qos= constraint= job_name= output=
  container=IMAGE                  by the plug-in pyxis
  python=PATH                      the Python on the nodes (default: the one that runs this command)"""

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
