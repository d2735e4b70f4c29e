"""`parallelrun sky KEY=VALUE ... nodes= gpus_per_node= ...`: a task of SkyPilot. It starts nothing. No torch."""

from __future__ import annotations

from parallelrun.cli import help, job_file
from parallelrun.errors import EXIT_OK
from parallelrun.job_files.skypilot import SkyPilotJob


def main(words: list[str]) -> int:
    """Print the file. Raises ConfigError (2) with all mistakes."""
    if (code := help.answered(words, _HELP)) is not None:
        return code
    print(job_file.text("sky", SkyPilotJob(), words, words, "python"), end="")
    return EXIT_OK


_HELP = """parallelrun sky KEY=VALUE ... nodes=2 gpus_per_node=8 ...

Print a task of SkyPilot, to edit and to start
by `sky jobs launch FILE`. The keys are those of `parallelrun`, and the plan is checked here. The settings of the job:
  nodes=1 accelerator=H100 gpus_per_node=8   one rank for each GPU; without both, one rank on the CPUs of each node
  bucket=NAME                      for the runs, which all nodes see, needed
  infra=aws|gcp/us-central1|k8s... spot=1 job_name=
  python=python                    the Python on the nodes"""
