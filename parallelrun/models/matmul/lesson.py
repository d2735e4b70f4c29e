"""`parallelrun model=matmul`: every rank multiplies the blocks it holds, really sends what must be sent, and shows it.

parallelrun model=matmul strategy=ddp dp=2
parallelrun model=matmul strategy=tp tp=2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import comm
from parallelrun.errors import VerificationError
from parallelrun.mesh.runtime import Mesh
from parallelrun.models.matmul.cuts import Cut, cuts, matrix_dy, matrix_w, matrix_x, side_by_side
from parallelrun.models.matmul.spec import WEIGHT
from parallelrun.plan.structure import Plan

PURPOSE = "lesson"
Ranges = tuple[tuple[int, int], ...]


def run(plan: Plan, mesh: Mesh, show: bool = False) -> list[str]:
    """Compute the product and its gradients under every cut that the plan's mesh can show; return rank 0's lines.

    Collective. Every rank checks its blocks against the whole product; with `show` rank 0 prints. Raises
    VerificationError naming the ranks whose blocks are wrong.
    """
    lines = [
        f"Y = X W: X is {'x'.join(map(str, plan.spec.sample_shape))}, W is {_sizes(plan)[1]}x{_sizes(plan)[2]}; "
        f"dY is the gradient of Y, dX = dY W^T, dW = X^T dY"
    ]
    wrong: list[str] = []
    for number, cut in enumerate(cuts(plan.mesh), start=1):
        told, is_right = multiply(plan, mesh, cut)
        reports = _gather((mesh.rank, told, is_right), mesh)
        lines += ["", f"{number}. {cut.title}", f"   {cut.says}"]
        for rank, report, right in reports:
            lines += ["", f"   {_place(plan, rank)}", *(f"     {line}".rstrip() for line in report)]
            wrong += [] if right else [f"rank {rank} ({cut.title})"]
        equal = all(right for _, _, right in reports)
        lines += ["", f"   {'Equal' if equal else 'NOT equal'} to X W, dX and dW computed by one rank."]
    if show:
        print("\n".join(lines), flush=True)
    if wrong:
        raise VerificationError(f"the product differs from one device's on {', '.join(wrong)}")
    return lines


def multiply(plan: Plan, mesh: Mesh, cut: Cut) -> tuple[list[str], bool]:
    """This rank's part of one cut: the lines that tell it, and whether all it computed is right."""
    rows, inner, columns = _sizes(plan)
    whole_x, whole_w, whole_dy = (
        torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
        for numbers in (matrix_x(rows, inner), matrix_w(inner, columns), matrix_dy(rows, columns))
    )
    ranges = {
        "X": cut.x.ranges((rows, inner), plan.mesh.sizes, mesh.coordinate),
        "W": cut.w.ranges((inner, columns), plan.mesh.sizes, mesh.coordinate),
        "Y": cut.y.ranges((rows, columns), plan.mesh.sizes, mesh.coordinate),
    }
    x, w, dy = _part(whole_x, ranges["X"]), _part(whole_w, ranges["W"]), _part(whole_dy, ranges["Y"])
    y, dx, dw = x @ w, dy @ w.T, x.T @ dy
    results = {"Y": y, "dX": dx, "dW": dw}
    lines = side_by_side({name: (ranges[name], block.tolist()) for name, block in (("X", x), ("W", w), ("Y", y))})
    for phase, sums in (("forward", cut.forward), ("backward", cut.backward)):
        lines += [f"{phase}: {line}" for line in _send(results, sums, mesh)]
    if cut.forward:
        lines += side_by_side({"Y summed": (ranges["Y"], y.tolist())})
    expected = {"Y": whole_x @ whole_w, "dX": whole_dy @ whole_w.T, "dW": whole_x.T @ whole_dy}
    held = {"Y": ranges["Y"], "dX": ranges["X"], "dW": ranges["W"]}
    return lines, all(torch.equal(results[name], _part(expected[name], held[name])) for name in results)


def _send(results: dict[str, Tensor], sums: tuple[tuple[str, str], ...], mesh: Mesh) -> list[str]:
    """All-reduce each named partial result over its axis, in place; say what was sent."""
    lines = []
    for name, axis in sums:
        block, group = results[name], mesh.group(axis)
        comm.all_reduce(block, group, PURPOSE)
        size = f"{block.size(0)}x{block.size(1)} = {block.numel()} numbers"
        lines.append(f"all-reduce of the partial {name} ({size}) over {axis}, with ranks {list(group.ranks)}")
    return lines or ["sends nothing"]


def _part(whole: Tensor, ranges: Ranges) -> Tensor:
    return whole[tuple(slice(*pair) for pair in ranges)].contiguous()


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """rows, inner, columns."""
    columns, inner = plan.spec.parameters[WEIGHT].shape
    return plan.spec.sample_shape[0], inner, columns


def _place(plan: Plan, rank: int) -> str:
    place = plan.mesh.coordinate(rank)
    axes = [f"{axis} {place[axis]}" for axis in ("dp", "tp") if plan.mesh.size(axis) > 1]
    return f"rank {rank}" + (f" ({', '.join(axes)})" if axes else "")


def _gather(report: tuple[int, list[str], bool], mesh: Mesh) -> list[tuple[int, list[str], bool]]:
    """Every rank's report, by rank, on every rank."""
    if mesh.shape.num_ranks == 1:
        return [report]
    reports: list = [None] * mesh.shape.num_ranks
    with comm.label("world", "control"):
        dist.all_gather_object(reports, report)
    return reports
