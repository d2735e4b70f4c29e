"""From the data way's gradients to the final ones: partial axes, tied copies, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from parallelrun import comm, torch_private
from parallelrun.mesh.runtime import EMBEDDING, Group, Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.parameters import LocalParameter, owns

EPSILON = 1e-6
# fp32 sums over longer rows lose digits on CPU (3.5e-5 at 30 million elements); rows this long keep 7 of them.
ROW = 4096


def finalise(parameters: Sequence[LocalParameter], plan: Plan, mesh: Mesh) -> None:
    """Sum what backward left in parts: gradients partial over an axis, then the two copies of tied weights.

    One flattened all-reduce per set of partial axes and one for all tied weights, in place. Only where the gradient is
    final may it be measured and clipped.
    """
    for axes in sorted({p.layout.partial for p in parameters} - {()}):
        tensors = [_gradient(p) for p in parameters if p.layout.partial == axes]
        for axis in axes:
            _sum_together(tensors, mesh.group(axis), "partial")
    tied = {name for pair in plan.tied_copies for name in pair}
    _sum_together([_gradient(p) for p in parameters if p.name in tied], mesh.group(EMBEDDING), "tied")


def norm_contribution(parameters: Sequence[LocalParameter], plan: Plan, mesh: Mesh) -> Tensor:
    """This rank's share of the squared global gradient norm: fp64, 0-d, on the gradients' device.

    Each logical element is counted once over the world: by the owner of its part, and by the original of a tied pair.
    The sum over the world is not finite exactly if some gradient element is not (or its square sum overflows fp32).
    """
    owned = {layout: owns(layout, plan.mesh, mesh.coordinate) for layout in {p.layout for p in parameters}}
    counted = [p for p in parameters if not p.shared and owned[p.layout]]
    held = [_gradient(p) for p in counted]
    norms = [norm for gradient in held if gradient.numel() > ROW for norm in _row_norms(gradient)]
    small = [gradient for gradient in held if gradient.numel() <= ROW]
    if small:
        norms.append(get_total_norm(small, foreach=True).view(1))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    return torch.cat(norms).to(torch.float64).square().sum()


def clip(parameters: Sequence[LocalParameter], norm: float, max_norm: float, scale: float = 1.0) -> float:
    """Divide the gradients by the loss scale and clip them to `max_norm` (0: no clipping); return the coefficient.

    norm: the global norm of the unscaled gradients. min(1, max_norm / (norm + 1e-6)) is the same number on every rank
    and under every plan, as norm is.
    """
    coefficient = min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
    if coefficient / scale != 1.0:
        torch_private.multiply([_gradient(p) for p in parameters], coefficient / scale)
    return coefficient


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.tensor.grad
    assert gradient is not None, f"the data way left no gradient for {parameter.name}"
    return gradient


def _sum_together(tensors: list[Tensor], group: Group, purpose: str) -> None:
    """All-reduce `tensors` in place as one flat buffer."""
    if group.size == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    comm.all_reduce(flat, group, purpose)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def _row_norms(gradient: Tensor) -> list[Tensor]:
    """1-d tensors of the norms of rows of `gradient`, and of the rest."""
    flat = gradient.flatten()
    whole = flat.numel() // ROW * ROW
    return [
        torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1),
        torch.linalg.vector_norm(flat[whole:]).view(1),
    ]
