"""Traces chosen steps by torch's profiler (`profile=[3,4]`), for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.comm.counter import CollectiveNames
from parallelrun.distributed.mesh import Mesh

FOLDER = "profile"


class StepProfiler:
    """Writes `profile/step_<n>_rank_<r>.json` in the run directory for each step of `config.profile`.

    Collectives, including torch's own, are named by axis and purpose (`dp gradients: all_reduce`). The phases of a step
    have names too (`read samples`, `forward and backward`, `finish gradients`, `optimizer`).
    """

    def __init__(self, mesh: Mesh, config: Config, directory: Path):
        self._mesh, self._steps = mesh, frozenset(config.profile)
        self._folder = directory / FOLDER

    def watch(self, step: int) -> AbstractContextManager[object]:
        """Return a context for the training step, which costs nothing in other steps."""
        return self._trace(step) if step in self._steps else nullcontext()

    @contextmanager
    def _trace(self, step: int) -> Iterator[None]:
        on_device = self._mesh.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        with profile(activities=activities) as trace:
            with CollectiveNames(self._mesh):
                yield
            if on_device:
                torch.cuda.synchronize()  # otherwise pending kernels would be missing
        self._folder.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(self._folder / f"step_{step}_rank_{self._mesh.rank}.json"))
