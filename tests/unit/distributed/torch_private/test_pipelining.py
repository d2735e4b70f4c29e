"""torch's pipeline schedules without the compiler's front end, and the whole package for whoever asks for the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRESH = """
import sys, torch
from parallelrun.distributed.torch_private import pipelining as ours
schedules = sys.modules["torch.distributed.pipelining.schedules"]

def is_loaded(name): return f"torch.{name}" in sys.modules

print(not is_loaded("_dynamo") and not is_loaded("distributed.pipelining._IR"))
import torch.distributed.pipelining as whole
print(whole is torch.distributed.pipelining and whole.schedules is schedules and not hasattr(whole, "__wrapped__"))
print(not is_loaded("distributed.pipelining._IR") and whole.__spec__.name == "torch.distributed.pipelining")
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, pipe_split
print(callable(pipe_split) and whole._IR.pipe_split is pipe_split and "PipelineStage" in whole.__all__)
print(PipelineStage is ours.PipelineStage and Schedule1F1B is schedules.Schedule1F1B)
plain = torch.nn.Linear(1, 1)
print(not isinstance(plain, schedules.OptimizedModule) and not is_loaded("_dynamo"))
print(isinstance(torch.compile(plain), schedules.OptimizedModule))
print(not isinstance(plain, schedules.OptimizedModule) and is_loaded("_dynamo"))
"""


@pytest.mark.slow
def test_schedules_come_alone_and_the_rest_of_the_package_when_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 8, done.stdout + done.stderr
