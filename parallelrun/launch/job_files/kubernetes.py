"""A TrainJob of Kubeflow Trainer (v2) for Kubernetes: it starts a run on every node, and starts it again when it ends
early.

Source: the fields of trainer.kubeflow.org/v1alpha1 as the package kubeflow-trainer-api has them (2.3). The runtime
`torch-distributed` gives each node its place in the variables PET_*, which `cli/nodes.py` reads.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.base.errors import EXIT_PREEMPTED, Problem
from parallelrun.launch.job_files.nodes import MOUNT, JobOnNodes

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")  # of a pod's host, with the suffixes that are added


@dataclass(frozen=True)
class KubernetesJob(JobOnNodes):
    """Settings of a TrainJob.

    image: with parallelrun in it; claim: a PersistentVolumeClaim that all nodes can write (ReadWriteMany), where the
    run's directory is; runtime: a ClusterTrainingRuntime.
    """

    image: str = ""
    claim: str = ""
    namespace: str = "default"
    runtime: str = "torch-distributed"

    @staticmethod
    def fitting(name: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-") or "run"

    def problems(self) -> list[Problem]:
        found = self.problems_of_nodes()
        if not self.image:
            found.append(Problem("the job has no container image", "image", "image=<registry>/<name>:<tag>"))
        if not self.claim:
            what = "all nodes must write to one volume, and none is given"
            found.append(Problem(what, "claim", "claim=<a PersistentVolumeClaim that is ReadWriteMany>"))
        for name in ("claim", "namespace", "runtime", "job_name"):
            value = getattr(self, name)
            if value and not _NAME.fullmatch(value):
                what = f"{name}={value!r}: small letters, digits and dashes, at most 50"
                found.append(Problem(what, name, f"{name}={self.fitting(value)}"))
        return found

    def text(self, command: Sequence[str], python: str, title: str, written_by: str) -> str:
        words = "\n".join(f"      - {json.dumps(word)}" for word in (python, "-m", "parallelrun", *command))
        gpus = f"\n    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: {self.gpus_per_node}"
        return _BODY.format(
            title=title, written_by=written_by, name=self.job_name, namespace=self.namespace, runtime=self.runtime,
            image=json.dumps(self.image), words=words, nodes=self.nodes, ranks=self.ranks_per_node,
            resources=gpus if self.gpus_per_node else "", token=secrets.token_hex(16), claim=self.claim, mount=MOUNT,
            preempted=EXIT_PREEMPTED, memory=_MEMORY if self.gpus_per_node > 1 else "",
            memory_mount=_MEMORY_MOUNT if self.gpus_per_node > 1 else "",
        )  # fmt: skip


_BODY = """\
# {title}
# Written by: {written_by}
# Change what you like, and start it with: kubectl apply -f FILE
# Kubeflow Trainer 2.1 or newer must be installed in the cluster.
apiVersion: v1
kind: Secret
metadata:
  name: {name}-token
  namespace: {namespace}
stringData:
  token: {token} # the ranks meet at rank 0, which answers only those that know this secret
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
  namespace: {namespace}
spec:
  runtimeRef:
    name: {runtime} # gives each node its place in the variables PET_*
  trainer:
    image: {image}
    # With resume=auto the first start is a fresh one. A pod that is told to end saves its step and exits with
    # {preempted}; the job starts again as often as the runtime's failurePolicy allows, and goes on from there.
    command:
{words}
    numNodes: {nodes}
    numProcPerNode: {ranks}{resources}
    env:
      - name: PARALLELRUN_TOKEN
        valueFrom:
          secretKeyRef:
            name: {name}-token
            key: token
  runtimePatches:
    - manager: parallelrun.dev/job
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        volumes: # the run's directory, which all nodes must see
                          - name: runs
                            persistentVolumeClaim:
                              claimName: {claim}{memory}
                        containers:
                          - name: node
                            volumeMounts:
                              - name: runs
                                mountPath: {mount}{memory_mount}
"""
_MEMORY = """
                          - name: shm # NCCL's, between the GPUs of a pod: containers have 64 MiB, too little
                            emptyDir:
                              medium: Memory"""
_MEMORY_MOUNT = """
                              - name: shm
                                mountPath: /dev/shm"""
