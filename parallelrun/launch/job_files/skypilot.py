"""A task of SkyPilot, which rents the nodes of a run, and starts it again elsewhere when they are taken away.

Source: SkyPilot's task schema (`sky/utils/schemas.py`, 0.14) and the variables that it gives to a task's nodes
(SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS, ...), which `launch/host/cluster_node.py` reads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from parallelrun.base.errors import Problem
from parallelrun.launch.job_files.job_file import JobFile

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")  # SkyPilot's rule for a task's name
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_ACCELERATOR = re.compile(r"[A-Za-z0-9][\w-]*")


_TEMPLATE = """\
# {title}
# Written by: {written_by}
# Change what you like, and start it with (the secret keeps strangers out of the rendezvous):
#   sky jobs launch FILE --secret PARALLELRUN_TOKEN=$(openssl rand -hex 16)
name: {job_name}
num_nodes: {nodes}

resources:
  accelerators: {accelerators}
  cpus: {cpus}
  infra: {infra}
  use_spot: {spot}
  job_recovery:
    recover_on_exit_codes: [{preempted}] # saved, and told to end

secrets:
  PARALLELRUN_TOKEN: null

# The run's directory, which all nodes must see. A shared file system (`volumes:`) is faster than a bucket, where you
# have one.
file_mounts:
  {mount}:
    name: {bucket}
    mode: MOUNT

workdir: .

setup: |
  pip install -e . # or how your nodes get parallelrun and your data

# The same command on every node: SkyPilot's variables give each its place. With resume=auto the first start is a fresh
# one, and a later one, on other nodes, goes on from the newest checkpoint.
run: |
  {program}
"""


@dataclass(frozen=True)
class SkyPilotJob(JobFile):
    """Settings of a SkyPilot task.

    accelerator: the kind of GPU (H100, A100-80GB), empty for nodes of CPUs, which have one rank each; bucket: where the
    run's directory is, which all nodes must see; infra: aws, gcp/us-central1, ...; spot: 1 for cheaper nodes that may
    be taken away.
    """

    TEMPLATE = _TEMPLATE

    accelerator: str = ""
    bucket: str = ""
    infra: str = ""
    spot: int = 0

    @property
    def num_ranks(self) -> int:
        return self.nodes * max(1, self.gpus_per_node)

    @staticmethod
    def fitting(name: str) -> str:
        return re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") or "run"

    def problems(self) -> list[Problem]:
        problems = []
        if self.nodes < 1:
            problems.append(Problem(f"nodes={self.nodes}: a task needs a node", "nodes", "nodes=1"))
        if bool(self.accelerator) != bool(self.gpus_per_node) or self.gpus_per_node < 0:
            message = "GPUs have a kind and a number on each node: one of both is missing"
            problems.append(
                Problem(message, "accelerator", f"accelerator={self.accelerator or 'H100'} gpus_per_node=8")
            )
        elif self.accelerator and not _ACCELERATOR.fullmatch(self.accelerator):
            problems.append(
                Problem(f"accelerator={self.accelerator!r}: not a kind of GPU", "accelerator", "accelerator=H100")
            )
        if not self.bucket:
            message = "all nodes must write to one place, and none is given"
            problems.append(Problem(message, "bucket", "bucket=<the name of a bucket of yours, or of a new one>"))
        elif not _BUCKET.fullmatch(self.bucket):
            problems.append(Problem(f"bucket={self.bucket!r}: not a bucket's name", "bucket", "bucket=my-runs"))
        if self.spot not in (0, 1):
            problems.append(Problem(f"spot={self.spot}: 0 or 1", "spot", "spot=1"))
        rule = " has characters that SkyPilot does not take"
        return problems + self.illegal_names(["job_name"], _NAME, rule, self.fitting)

    def fields(self, program: list[str]) -> dict[str, object]:
        return {
            "accelerators": f"{self.accelerator}:{self.gpus_per_node}" if self.accelerator else "",
            "cpus": "" if self.accelerator else "4+",
            "infra": json.dumps(self.infra) if self.infra else "",
            "spot": "true" if self.spot else "false",
        }
