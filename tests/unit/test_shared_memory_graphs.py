"""What torch.compile makes of operations in shared memory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from parallelrun.distributed import comm, shared_memory
from parallelrun.distributed.mesh import Group
from parallelrun.distributed.shared_memory.group import SharedMemoryGroup
from tests.cli.launcher import run_to_end


def is_kept_out() -> bool:
    return hasattr(SharedMemoryGroup.all_reduce, "compiled_around")


def compile_one(_: object) -> int:
    """Print whether the operations are kept out of graphs before a compilation and after it, and what is computed."""
    dist.init_process_group(shared_memory.register(), store=dist.HashStore(), rank=0, world_size=1)
    group = Group("tp", (0, 0), 0, dist.group.WORLD)  # two members, so that it is not skipped

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        comm.all_reduce(y, group, "activations")
        return y + 1

    import torch._dynamo

    before = is_kept_out()
    result = torch.compile(forward, backend="eager")(torch.ones(2))
    print(before, is_kept_out(), result.tolist())
    return 0


def test_the_first_compilation_keeps_them_out_of_graphs(tmp_path: Path) -> None:
    """Not the import of the compiler, which torch's pipelines need: what is kept out costs more at each call."""
    done = run_to_end(cwd=tmp_path, function=f"{__name__}:compile_one")
    assert done.stdout.strip() == "False True [3.0, 3.0]", done.stderr
