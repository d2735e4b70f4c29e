"""A TrainJob of Kubeflow Trainer (v2) for Kubernetes: it starts a run on every node, and starts it again when it ends
early.

Source: the fields of trainer.kubeflow.org/v1alpha1 as the package kubeflow-trainer-api has them (2.3). The runtime
`torch-distributed` gives each node its place in the variables PET_*, which `launch/host/cluster_node.py` reads.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

from parallelrun.base.errors import Problem
from parallelrun.launch.job_files.job_file import JobOnNodes

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")  # of a pod's host, with the suffixes that are added


_TEMPLATE = """\
# {title}
# Written by: {written_by}
# Change what you like, and start it with: kubectl apply -f FILE
# Kubeflow Trainer 2.1 or newer must be installed in the cluster.
apiVersion: v1
kind: Secret
metadata:
  name: {job_name}-token
  namespace: {namespace}
stringData:
  token: {token} # the ranks meet at rank 0, which answers only those that know this secret
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job_name}
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
    numProcPerNode: {ranks}
    resourcesPerNode: {{limits: {{nvidia.com/gpu: {gpus_per_node}}}}}
    env:
      - name: PARALLELRUN_TOKEN
        valueFrom:
          secretKeyRef:
            name: {job_name}-token
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
                              claimName: {claim}
                          # NCCL's, between the GPUs of a pod: containers have 64 MiB of {memory}, too little
                          - {{name: {memory}, emptyDir: {{medium: Memory}}}}
                        containers:
                          - name: node
                            volumeMounts:
                              - name: runs
                                mountPath: {mount}
                              - {{name: {memory}, mountPath: /dev/shm}}
"""


@dataclass(frozen=True)
class KubernetesJob(JobOnNodes):
    """Settings of a TrainJob.

    image: with parallelrun in it; claim: a PersistentVolumeClaim that all nodes can write (ReadWriteMany), where the
    run's directory is; runtime: a ClusterTrainingRuntime.
    """

    TEMPLATE = _TEMPLATE

    image: str = ""
    claim: str = ""
    namespace: str = "default"
    runtime: str = "torch-distributed"

    @staticmethod
    def fitting(name: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-") or "run"

    def problems(self) -> list[Problem]:
        problems = self.problems_of_nodes()
        if not self.image:
            problems.append(Problem("the job has no container image", "image", "image=<registry>/<name>:<tag>"))
        if not self.claim:
            message = "all nodes must write to one volume, and none is given"
            problems.append(Problem(message, "claim", "claim=<a PersistentVolumeClaim that is ReadWriteMany>"))
        names, rule = ("claim", "namespace", "runtime", "job_name"), ": small letters, digits and dashes, at most 50"
        return problems + self.illegal_names(names, _NAME, rule, self.fitting)

    def fields(self, program: list[str]) -> dict[str, object]:
        return {
            "image": json.dumps(self.image),
            "words": "\n".join(f"      - {json.dumps(word)}" for word in program),
            "ranks": self.ranks_per_node,
            "token": secrets.token_hex(16),
            "memory": "shm" if self.gpus_per_node > 1 else "",
        }
