"""Running statistics of BatchNorm: frozen parameters that are updated once per step, alike under every plan.

A step moves them by `momentum` towards the mean, over all sample sets of the global batch, of the sets' means and
unbiased variances. Frozen parameters are saved, loaded and compared like others, and have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.models.vision.batch_norm import PURPOSE, BatchNorm
from parallelrun.planner.contract.parameters import LocalParameter, module_layout
from parallelrun.planner.contract.plan import Plan

STATISTICS = ("running_mean", "running_var")
HeldRange = tuple[Tensor, slice]  # this rank's part of a vector, and which part it is


class RunningStatistics:
    """Updates the BatchNorms of this rank's stages.

    Replicas that take every step together hold the same statistics. Other replicas follow their own samples until
    `share` averages them. As the update is linear, the result is the same as with an exchange in every step.
    """

    def __init__(self, model_parts: Sequence[Network], frozen: Sequence[LocalParameter], plan: Plan, mesh: Mesh):
        parameters = {parameter.name: parameter for parameter in frozen}
        self._layers: list[tuple[BatchNorm, list[HeldRange]]] = [  # with running mean and running variance
            (module, [_own_channels(parameters[f"{name}.{kind}"], plan, mesh) for kind in STATISTICS])
            for part in model_parts
            for name, module in part.named_modules()
            if isinstance(module, BatchNorm)
        ]
        sets = plan.sample_sets
        self._sums_in_step = sets is not None and sets.exchanged and not sets.spread
        self._differ = sets is not None and not sets.exchanged
        self._group = mesh.group("dp")

    @torch.no_grad()
    def finish_step(self, applied: bool, num_active: int | None = None) -> None:
        """Update from the statistics of the step's forward passes, or drop those if the update was not applied.

        Collective over dp if replicas have sample sets of their own. num_active: the replicas that had samples; None:
        all of them.
        """
        seen = [layer.take_statistics() for layer, _ in self._layers]
        if not applied or not seen or (seen[0] is None and not self._sums_in_step):
            return
        sizes = [2 * layer.weight.numel() for layer, _ in self._layers]
        flat = torch.cat(
            [
                layer.weight.new_zeros(size, dtype=torch.float64) if statistics is None else statistics.flatten()
                for (layer, _), statistics, size in zip(self._layers, seen, sizes)
            ]
        )
        if self._sums_in_step:
            comm.all_reduce(flat, self._group, PURPOSE)
            flat /= num_active or self._group.size
        for (layer, ranges), new in zip(self._layers, flat.split(sizes)):
            for (tensor, channels), values in zip(ranges, new.view(2, -1)):
                tensor.lerp_(values[channels].to(tensor.dtype), layer.momentum)

    @torch.no_grad()
    def share(self) -> None:
        """Average independent replicas' running statistics over dp, in place. Other plans need no exchange."""
        if not self._differ or self._group.size == 1 or not self._layers:
            return
        tensors = [tensor for _, ranges in self._layers for tensor, _ in ranges]
        flat = torch.cat([tensor.double() for tensor in tensors])
        comm.all_reduce(flat, self._group, PURPOSE)
        for tensor, values in zip(tensors, (flat / self._group.size).split([t.numel() for t in tensors])):
            tensor.copy_(values)


def _own_channels(parameter: LocalParameter, plan: Plan, mesh: Mesh) -> HeldRange:
    """Return the `held_range` of a vector among the channels that its module normalises, which tp may split."""
    tensor, channels = held_range(parameter, mesh)
    ((first, _),) = module_layout(parameter.spec, plan).ranges(parameter.spec.shape, mesh.shape.sizes, mesh.coordinate)
    return tensor, slice(channels.start - first, channels.stop - first)


def held_range(parameter: LocalParameter, mesh: Mesh) -> HeldRange:
    """Return this rank's part of a vector, and the range of the vector that it is."""
    (channels,) = parameter.layout.ranges(parameter.spec.shape, mesh.shape.sizes, mesh.coordinate)
    return parameter.tensor, slice(*channels)
