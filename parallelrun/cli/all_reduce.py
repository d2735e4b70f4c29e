"""`doctor`'s all-reduce: one process per rank, started as a run starts them, sums a tensor over gloo or NCCL.

Run as a program, this module is one of these processes. They are started by exec, because CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import TextIO

NCCL, GLOO = "nccl", "gloo"
NUM_ELEMENTS = 2**24  # 64 MiB of fp32: large enough for the time to show the bandwidth
TIMEOUT_S = 90.0


class AllReduceFailed(Exception):
    """The sum failed; the message names the rank and its error."""


def run(num_ranks: int, backend: str, num_elements: int = NUM_ELEMENTS, timeout_s: float = TIMEOUT_S) -> float:
    """Sum a tensor over `num_ranks` processes, with gloo on the CPU; the seconds of one sum. Raises AllReduceFailed."""
    deadline = time.monotonic() + timeout_s
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=num_ranks))
        # files, not pipes: NCCL_DEBUG=INFO prints more than a pipe holds
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * num_ranks)]
        try:
            for rank in range(num_ranks):
                words = (rank, num_ranks, backend, num_elements, timeout_s, listener.getsockname()[1])
                processes.append(_start(words, listener.fileno() if rank == 0 else None, *files[2 * rank :][:2]))
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        lines = [_lines(file) for file in files]
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        by_itself = [rank for rank in failed if processes[rank].returncode > 0]
        culprit = (by_itself or failed)[0]
        errors = lines[2 * culprit + 1]
        why = errors[-1][:300] if errors else f"no answer in {timeout_s:g} s"
        raise AllReduceFailed(f"rank {culprit} of {num_ranks}: {why}")
    return max(float(printed[-1]) for printed in lines[::2])


def _start(
    words: tuple[int, int, str, int, float, int], listener: int | None, stdout: TextIO, stderr: TextIO
) -> subprocess.Popen[str]:
    from parallelrun.launch.environment import for_rank

    served = [] if listener is None else [listener]
    environment = for_rank(os.environ, words[0], words[1], threads=1)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "parallelrun.cli.all_reduce", *map(str, (*words, *served))],
        pass_fds=served,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def _lines(file: TextIO) -> list[str]:
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()]


def _rank(
    rank: int, num_ranks: int, backend: str, num_elements: int, timeout_s: float, port: int, listener: int | None
) -> float:
    """Join, sum twice (the first sum opens the connections), check every element; the seconds of the second sum."""
    import torch
    import torch.distributed as dist

    from parallelrun.launch.preflight import gpu_index

    timeout = timedelta(seconds=timeout_s)
    device = torch.device("cpu")
    if backend == NCCL:
        device = torch.device("cuda", gpu_index(rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, num_ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    for _ in range(2):
        values = torch.full((num_elements,), rank + 1.0, device=device)
        began = time.monotonic()
        dist.all_reduce(values)
        smallest, largest = values.min().item(), values.max().item()  # waits for the sum
        seconds = time.monotonic() - began
    expected = num_ranks * (num_ranks + 1) / 2
    if (smallest, largest) != (expected, expected):
        raise ValueError(f"the sum has elements from {smallest:g} to {largest:g} instead of {expected:g}")
    dist.barrier()
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    number, size, name, elements, limit, store_port, *descriptor = sys.argv[1:]
    inherited = int(descriptor[0]) if descriptor else None
    print(_rank(int(number), int(size), name, int(elements), float(limit), int(store_port), inherited))
