"""From the data strategy's gradients to the final ones: partial axes, tied copies, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from parallelrun import comm, torch_private
from parallelrun.mesh import Group, Mesh
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import LocalParameter, owns
from parallelrun.plan.structure import EMBEDDING, Plan

EPSILON = 1e-6
# fp32 sums over longer rows lose digits on CPU (3.5e-5 at 30 million elements); rows this long keep 7 of them.
ROW = 4096
# Measuring so many bytes takes less than one more exchange that all ranks wait for.
MEASURED_ALONE_BYTES = 4 * 2**20


class Gradients:
    """The gradients of one rank's parameters, once the data strategy is done with them.

    What is alike in every step is found out here, once: small models pay for each call from Python. flat: by the axis
    over which copies lie (`replica_axis`), buffers that hold the gradients of all parameters of that axis and else only
    zeros, where the data strategy has such.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        plan: Plan,
        mesh: Mesh,
        flat: Mapping[str, Sequence[Tensor]] = MappingProxyType({}),
    ):
        self._parameters = list(parameters)
        self._device = mesh.device
        self._flat = [buffer for buffers in flat.values() for buffer in buffers]
        self._loose = [p for p in parameters if replica_axis(p.layout, plan) not in flat]
        coordinate = dict(mesh.coordinate)
        if plan.data.independent:
            coordinate["dp"] = 0  # every replica measures what is its own
        owned = {layout: owns(layout, plan.mesh, coordinate) for layout in {p.layout for p in parameters}}
        self._measured: list[Tensor] = []  # parts of flat buffers, and the parameters that are measured beside them:
        self._counted = [p for p in self._loose if not p.shared and owned[p.layout]]
        for axis, buffers in flat.items():
            own = [p for p in self._parameters if replica_axis(p.layout, plan) == axis]
            parts = _own_parts(buffers, own, axis, plan, mesh)
            self._measured += parts or []
            self._counted += [] if parts is not None else [p for p in own if not p.shared and owned[p.layout]]
        # Whether every rank measures the whole norm, so that `squared_norm` is no share of it.
        alone = bool(self._measured) and not self._counted
        self.measured_alone = alone and _are_everywhere(self._flat, self._parameters, plan)
        if self.measured_alone:
            self._measured = self._flat
        self._sums = [  # (parameters, group, purpose), in the order in which all ranks exchange them
            ([p for p in self._parameters if p.layout.partial == axes], mesh.group(axis), "partial")
            for axes in sorted({p.layout.partial for p in parameters} - {()})
            for axis in axes
        ]
        tied = {name for pair in plan.tied_copies for name in pair}
        self._sums.append(([p for p in self._parameters if p.name in tied], mesh.group(EMBEDDING), "tied"))

    def finalise(self) -> None:
        """Sum what backward left in parts: gradients partial over an axis, then the two copies of tied weights.

        One flattened all-reduce per axis of a set of partial axes and one for all tied weights, in place. Only where
        the gradient is final may it be measured and clipped.
        """
        for parameters, group, purpose in self._sums:
            if group.size > 1 and parameters:
                _sum_together([_gradient(p) for p in parameters], group, purpose)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm (all of it if `measured_alone`): fp64, 0-d, on the
        gradients' device.

        Each logical element is counted once over the world, or once over each independent replica: by the owner of its
        part (replicas with flat buffers share the work: each owns a part of those), and by the original of a tied pair.
        The sum over the world is not finite exactly if some gradient element is not (or its square sum overflows
        fp32).
        """
        norms = _norms([*self._measured, *(_gradient(p) for p in self._counted)])
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.cat(norms).to(torch.float64).square().sum()

    def clip(self, norm: float, max_norm: float, scale: float = 1.0) -> float:
        """Divide the gradients by the loss scale and clip them to `max_norm` (0: no clipping); return the coefficient.

        norm: the global norm of the unscaled gradients. min(1, max_norm / (norm + 1e-6)) is the same number on every
        rank and under every plan, as norm is.
        """
        coefficient = min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
        if coefficient / scale != 1.0:
            torch_private.multiply([*self._flat, *(_gradient(p) for p in self._loose)], coefficient / scale)
        return coefficient


def _are_everywhere(flat: list[Tensor], parameters: list[LocalParameter], plan: Plan) -> bool:
    """Whether all ranks hold the same gradients, and so few that measuring them is no work."""
    replicated = plan.world == plan.mesh.size("dp") and not plan.data.independent
    split = any(plan.mesh.size(axis) > 1 for p in parameters for axis in p.layout.axes)
    return replicated and not split and sum(b.numel() * b.element_size() for b in flat) <= MEASURED_ALONE_BYTES


def _own_parts(
    flat: Sequence[Tensor], parameters: list[LocalParameter], axis: str, plan: Plan, mesh: Mesh
) -> list[Tensor] | None:
    """What of the flat buffers of an axis this rank measures; None where they also hold what others count."""
    coordinate, replicas = dict(mesh.coordinate), plan.mesh.size(axis)
    if plan.data.independent or any(axis in p.layout.axes for p in parameters):
        replicas = 1  # each rank of the axis holds gradients of its own
    replica = coordinate.get(axis, 0) if replicas > 1 else 0
    if replicas > 1 or plan.data.independent:
        for mesh_dim in plan.mesh.mesh_dims_of(axis):
            coordinate[mesh_dim] = 0  # one replica owns what all replicas measure together
    if any(p.shared or not owns(p.layout, plan.mesh, coordinate) for p in parameters):
        return None
    return [buffer.tensor_split(replicas)[replica] for buffer in flat]


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.tensor.grad
    assert gradient is not None, f"the data strategy left no gradient for {parameter.name}"
    return gradient


def _sum_together(tensors: list[Tensor], group: Group, purpose: str) -> None:
    """All-reduce `tensors` in place as one flat buffer."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    comm.all_reduce(flat, group, purpose)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """1-d tensors of the norms of rows of long gradients, and of the rest."""
    rows, rest = [], []
    for gradient in gradients:
        numel = gradient.numel()
        whole = numel // ROW * ROW
        if numel > ROW:
            flat = gradient.flatten()
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1))
            gradient = flat[whole:]
        if numel <= ROW or whole < numel:
            rest.append(gradient)
    return [*rows, torch.stack(torch_private.norms(rest))] if rest else rows
