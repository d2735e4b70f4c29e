"""The trace of a training's first steps as logical tensors on rank 0, with the same names for any plan.

An expert choice can flip where two router scores differ only by rounding, and then gradients differ by much more than
the rounding. So if rounding is part of the comparison (gradients summed in fp16, or a check in fp32), the reference
decides by the scores of the plan's routers, and the scores themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.comm import gather_json
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.moe.router import Router
from parallelrun.planner.contract.parameters import LocalParameter, owns
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.schedules import LossScaler, learning_rate
from parallelrun.training.loop.step import measure, train_step

Scores = dict[str, Tensor]  # by site, phase and sample: (seq, num_experts)
Entries = list[dict[str, Any]]  # one rank's parts of logical tensors: name, ranges, sums
Description = tuple[str, list[int], str]  # name, shape, dtype of a tensor


def decisions_are_held(config: Config, plan: Plan) -> bool:
    """Return whether the reference uses the plan's routing decisions."""
    rounds = plan.equivalence.bound is not None or config.verify.precision != "fp64"
    return plan.spec.router is not None and not plan.spec.router.is_own and rounds


class RecordedDecisions:
    """Records the scores of every router. held: scores that decide in their place."""

    def __init__(self, held: Scores | None = None):
        self.recorded: Scores = {}
        self._held = held

    def attach(self, training: Training) -> None:
        """Make every router of this rank call `scores`."""
        for part in training.model_parts:
            for module in part.modules():
                if isinstance(module, Router):
                    module.decisions = self

    def scores(self, site: str, training: bool, sample_ids: Tensor, scores: Tensor) -> Tensor:
        """Record `scores` (samples, seq, num_experts) and return those that decide."""
        phase = "training" if training else "validation"
        names = [f"{site}, {phase} sample {number}" for number in sample_ids.tolist()]
        self.recorded |= {name: own.to("cpu", copy=True) for name, own in zip(names, scores, strict=True)}
        if self._held is None:
            return scores
        return torch.stack([self._held[name] for name in names]).to(scores)


@dataclass
class Trace:
    """Losses, gradient norms and gradients (before clipping) per step, weights, validation loss, router scores.

    Tensors are logical and only filled on rank 0. Tensors of independent data replicas have their `replica_name`.
    router_scores: of every router and sample, if routing decisions are recorded. disagreeing: names of parameters whose
    copies differ between ranks.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    val_loss: float = 0.0
    router_scores: Scores = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)

    @property
    def updates(self) -> dict[str, Tensor]:
        """Final minus initial weights."""
        return {name: self.final[name] - self.initial[name] for name in self.initial}


def replica_name(name: str, replica: int) -> str:
    """Return the name of one independent data replica's copy of a parameter."""
    return f"{name} of replica {replica}"


def record(training: Training, steps: int, decisions: RecordedDecisions | None = None) -> Trace:
    """Train `steps` steps and record the trace. Collective: every rank of the plan calls it.

    decisions: records the routers' scores and may replace them.
    """
    config = training.config
    if decisions is not None:
        decisions.attach(training)
    trace = Trace()
    scaler = LossScaler(config.precision, scaled=training.plan.precision.scaled)
    trace.initial = gather_weights(training, trace)

    def observe(seen: Training) -> None:
        trace.gradients.append(_gather(seen, lambda p: _gradient(p) / scaler.scale, trace))

    for step in range(1, steps + 1):
        lr = learning_rate(config.optimizer, step, steps)
        result = train_step(training, step, lr, scaler, observe=observe)
        scaler.update(result.applied)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    trace.final = gather_weights(training, trace)
    trace.val_loss = measure(training).loss
    if decisions is not None:
        axis = training.plan.tensor.token_axis(training.plan)  # whose ranks route the same tokens
        mine = decisions.recorded if training.mesh.coordinate.get(axis, 0) == 0 else {}
        scores_by_rank = gather_tensors(mine, training.mesh)
        trace.router_scores = {name: scores for recorded in scores_by_rank for name, scores in recorded.items()}
    return trace


def _gradient(parameter: LocalParameter) -> Tensor:
    grad = parameter.tensor.grad
    return torch.zeros_like(parameter.tensor) if grad is None else grad.detach()


def gather_weights(training: Training, trace: Trace) -> dict[str, Tensor]:
    """Return the logical weights on the CPU of rank 0, and record copies that differ in `trace`. Collective."""
    return _gather(training, lambda p: p.tensor.detach(), trace)


def _gather(training: Training, part: Callable[[LocalParameter], Tensor], trace: Trace) -> dict[str, Tensor]:
    """Assemble logical tensors from the owners' parts, on the CPU of rank 0 (empty on other ranks).

    Asserts that the owners' parts cover every logical element exactly once, and records copies that differ in `trace`.
    The tensors of independent replicas are no copies: those of every replica are gathered.
    """
    mesh, plan = training.mesh, training.plan
    coordinate, independent = dict(mesh.coordinate), plan.data.independent
    replica = coordinate.get(plan.worker_axis, 0) if independent else 0
    if independent:
        coordinate |= dict.fromkeys(plan.mesh.mesh_dims_of(plan.worker_axis), 0)
    entries, digests, owned = [], [], {}
    for parameter in training.held:
        local = part(parameter).to("cpu", copy=True)
        ranges = parameter.layout.ranges(parameter.spec.shape, mesh.shape.sizes, mesh.coordinate)
        assert tuple(local.shape) == tuple(stop - start for start, stop in ranges), f"{parameter.name}: {local.shape}"
        name = replica_name(parameter.name, replica) if independent else parameter.name
        digests += [local.sum(dtype=torch.float64), local.abs().sum(dtype=torch.float64)]
        entries.append({"name": name, "parameter": parameter.name, "ranges": ranges})
        if not parameter.shared and owns(parameter.layout, mesh.shape, coordinate):
            owned[name] = local
    numbers = torch.stack(digests).view(-1, 2).tolist() if digests else []
    entries = [{**entry, "digest": digest} for entry, digest in zip(entries, numbers, strict=True)]
    gathered = gather_json([entries, _described(owned)], mesh)
    parts = _send_to_first(owned, [described for _, described in gathered], mesh)
    if mesh.rank != 0:
        return {}
    everyone = [entries for entries, _ in gathered]
    _note_disagreeing(everyone, trace, 1e-10 if plan.precision.name == "fp64" else 1e-5)
    dtype = getattr(torch, plan.precision.stored)
    replicas = range(plan.num_replicas) if independent else [None]
    shapes = {
        name if index is None else replica_name(name, index): spec.shape
        for index in replicas
        for name, spec in plan.spec.parameters.items()
    }
    logical = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    cover = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for described, tensors in zip(everyone, parts):
        for entry in (entry for entry in described if entry["name"] in tensors):
            box = tuple(slice(start, stop) for start, stop in entry["ranges"])
            logical[entry["name"]][box] = tensors[entry["name"]]
            cover[entry["name"]][box] += 1
    for name, count in cover.items():
        assert bool((count == 1).all()), f"{name} is not covered exactly once by its layout's owners"
    return logical


def gather_tensors(tensors: Mapping[str, Tensor], mesh: Mesh) -> list[dict[str, Tensor]]:
    """Return every rank's tensors, by rank, on the CPU of rank 0 (an empty list on other ranks). Collective."""
    return _send_to_first(tensors, gather_json(_described(tensors), mesh), mesh)


def _described(tensors: Mapping[str, Tensor]) -> list[Description]:
    return [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]


def _send_to_first(
    tensors: Mapping[str, Tensor], everyone: list[list[Description]], mesh: Mesh
) -> list[dict[str, Tensor]]:
    """See `gather_tensors`; everyone: what the tensors of each rank are."""
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    flat = torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8)
    if mesh.rank != 0:
        if flat.numel():
            dist.send(flat.to(mesh.device), dst=0)
        return []
    received = []
    for rank, entries in enumerate(everyone):
        sizes = [prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in entries]
        if rank:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=mesh.device)
            if flat.numel():
                dist.recv(flat, src=rank)
        parts = zip(entries, flat.cpu().split(sizes)) if entries else ()
        # A part is copied, because a view of another dtype must begin at a multiple of its element size.
        received.append({name: part.clone().view(getattr(torch, dtype)).view(s) for (name, s, dtype), part in parts})
    return received


def _note_disagreeing(everyone: list[Entries], trace: Trace, tolerance: float) -> None:
    """Record parameters whose copies on several ranks have different sums."""
    first: dict[str, list[float]] = {}
    for entry in (entry for entries in everyone for entry in entries):
        total, magnitude = first.setdefault(f"{entry['name']}{entry['ranges']}", entry["digest"])
        worst = max(abs(entry["digest"][0] - total), abs(entry["digest"][1] - magnitude))
        # 1e-12 absolute, below any real gradient: a gradient of only rounding noise has no digits to compare
        if not worst <= tolerance * max(magnitude, 1e-2) and entry["parameter"] not in trace.disagreeing:
            trace.disagreeing.append(entry["parameter"])
