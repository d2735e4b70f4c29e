"""`doctor`'s all-reduce over all visible GPUs: one process for each, as a run starts them, and what they found.

As a program it is one of these processes. They are started by exec, because CUDA does not survive a fork.
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

NCCL = "nccl"
NUM_ELEMENTS = 2**24  # 64 MiB of fp32: large enough that the time tells the links' rate
TIMEOUT_S = 90.0


class Failed(Exception):
    """The processes did not add up; the message says which rank failed and how."""


def run(num_ranks: int, backend: str = NCCL, timeout_s: float = TIMEOUT_S) -> float:
    """Sum a tensor over `num_ranks` processes; the seconds that one sum took. Raises Failed.

    backend: gloo sums on the CPU instead of the GPUs.
    """
    deadline = time.monotonic() + timeout_s
    processes: list[subprocess.Popen] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=num_ranks))
        # files, not pipes: NCCL_DEBUG=INFO prints more than a pipe holds
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * num_ranks)]
        try:
            for rank in range(num_ranks):
                words = (rank, num_ranks, backend, timeout_s, listener.getsockname()[1])
                processes.append(_start(words, listener.fileno() if rank == 0 else None, *files[2 * rank :][:2]))
            _wait(processes, deadline)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        lines = [_lines(file) for file in files]
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        killed = [rank for rank in failed if processes[rank].returncode < 0]
        culprit = next((rank for rank in failed if rank not in killed), failed[0])
        said = lines[2 * culprit + 1]
        why = said[-1][:300] if said else f"no answer in {timeout_s:g} s"
        raise Failed(f"rank {culprit} of {num_ranks}: {why}")
    return max(float(printed[-1]) for printed in lines[::2])


def _start(words: tuple, listener: int | None, stdout: TextIO, stderr: TextIO) -> subprocess.Popen:
    from parallelrun.launch.environment import for_rank

    served = [] if listener is None else [listener]
    environment = for_rank(os.environ, words[0], words[1], threads=1)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "parallelrun.cli.gpu_reduce", *map(str, (*words, *served))],
        pass_fds=served,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def _lines(file: TextIO) -> list[str]:
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()]


def _wait(processes: list[subprocess.Popen], deadline: float) -> None:
    """Until all have ended, one has failed or the time is up; then the others are ended."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        with contextlib.suppress(OSError):
            process.kill()


def _rank(rank: int, num_ranks: int, backend: str, timeout_s: float, port: int, listener: int | None) -> float:
    """Join, sum twice (the first sum sets the connections up), check every element; the second sum's seconds."""
    import torch
    import torch.distributed as dist

    from parallelrun.launch.preflight import gpu_index

    timeout = timedelta(seconds=timeout_s)
    device = torch.device("cpu")
    if backend == NCCL:
        device = torch.device("cuda", gpu_index(rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    store = dist.TCPStore(
        "127.0.0.1", port, num_ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    for _ in range(2):
        values = torch.full((NUM_ELEMENTS,), rank + 1.0, device=device)
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
    number, size, name, limit, store_port, *descriptor = sys.argv[1:]
    served = int(descriptor[0]) if descriptor else None
    print(_rank(int(number), int(size), name, float(limit), int(store_port), served))
