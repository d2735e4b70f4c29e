"""Checkpoints: a directory per step, written aside and renamed; loaded bit by bit under any other plan.

    runs/<run>/checkpoints/step_<n>/index.json                what it holds, where, and the sha256 of every file
                                    rank_<r>.safetensors      the parts that rank r owned

Names are one-device names: `model/<name>`, `optimizer/<kind>/<name>` (Adam: exp_avg, exp_avg_sq, step). Nothing here
reads or writes pickle on disk. Finding, describing and refusing (`find`, `index`) do not import torch; saving and
loading do. What the caller must do: after `load`, `DataRuntime.finish_update()`, since under ZeRO-1 the parameters are
shards of which the module's weights are gathered copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from parallelrun.checkpoint.find import complete_steps, keep_last, latest
from parallelrun.checkpoint.index import check_model, reshard_note
from parallelrun.checkpoint.resume import check_resume, resolve_resume, resumed_from
from parallelrun.checkpoint.schema import read_index
from parallelrun.plan.structure import Plan

if TYPE_CHECKING:
    from parallelrun.mesh import Mesh
    from parallelrun.optimizer import Optimizer
    from parallelrun.plan.parameters import LocalParameter

__all__ = [
    "check_model",
    "check_resume",
    "complete_steps",
    "keep_last",
    "latest",
    "load",
    "read_index",
    "reshard_note",
    "resolve_resume",
    "resumed_from",
    "save",
]


def save(
    directory: Path,
    step: int,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    extra: Mapping[str, Any],
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({}),
) -> Path:
    """Write `directory/step_<step>` and return its path. Collective: every rank calls it with its own parts.

    extra: what else an exact resume needs, JSON only; rank 0's is kept. kept: what the data strategy keeps beside the
    optimizer (`DataRuntime.kept`), alike on all replicas. Every logical element is written once, by the
    rank that owns it. Raises EnvironmentProblem (a full disk, a file system that hosts do not share) on all ranks alike
    when any rank fails; earlier checkpoints are then untouched and nothing half-written stays.
    """
    from parallelrun.checkpoint import store

    return store.save(directory, step, parameters, optimizer, extra, plan, mesh, kept)


def load(
    path: Path,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Fill the parameters and the optimizer's state from a checkpoint saved under any plan; return its `extra`.

    Collective. Each rank reads only the ranges it holds; what of `kept` is not in the checkpoint stays as it is. Raises
    CheckpointError (exit 4) on all ranks alike, before any weight is touched: damaged (size, sha256), incomplete, of
    another model or optimizer, pickle.
    """
    from parallelrun.checkpoint import store

    return store.load(path, parameters, optimizer, plan, mesh, kept)
