"""A batch file of Slurm that runs a command on every node, saves before its time is over, and goes on when requeued.

Source: Slurm's manuals of sbatch (--signal, --requeue), srun (--kill-on-bad-exit) and scontrol (requeue).
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from functools import partial

from parallelrun.base.errors import Problem
from parallelrun.launch.job_files.job_file import JobOnNodes

# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED")
_NAME = re.compile(r"[\w.@%+:/,=-]+")
_CORES_OF_GPU = 8  # nodes of eight GPUs have 96 to 224 cores


_TEMPLATE = r"""#!/bin/bash
# {title}
# Written by: {written_by}
# Change what you like, and submit it with: sbatch FILE
#SBATCH --job-name={job_name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks}  # {unit}
#SBATCH --gpus-per-node={gpus_per_node}
#SBATCH --cpus-per-task={cores}  # cores of each rank: without it, Slurm gives one
#SBATCH --time={time}
#SBATCH --partition={partition}
#SBATCH --account={account}
#SBATCH --qos={qos}
#SBATCH --constraint={constraint}
#SBATCH --signal=B:USR1@{save_s}  # {save_s} s before the end, and when the job is preempted
#SBATCH --requeue  # the job may start again after preemption or the loss of a node
#SBATCH --open-mode=append  # and then continues this file
#SBATCH --output={output}

# Slurm's signal comes to this shell, and srun hands it to every rank: they finish their step, save it, and exit with
# {preempted}. `scancel` ends the ranks in the same way, and the job does not start again.
ranks=
trap 'kill -USR1 $ranks 2>/dev/null' USR1

# The ranks find each other by Slurm's variables: rank 0 listens on the first node, and answers only ranks that know
# this secret, which srun hands to the ranks only.
PARALLELRUN_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export PARALLELRUN_TOKEN

# With resume=auto the first start is a fresh one, and a later one goes on from the newest checkpoint.
# --kill-on-bad-exit: one failed rank ends the job. Since Slurm 22.05, srun does not inherit --cpus-per-task.
srun --kill-on-bad-exit=1 --cpus-per-task={cores} \
  --container-image={container} --container-mounts="$PWD:$PWD" --container-workdir="$PWD" \
  {program} &
ranks=$!
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done # a signal ends `wait` early
wait "$ranks"
code=$?

if [ "$code" -eq {preempted} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmJob(JobOnNodes):
    """Settings of a Slurm job.

    time: its limit in one of Slurm's forms; save_s: seconds before the limit at which ranks are told to save;
    container: an image for the plug-in pyxis; output: the file of the job's output (%x: its name, %j: its number).
    """

    TEMPLATE = _TEMPLATE

    cpus_per_task: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    container: str = ""
    output: str = "%x-%j.out"
    save_s: int = 300

    def words(self) -> list[str]:
        return []

    @property
    def limit_s(self) -> float:
        """The time limit, which has one of Slurm's forms."""
        if self.time == "UNLIMITED":
            return math.inf
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)  # without days, one number means minutes
        return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units))

    @property
    def cores(self) -> int:
        """As given; else as many as a rank with a GPU needs for its data and its communication, or one of a CPU."""
        return self.cpus_per_task or (_CORES_OF_GPU if self.gpus_per_node else 1)

    def problems(self) -> list[Problem]:
        problems = self.problems_of_nodes()
        if 0 < self.gpus_per_node < self.ranks_per_node:
            message = (
                f"{self.tasks_per_node} ranks on a node of {self.gpus_per_node} GPUs: each rank needs one of its own"
            )
            problems.append(Problem(message, "tasks_per_node", f"tasks_per_node={self.gpus_per_node}"))
        if not _TIME.fullmatch(self.time):
            message = f"time={self.time}: not a time of Slurm's" if self.time else "the job has no time limit"
            problems.append(Problem(message, "time", "time=04:00:00 (hours:minutes:seconds) or time=2-00 (days-hours)"))
        elif self.limit_s <= self.save_s:
            message = (
                f"time={self.time}: the ranks save {self.save_s} s before the end: at once, and after each requeue"
            )
            problems.append(Problem(message, "save_s", f"save_s={int(self.limit_s) // 4}"))
        names = ("partition", "account", "qos", "constraint", "job_name", "output")
        rule = " has characters that Slurm does not take"
        return problems + self.illegal_names(names, _NAME, rule, partial(re.sub, r"[^A-Za-z0-9_.-]+", "-"))

    def fields(self, program: list[str]) -> dict[str, object]:
        return {
            "cores": self.cores,
            "ranks": self.ranks_per_node,
            "unit": "one rank for each GPU" if self.ranks_per_node == self.gpus_per_node else "ranks on a node",
            "container": shlex.quote(self.container) if self.container else "",
        }
