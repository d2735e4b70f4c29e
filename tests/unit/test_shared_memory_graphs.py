"""What torch.compile makes of operations in shared memory."""

from __future__ import annotations

import subprocess
import sys

from tests.servants import ROOT

COMPILED = """
import torch
import torch.distributed as dist
from parallelrun import comm, shared_memory
from parallelrun.mesh import Group
from parallelrun.shared_memory.group import SharedMemoryGroup

def forward(x):
    y = x * 2
    comm.all_reduce(y, group, "activations")
    return y + 1

def is_kept_out():
    return hasattr(SharedMemoryGroup.all_reduce, "compiled_around")

dist.init_process_group(shared_memory.register(), store=dist.HashStore(), rank=0, world_size=1)
group = Group("tp", (0, 0), 0, dist.group.WORLD)  # two members, so that it is not skipped
import torch._dynamo
before = is_kept_out()
result = torch.compile(forward, backend="eager")(torch.ones(2))
print(before, is_kept_out(), result.tolist())
"""


def test_the_first_compilation_keeps_them_out_of_graphs() -> None:
    """Not the import of the compiler, which torch's pipelines need: what is kept out costs more at each call."""
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False True [3.0, 3.0]", done.stderr
