"""`parallelrun slurm KEY=VALUE ... nodes= gpus_per_node= time= [--submit]`: a batch file of Slurm for a run.

The plan is checked here, before the job waits in a queue. Only `--submit` starts anything. No torch.
"""

from __future__ import annotations

import subprocess
import sys

from parallelrun.base.errors import EXIT_OK, EnvironmentProblem, Problem
from parallelrun.cli import help
from parallelrun.cli.tools import job_file
from parallelrun.launch.job_files.slurm import SlurmJob

SUBMIT = "--submit"
_ANSWER_S = 30.0  # how long Slurm may take to accept a job


def main(words: list[str]) -> int:
    """Print the batch file, or submit it. Raises ConfigError (2) with all mistakes, EnvironmentProblem (3)."""
    if (code := help.answered(words, _HELP)) is not None:
        return code
    given = [word for word in words if word != SUBMIT]
    text = job_file.text("slurm", SlurmJob(), given, words, python=sys.executable)
    print(_submitted(text) if SUBMIT in words else text, end="")
    return EXIT_OK


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
  nodes=1 gpus_per_node=8          one rank for each GPU; cpus_per_task=8: the cores of each
  nodes=1 tasks_per_node=4         ranks on CPUs; cpus_per_task=1: the cores of each
  time=04:00:00                    its limit: hours:minutes:seconds, days-hours
  save_s=300                       the ranks save so many seconds before the limit, and the job is queued again
  partition= account= qos= constraint= job_name= output=
  container=IMAGE                  by the plug-in pyxis
  python=PATH                      the Python on the nodes (default: the one that runs this command)"""
