"""Completes the data strategy's gradients: sums over partial axes and tied copies, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.planner.contract.parameters import LocalParameter, owns
from parallelrun.planner.contract.plan import EMBEDDING, Plan
from parallelrun.planner.pieces.expert_axes import is_sharded, replica_axis
from parallelrun.training.loop.flat_tensors import sum_buckets

EPSILON = 1e-6
# Long fp32 sums are less exact on CPU (relative error 2e-7 at LONG elements, 3.5e-5 at 30 million); sums of rows keep 7
# digits, but each takes a call from Python, where all gradients up to LONG elements share one.
ROW, LONG = 4096, 16384


class Gradients:
    """The gradients of one rank's parameters, after the data strategy has reduced them.

    All decisions that are the same in every step are made in the constructor, because each Python call costs small
    models time. flat: flat buffers of the data strategy, by the axis over which parameters are replicated
    (`replica_axis`); they have the gradients of all parameters of that axis and are otherwise zero.
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
            coordinate |= dict.fromkeys(plan.mesh.mesh_dims_of(plan.worker_axis), 0)  # each measures its own gradients
        owned = {layout: owns(layout, plan.mesh, coordinate) for layout in {p.layout for p in parameters}}
        self._measured: list[Tensor] = []  # parts of flat buffers; `_counted` parameters are measured one by one
        self._counted = [p for p in self._loose if not p.shared and owned[p.layout]]
        for axis, buffers in flat.items():
            own = [p for p in self._parameters if replica_axis(p.layout, plan) == axis]
            parts = _own_parts(buffers, own, axis, plan, mesh)
            self._measured += parts or []
            self._counted += [] if parts is not None else [p for p in own if not p.shared and owned[p.layout]]
        self._sums = [  # (parameters, group, purpose), in the same order on all ranks
            ([p for p in self._parameters if p.layout.partial == axes], mesh.group(axis), "partial")
            for axes in sorted({p.layout.partial for p in parameters} - {()})
            for axis in axes
        ]
        tied = {name for pair in plan.tied_copies for name in pair}
        self._sums.append(([p for p in self._parameters if p.name in tied], mesh.group(EMBEDDING), "tied"))

    def finalise(self) -> None:
        """Sum gradients that are partial over an axis, then the gradients of the two copies of tied weights.

        One flattened all-reduce in place per axis of a set of partial axes, and one for all tied weights. The norm may
        be measured only afterwards.
        """
        for parameters, group, purpose in self._sums:
            if parameters:
                sum_buckets([_gradients(parameters)], group, purpose)

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared global gradient norm.

        It is fp64, 0-d, on the gradients' device. Each logical element is counted once in the world, or once in each
        independent replica: by the owner of its part, and by the original of a tied pair. Replicas with flat buffers
        share the work, a part of the buffers each. The sum over the world is finite unless a gradient element is not
        (or its sum of squares overflows fp32).
        """
        norms = _norms([*self._measured, *_gradients(self._counted)])
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.cat(norms).to(torch.float64).square().sum()

    def clip(self, norm: float, max_norm: float, scale: float = 1.0) -> float:
        """Divide the gradients by the loss scale and clip them to `max_norm` (0: no clipping); return the coefficient.

        norm: the global norm of the unscaled gradients, the same on every rank.
        """
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient / scale != 1.0:
            torch_private.multiply([*self._flat, *_gradients(self._loose)], coefficient / scale)
        return coefficient


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of norm `norm` to `max_norm` (0: no clipping)."""
    return min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0


def _own_parts(
    flat: Sequence[Tensor], parameters: list[LocalParameter], axis: str, plan: Plan, mesh: Mesh
) -> list[Tensor] | None:
    """Return the parts of an axis's flat buffers that this rank measures, or None if other ranks count some of them."""
    if axis == plan.data_axis and not plan.data.independent:
        if any(is_sharded(p.layout, plan) for p in parameters):
            return None
        axis = plan.count_axis  # where workers are summed first, the ranks of one have equal gradients
    coordinate, replicas = dict(mesh.coordinate), plan.mesh.size(axis)
    if plan.data.independent or any(axis in p.layout.axes for p in parameters):
        replicas = 1  # each rank of the axis has different gradients
    replica = coordinate.get(axis, 0) if replicas > 1 else 0
    if replicas > 1 or plan.data.independent:
        for mesh_dim in plan.mesh.mesh_dims_of(axis):
            coordinate[mesh_dim] = 0  # all replicas measure the gradients of the first together
    if any(p.shared or not owns(p.layout, plan.mesh, coordinate) for p in parameters):
        return None
    return [buffer.tensor_split(replicas)[replica] for buffer in flat]


def _gradients(parameters: list[LocalParameter]) -> list[Tensor]:
    gradients = [(parameter, parameter.tensor.grad) for parameter in parameters]
    missing = [parameter.name for parameter, gradient in gradients if gradient is None]
    assert not missing, f"the data strategy left no gradient for {', '.join(missing)}"
    return [gradient for _, gradient in gradients if gradient is not None]


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return 1-d tensors of norms: of rows of long gradients, and of all other gradients."""
    rows, rest = [], []
    for gradient in gradients:
        numel = gradient.numel()
        if numel > LONG:
            flat, in_rows = gradient.reshape(-1), numel // ROW * ROW
            complete = flat if in_rows == numel else flat[:in_rows]
            rows.append(torch.linalg.vector_norm(complete.view(-1, ROW), dim=1))
            if in_rows == numel:
                continue
            gradient = flat[in_rows:]
        rest.append(gradient)
    return [*rows, torch.stack(torch_private.norms(rest))] if rest else rows
