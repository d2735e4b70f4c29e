"""What torch.compile makes of operations in shared memory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from parallelrun.distributed import comm, shared_memory
from parallelrun.distributed.mesh import Group
from tests.cli.launcher import run_to_end


def compile_one(_: object) -> int:
    """Print what a compiled function with an operation computes that is kept out of graphs."""
    dist.init_process_group(shared_memory.register(), store=dist.HashStore(), rank=0, world_size=1)
    group = Group("tp", (0, 0), 0, dist.group.WORLD)  # two members, so that it is not skipped

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        comm.all_reduce(y, group, "activations")
        return y + 1

    shared_memory.keep_out_of_graphs()
    print(torch.compile(forward, backend="eager")(torch.ones(2)).tolist())
    return 0


def test_operations_that_are_kept_out_of_graphs_break_them(tmp_path: Path) -> None:
    """Otherwise the compiler fails on what it cannot trace."""
    done = run_to_end(cwd=tmp_path, function=f"{__name__}:compile_one")
    assert done.stdout.strip() == "[3.0, 3.0]", done.stderr
