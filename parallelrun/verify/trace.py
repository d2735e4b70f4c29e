"""What a training did in its first steps, as logical tensors on rank 0: the same words for any plan and one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.comm.json_exchange import gather_json
from parallelrun.mesh import Mesh
from parallelrun.plan.parameters import LocalParameter, owns
from parallelrun.train import schedule
from parallelrun.train.build import Training
from parallelrun.train.scaler import LossScaler
from parallelrun.train.step import evaluate, train_step
from parallelrun.verify.decisions import RecordedDecisions, Scores


@dataclass
class Trace:
    """losses, grad_norms, gradients (logical, before clipping) per step; initial and final weights; validation loss.

    router_scores: those of every router and sample, where routing decisions are held (see `decisions`).
    `disagreeing`: names whose copies on different ranks are not equal. Tensors are only filled on rank 0. Where data
    replicas are independent, each one's tensors are kept apart, under their `replica_name`.
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
    """The name of what an independent data replica holds of one parameter."""
    return f"{name} of replica {replica}"


def record(training: Training, steps: int, decisions: RecordedDecisions | None = None) -> Trace:
    """Train `steps` steps and keep everything. Collective: every rank of the plan calls it.

    decisions: records the routers' scores, and may hold their decisions.
    """
    config = training.config
    if decisions is not None:
        decisions.attach(training)
    trace = Trace()
    scaler = LossScaler(config.precision, scaled=training.plan.precision.scaled)
    trace.initial = _gather(training, lambda p: p.tensor.detach(), trace)

    def observe(seen: Training) -> None:
        trace.gradients.append(_gather(seen, lambda p: _gradient(p) / scaler.scale, trace))

    for step in range(1, steps + 1):
        lr = schedule.learning_rate(config.optimizer, step, steps)
        result = train_step(training, step, lr, scaler, observe=observe)
        scaler.update(result.applied)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    trace.final = _gather(training, lambda p: p.tensor.detach(), trace)
    trace.val_loss = evaluate(training)
    if decisions is not None:
        trace.router_scores = _gather_scores(decisions.recorded, training.mesh)
    return trace


def _gather_scores(recorded: Scores, mesh: Mesh) -> Scores:
    """The router scores of all ranks, on the CPU of rank 0 (empty elsewhere)."""
    mine = recorded if mesh.coordinate.get("tp", 0) == 0 else {}  # all tensor ranks route the same tokens
    shapes = [{"name": name, "ranges": [[0, one.numel()]], "owned": True} for name, one in mine.items()]
    columns = next(iter(mine.values())).size(-1) if mine else 0
    dtype = next(iter(recorded.values())).dtype if recorded else torch.float32
    facts = {"entries": shapes, "columns": columns, "dtype": str(dtype).removeprefix("torch.") if mine else ""}
    everyone = gather_json(facts, mesh)
    held = next((getattr(torch, one["dtype"]) for one in everyone if one["dtype"]), dtype)
    flat = torch.cat([one.reshape(-1) for one in mine.values()]) if mine else torch.empty(0, dtype=held)
    flats = _collect(flat, [one["entries"] for one in everyone], mesh, held)
    scores: Scores = {}
    for parts, one in zip(flats, everyone):
        sizes = [_numel(entry["ranges"]) for entry in one["entries"]]
        for entry, part in zip(one["entries"], parts.split(sizes)):
            scores[entry["name"]] = part.view(-1, one["columns"])
    return scores


def _gradient(parameter: LocalParameter) -> Tensor:
    grad = parameter.tensor.grad
    return torch.zeros_like(parameter.tensor) if grad is None else grad.detach()


def _gather(training: Training, part: Callable[[LocalParameter], Tensor], trace: Trace) -> dict[str, Tensor]:
    """Logical tensors assembled from every owner's part, on the CPU of rank 0 (empty elsewhere).

    Asserts that the owners' parts cover every logical element exactly once, and notes copies that differ. Independent
    replicas hold no copies: every one's tensors are gathered.
    """
    mesh, plan = training.mesh, training.plan
    sizes, place = mesh.shape.sizes, dict(mesh.coordinate)
    replica = place["dp"] if plan.data.independent and "dp" in place else 0
    if plan.data.independent:
        place["dp"] = 0
    entries, owned = [], []
    for parameter in training.held:
        local = part(parameter).to("cpu", copy=True)
        ranges = parameter.layout.ranges(parameter.spec.shape, sizes, mesh.coordinate)
        assert tuple(local.shape) == tuple(stop - start for start, stop in ranges), f"{parameter.name}: {local.shape}"
        mine = not parameter.shared and owns(parameter.layout, mesh.shape, place)
        digest = [float(local.double().sum()), float(local.double().abs().sum())]
        entries.append({"name": parameter.name, "ranges": ranges, "owned": mine, "digest": digest, "replica": replica})
        if mine:
            owned.append(local.reshape(-1))
    everyone = gather_json(entries, mesh)
    dtype = getattr(torch, plan.precision.stored)
    flats = _collect(torch.cat(owned) if owned else torch.empty(0, dtype=dtype), everyone, mesh, dtype)
    if mesh.rank != 0:
        return {}
    _note_disagreeing(everyone, trace, 1e-10 if plan.precision.name == "fp64" else 1e-5)
    if not plan.data.independent:
        return _assemble(flats, everyone, plan.spec.parameters, dtype)
    gathered: dict[str, Tensor] = {}
    for index in range(plan.mesh.size("dp")):
        held = [(flat, found) for flat, found in zip(flats, everyone) if found[0]["replica"] == index]
        whole = _assemble([flat for flat, _ in held], [found for _, found in held], plan.spec.parameters, dtype)
        gathered |= {replica_name(name, index): value for name, value in whole.items()}
    return gathered


def _collect(mine: Tensor, everyone: list[list[dict]], mesh: Mesh, dtype: torch.dtype) -> list[Tensor]:
    """Every rank's flat buffer of owned parts, on rank 0."""
    if mesh.rank != 0:
        if mine.numel():
            dist.send(mine.to(mesh.device), dst=0)
        return []
    flats = [mine]
    for rank, entries in enumerate(everyone[1:], start=1):
        numel = sum(_numel(entry["ranges"]) for entry in entries if entry["owned"])
        buffer = torch.empty(numel, dtype=dtype, device=mesh.device)
        if numel:
            dist.recv(buffer, src=rank)
        flats.append(buffer.cpu())
    return flats


def _assemble(flats: list[Tensor], everyone: list[list[dict]], specs: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    logical = {name: torch.zeros(spec.shape, dtype=dtype) for name, spec in specs.items()}
    cover = {name: torch.zeros(spec.shape, dtype=torch.int32) for name, spec in specs.items()}
    for flat, entries in zip(flats, everyone):
        offset = 0
        for entry in (entry for entry in entries if entry["owned"]):
            place = tuple(slice(start, stop) for start, stop in entry["ranges"])
            numel = _numel(entry["ranges"])
            target = logical[entry["name"]][place]
            target.copy_(flat[offset : offset + numel].view(target.shape))
            cover[entry["name"]][place] += 1
            offset += numel
    for name, count in cover.items():
        assert bool((count == 1).all()), f"{name} is not covered exactly once by its layout's owners"
    return logical


def _note_disagreeing(everyone: list[list[dict]], trace: Trace, tolerance: float) -> None:
    """Copies of one part on several ranks must have equal sums."""
    first: dict[str, list[float]] = {}
    for entry in (entry for entries in everyone for entry in entries):
        key = f"{entry['replica']} {entry['name']}{entry['ranges']}"
        total, magnitude = first.setdefault(key, entry["digest"])
        worst = max(abs(entry["digest"][0] - total), abs(entry["digest"][1] - magnitude))
        # a gradient of pure rounding noise has no digits to compare: 1e-12 absolute is below any real one
        if not worst <= tolerance * max(magnitude, 1e-2) and entry["name"] not in trace.disagreeing:
            trace.disagreeing.append(entry["name"])


def _numel(ranges: list) -> int:
    numel = 1
    for start, stop in ranges:
        numel *= stop - start
    return numel
