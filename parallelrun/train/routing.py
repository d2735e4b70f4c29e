"""What the layers with experts do once a step: how much their auxiliary loss weighs, what they saw, and what moves.

Statistics of every layer are summed over the world in one exchange, so that each rank knows the load of the global
batch: the selection biases move by it alike everywhere, and one rank writes it down (`routing_log`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from parallelrun import comm
from parallelrun.mesh import Mesh
from parallelrun.models.moe.layer import MoE
from parallelrun.models.network import Network
from parallelrun.plan import routing_statistics as statistics
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.routing import PURPOSE
from parallelrun.plan.structure import WORLD, Plan
from parallelrun.train.statistics import held_range


@dataclass(frozen=True)
class _Kept:
    """One layer with experts of this rank: its place in the exchange, and where its selection bias is held."""

    layer: MoE
    index: int
    bias: tuple[Tensor, slice] | None


class Routing:
    """Of one rank's stages. A model without experts has none of it, and nothing is sent.

    The exchange is a vector of fp64 with the statistics of every layer of the whole model (`plan.routing_statistics`),
    each followed by the bytes of its all-to-alls. A rank fills in its own layers: what was routed at tensor coordinate
    0 only (all tensor ranks route the same tokens), bytes on every rank.
    """

    def __init__(self, parts: Sequence[Network], frozen: Sequence[LocalParameter], plan: Plan, mesh: Mesh):
        held = {parameter.name: parameter for parameter in frozen}
        self._plan, self._mesh = plan, mesh
        routers = [layer.name for layer in plan.spec.layers() if layer.layer_role == "router"]
        self._names = [name.removesuffix(".router") for name in routers]
        self._kept = [
            _Kept(
                module,
                self._names.index(name),
                held_range(held[bias], mesh) if (bias := f"{name}.router.selection_bias") in held else None,
            )
            for part in parts
            for name, module in part.named_modules()
            if isinstance(module, MoE)
        ]
        self._counts = mesh.coordinate.get("tp", 0) == 0
        self._seen: Tensor | None = None
        self._work: Work | None = None

    def begin_step(self, loss_scale: float, num_samples: float) -> None:
        """Before the forward passes: a group's auxiliary loss weighs loss_scale / (groups of num_samples samples), as a
        target's loss weighs loss_scale / (targets of these samples)."""
        router = self._plan.spec.router
        if router is None:
            return
        for kept in self._kept:
            # gradients of what all tensor ranks compute alike are summed over tp
            kept.layer.auxiliary_scale = loss_scale * router.group_samples / num_samples / self._plan.mesh.size("tp")
            kept.layer.router.take_statistics()
            kept.layer.dispatch.take_bytes()  # what was seen outside of a step is not the step's

    @torch.no_grad()
    def launch(self) -> None:
        """After backward: start the exchange of what the step's forward passes saw. Collective over the world."""
        if not self._names:
            return
        self._seen = self.collect()
        self._work = comm.all_reduce(self._seen, self._mesh.group(WORLD), PURPOSE, async_op=True)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """This rank's part of the exchange: fp64 (layers, statistics and bytes). Forgets what it gives."""
        shape = len(self._names), statistics.exchanged(1, self._plan.spec.experts)
        rows = torch.zeros(shape, dtype=torch.float64, device=self._mesh.device)
        for kept in self._kept:
            found = kept.layer.router.take_statistics()
            if found is not None and self._counts:
                rows[kept.index, :-1] = found
            rows[kept.index, -1] = kept.layer.dispatch.take_bytes()
        return rows

    @torch.no_grad()
    def finish_step(self, applied: bool, seen: Tensor | None = None) -> None:
        """Wait for the exchange; move the selection biases if the step was applied.

        An expert with less than the mean load gets `bias_rate` more, one with more gets less; the mean of all changes
        is taken off, so that biases do not drift together. seen: the sum of everyone's `collect`, where a caller has
        made it without an exchange.
        """
        if not self._names:
            return
        if self._work is not None:
            with comm.label(WORLD, PURPOSE):
                self._work.wait()
        self._work, self._seen = None, self._seen if seen is None else seen
        router = self._plan.spec.router
        if not applied or router is None or router.bias_rate == 0.0 or self._seen is None:
            return
        for kept in self._kept:
            if kept.bias is not None:
                tensor, experts = kept.bias
                change = bias_change(self._seen[kept.index, : self._plan.spec.experts], router.bias_rate)
                tensor += change[experts].to(tensor.dtype)

    def described(self) -> list[dict[str, Any]]:
        """Per layer of the whole model, in order, what the last step's routing was (`statistics.describe`), its name as
        `layer` and the bytes of its all-to-alls over all ranks as `all_to_all_bytes`; empty without experts."""
        spec = self._plan.spec
        if self._seen is None or spec.router is None:
            return []
        return [
            {"layer": name, **statistics.describe(row[:-1], spec.router, spec.seq), "all_to_all_bytes": int(row[-1])}
            for name, row in zip(self._names, self._seen.tolist(), strict=True)
        ]


def bias_change(load: Tensor, rate: float) -> Tensor:
    """(experts,) of load -> how the selection biases move, by DeepSeek-V3's rule; the sum over experts is 0."""
    change = rate * (load.mean() - load).sign()
    return change - change.mean()
