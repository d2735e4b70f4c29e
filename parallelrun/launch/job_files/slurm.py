"""A batch file of Slurm that runs a command on every node, saves before its time is over, and goes on when requeued.

Source: Slurm's manuals of sbatch (--signal, --requeue), srun (--kill-on-bad-exit) and scontrol (requeue).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.base.errors import EXIT_PREEMPTED, Problem
from parallelrun.launch.job_files.nodes import JobOnNodes

# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED")
_NAME = re.compile(r"[\w.@%+:/,=-]+")
_COLUMN = 38
_CORES_OF_GPU = 8  # nodes of eight GPUs have 96 to 224 cores


@dataclass(frozen=True)
class SlurmJob(JobOnNodes):
    """Settings of a Slurm job.

    time: its limit in one of Slurm's forms; save_s: seconds before the limit at which ranks are told to save;
    container: an image for the plug-in pyxis; output: the file of the job's output (%x: its name, %j: its number).
    """

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
        found = self.problems_of_nodes()
        if 0 < self.gpus_per_node < self.ranks_per_node:
            what = f"{self.tasks_per_node} ranks on a node of {self.gpus_per_node} GPUs: each rank needs one of its own"
            found.append(Problem(what, "tasks_per_node", f"tasks_per_node={self.gpus_per_node}"))
        if not _TIME.fullmatch(self.time):
            what = f"time={self.time}: not a time of Slurm's" if self.time else "the job has no time limit"
            found.append(Problem(what, "time", "time=04:00:00 (hours:minutes:seconds) or time=2-00 (days-hours)"))
        elif self.limit_s <= self.save_s:
            what = f"time={self.time}: the ranks save {self.save_s} s before the end: at once, and after each requeue"
            found.append(Problem(what, "save_s", f"save_s={int(self.limit_s) // 4}"))
        for name in ("partition", "account", "qos", "constraint", "job_name", "output"):
            value = getattr(self, name)
            if value and not _NAME.fullmatch(value):
                what = f"{name}={value!r} has characters that Slurm does not take"
                found.append(Problem(what, name, f"{name}={re.sub(r'[^A-Za-z0-9_.-]+', '-', value)}"))
        return found

    def text(self, command: Sequence[str], python: str, title: str, written_by: str) -> str:
        per_rank = "one rank for each GPU" if self.ranks_per_node == self.gpus_per_node else "ranks on a node"
        settings = [
            (f"job-name={self.job_name}", ""),
            (f"nodes={self.nodes}", ""),
            (f"ntasks-per-node={self.ranks_per_node}", per_rank),
            (f"gpus-per-node={self.gpus_per_node}" if self.gpus_per_node else "", ""),
            (f"cpus-per-task={self.cores}", "cores of each rank: without it, Slurm gives one"),
            (f"time={self.time}", ""),
            *((f"{name}={getattr(self, name)}" if getattr(self, name) else "", "")
              for name in ("partition", "account", "qos", "constraint")),
            (f"signal=B:USR1@{self.save_s}", f"{self.save_s} s before the end, and when the job is preempted"),
            ("requeue", "the job may start again after preemption or the loss of a node"),
            ("open-mode=append", "and then continues this file"),
            (f"output={self.output}", ""),
        ]  # fmt: skip
        lines = [_setting(text, comment) for text, comment in settings if text]
        return _BODY.format(
            written_by=written_by, title=title, settings="\n".join(lines), srun=self._srun(command, python),
            preempted=EXIT_PREEMPTED,
        )  # fmt: skip

    def _srun(self, command: Sequence[str], python: str) -> str:
        """The srun command, a line for each part. Since Slurm 22.05, srun does not inherit --cpus-per-task."""
        parts = [f"srun --kill-on-bad-exit=1 --cpus-per-task={self.cores}"]
        if self.container:
            mounts = '--container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
            parts.append(f"--container-image={shlex.quote(self.container)} {mounts}")
        parts.append(f"{shlex.quote(python)} -m parallelrun {shlex.join(command)}")
        return " \\\n  ".join(parts)


def _setting(text: str, comment: str) -> str:
    line = f"#SBATCH --{text}"
    return f"{line:<{_COLUMN}}  # {comment}" if comment else line


_BODY = """#!/bin/bash
# {title}
# Written by: {written_by}
# Change what you like, and submit it with: sbatch FILE
{settings}

# Slurm's signal comes to this shell, and srun hands it to every rank: they finish their step, save it, and exit with
# {preempted}. `scancel` ends the ranks in the same way, and the job does not start again.
ranks=
trap 'kill -USR1 $ranks 2>/dev/null' USR1

# The ranks find each other by Slurm's variables: rank 0 listens on the first node, and answers only ranks that know
# this secret, which srun hands to the ranks only.
PARALLELRUN_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export PARALLELRUN_TOKEN

# With resume=auto the first start is a fresh one, and a later one goes on from the newest checkpoint.
# --kill-on-bad-exit: one failed rank ends the job.
{srun} &
ranks=$!
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done # a signal ends `wait` early
wait "$ranks"
code=$?

if [ "$code" -eq {preempted} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
