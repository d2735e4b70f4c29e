"""The step of layers with experts: weight of the auxiliary loss, routing statistics, selection biases.

One all-reduce sums the statistics of all layers over the world. Every rank then knows the load of the global batch and
moves its selection biases alike, and rank 0 writes the statistics to routing.jsonl (`routing_log`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.moe.layer import MoE
from parallelrun.models.network import Network
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import WORLD, Plan
from parallelrun.planner.pieces import routing_statistics as statistics
from parallelrun.planner.pieces.router_settings import PURPOSE
from parallelrun.training.loop.batchnorm_statistics import held_range


@dataclass(frozen=True)
class _LocalMoE:
    """A layer with experts on this rank, its row in the exchange, and this rank's part of its selection bias."""

    layer: MoE
    index: int
    bias: tuple[Tensor, slice] | None


class RoutingUpdater:
    """Updates the layers with experts of this rank's stages. Does and sends nothing for a model without experts.

    The exchange is an fp64 matrix with a row for each MoE layer of the model, on all stages: its statistics
    (`plan.routing_statistics`) and the bytes of its all-to-alls. A rank fills in the rows of its own layers: the
    statistics only at coordinate 0 of cp and of the ranks of tp that route the same tokens, the bytes on every rank.
    """

    def __init__(self, model_parts: Sequence[Network], frozen: Sequence[LocalParameter], plan: Plan, mesh: Mesh):
        parameters = {parameter.name: parameter for parameter in frozen}
        self._plan, self._mesh = plan, mesh
        routers = [layer.name for layer in plan.spec.layers() if layer.layer_role == "router"]
        self._names = [name.removesuffix(".router") for name in routers]
        self._local = [
            _LocalMoE(
                module,
                self._names.index(name),
                held_range(parameters[bias], mesh) if (bias := f"{name}.router.selection_bias") in parameters else None,
            )
            for part in model_parts
            for name, module in part.named_modules()
            if isinstance(module, MoE)
        ]
        self._counts = not any(mesh.coordinate.get(axis, 0) for axis in (plan.tensor.token_axis(plan), "cp"))
        self._sum: Tensor | None = None
        self._work: comm.Waitable | None = None

    def begin_step(self, loss_scale: float, num_samples: float) -> None:
        """Set the weight of the auxiliary loss and clear the statistics, before the forward passes.

        A group's auxiliary loss has the weight loss_scale / (number of groups in num_samples samples), as the loss of a
        target has the weight loss_scale / (number of targets in these samples).
        """
        router = self._plan.spec.router
        if router is None:
            return
        for local in self._local:
            # All tensor ranks compute the same auxiliary loss, and its gradients are summed over tp: of all tokens, or,
            # where ep spans tp, of each rank's own.
            local.layer.auxiliary_scale = loss_scale * router.group_samples / num_samples / self._plan.expert_tp
            local.layer.router.take_statistics()
            local.layer.dispatch.take_bytes()  # e.g. of an evaluation

    @torch.no_grad()
    def launch(self) -> None:
        """Start the exchange of the step's statistics, after backward. Collective over the world."""
        if self._names:
            self._sum = self.collect()
            self._work = comm.all_reduce(self._sum, self._mesh.group(WORLD), PURPOSE, async_op=True)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """Return and clear this rank's contribution to the exchange: fp64 (layers, statistics and bytes)."""
        shape = len(self._names), statistics.exchanged(1, self._plan.spec.experts)
        rows = torch.zeros(shape, dtype=torch.float64, device=self._mesh.device)
        for local in self._local:
            counts = local.layer.router.take_statistics()
            if counts is not None and self._counts:
                rows[local.index, :-1] = counts
            rows[local.index, -1] = local.layer.dispatch.take_bytes()
        return rows

    @torch.no_grad()
    def finish_step(self, applied: bool, total: Tensor | None = None) -> None:
        """Wait for the exchange; move the selection biases if the update was applied.

        The bias of an expert with less than the mean load rises by `bias_rate`, with more it falls. The mean change is
        subtracted, so that the biases do not drift together. total: the sum of all ranks' `collect`, if the caller has
        computed it without `launch`.
        """
        if not self._names:
            return
        if self._work is not None:
            with comm.label(WORLD, PURPOSE):
                self._work.wait()
        self._work, self._sum = None, self._sum if total is None else total
        router = self._plan.spec.router
        if not applied or router is None or router.bias_rate == 0.0 or self._sum is None:
            return
        for local in self._local:
            if local.bias is not None:
                tensor, experts = local.bias
                change = bias_change(self._sum[local.index, : self._plan.spec.experts], router.bias_rate)
                tensor += change[experts].to(tensor.dtype)

    def described(self) -> list[dict[str, Any]]:
        """Describe the last step's routing (`statistics.describe`) for each MoE layer of the model, in order.

        `layer` is its name, `all_to_all_bytes` are the bytes of its all-to-alls on all ranks.
        """
        spec = self._plan.spec
        if self._sum is None or spec.router is None:
            return []
        return [
            {"layer": name, **statistics.describe(row[:-1], spec.router, spec.seq), "all_to_all_bytes": int(row[-1])}
            for name, row in zip(self._names, self._sum.tolist(), strict=True)
        ]


def bias_change(load: Tensor, rate: float) -> Tensor:
    """Return the change of the selection biases for a load, both (experts,), by DeepSeek-V3's rule; its sum is 0."""
    change = rate * (load.mean() - load).sign()
    return change - change.mean()
