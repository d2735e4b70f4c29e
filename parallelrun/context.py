"""What the launcher gives to the worker of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WorkerContext:
    """One rank's place in the run and its lines to the launcher.

    heartbeat(step, phase): "I am alive and here"; a rank that is silent for `config.timeout_s` seconds is a hang.
    stop_requested(): SIGTERM has come: finish the step, save, return EXIT_PREEMPTED. Ranks may see it at different
    steps, so the loop must agree on it (sum it over the world) before it acts.
    save_failed(step): the checkpoint of that step could not be written and the training goes on; status.json says so.
    gone(rank): that rank has died and the run goes on without it; said once, by one of the others.
    console_owner: this rank may write to the terminal (rank 0 only); the others' output goes to their logs.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    directory: Path
    heartbeat: Callable[[int, str], None]
    stop_requested: Callable[[], bool]
    save_failed: Callable[[int], None]
    console_owner: bool
    gone: Callable[[int], None] = lambda rank: None
