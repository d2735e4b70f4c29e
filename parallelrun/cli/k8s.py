"""`parallelrun k8s KEY=VALUE ... nodes= gpus_per_node= ...`: a TrainJob for Kubernetes. It starts nothing. No torch."""

from __future__ import annotations

from parallelrun.cli import help, job_file
from parallelrun.errors import EXIT_OK
from parallelrun.job_files.kubernetes import KubernetesJob


def main(words: list[str]) -> int:
    """Print the file. Raises ConfigError (2) with all mistakes."""
    if (code := help.answered(words, _HELP)) is not None:
        return code
    print(job_file.text("k8s", KubernetesJob(), words, words, "python"), end="")
    return EXIT_OK


_HELP = """parallelrun k8s KEY=VALUE ... nodes=2 gpus_per_node=8 ...

Print a TrainJob of Kubeflow Trainer for Kubernetes, to edit and to start
by `kubectl apply -f FILE`. The keys are those of `parallelrun`, and the plan is checked here. The settings of the job:
  nodes=1 gpus_per_node=8          one rank for each GPU
  nodes=1 tasks_per_node=4         ranks on CPUs
  image=IMAGE                      a container with parallelrun, needed
  claim=CLAIM                      a PersistentVolumeClaim for the runs, which all nodes can write, needed
  namespace=default runtime=torch-distributed job_name=
  python=python                    the Python in the container"""
