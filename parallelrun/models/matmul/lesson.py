"""`parallelrun model=matmul`: every rank multiplies the blocks it holds, really sends what must be sent, and shows it.

parallelrun model=matmul strategy=ddp dp=2
parallelrun model=matmul strategy=tp tp=2
parallelrun model=matmul layout=2d tp=4
"""

from __future__ import annotations

from textwrap import wrap

import torch
import torch.distributed as dist

from parallelrun import comm
from parallelrun.errors import VerificationError
from parallelrun.mesh import Mesh
from parallelrun.models.matmul.blocks import Block, Matrices
from parallelrun.models.matmul.cuts import Cut, cuts, matrix_dy, matrix_w, matrix_x
from parallelrun.models.matmul.spec import WEIGHT
from parallelrun.plan.structure import Plan

WIDTH, INDENT = 100, "   "


def run(plan: Plan, mesh: Mesh, show: bool = False, form: str = "auto") -> list[str]:
    """Compute the product and its gradients under every cut that the plan's mesh can show; return rank 0's lines.

    Collective. Every rank checks its blocks against the whole product; with `show` rank 0 prints. Raises
    VerificationError naming the ranks whose blocks are wrong.
    """
    lines = [
        f"Y = X W: X is {'x'.join(map(str, plan.spec.sample_shape))}, W is {_sizes(plan)[1]}x{_sizes(plan)[2]}; "
        f"dY is the gradient of Y, dX = dY W^T, dW = X^T dY"
    ]
    wrong: list[str] = []
    for number, cut in enumerate(cuts(plan.mesh, plan.tensor.kind, form), start=1):
        told, is_right = multiply(plan, mesh, cut)
        reports = _gather((mesh.rank, told, is_right), mesh)
        lines += ["", f"{number}. {cut.title}", *wrap(cut.says, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)]
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
    blocks = Matrices(cut.product, {"X": whole_x, "W": whole_w.T, "Y": whole_dy}, plan.mesh, mesh)
    lines, results = _by_panels(blocks) if cut.product.panels else _by_gathers(blocks)
    expected = {"Y": whole_x @ whole_w, "dX": whole_dy @ whole_w.T, "dW": (whole_x.T @ whole_dy).T}
    return lines, all(torch.equal(block.numbers, block.part_of(expected[name])) for name, block in results.items())


def _by_gathers(blocks: Matrices) -> tuple[list[str], dict[str, Block]]:
    """Gather what the product gathers, multiply, sum and deal out; then the same backwards."""
    product = blocks.product
    x, w, dy = blocks.held("X"), blocks.held("W"), blocks.held("Y", "dY")
    lines = blocks.show(x, w)
    moves: list[str] = []
    whole_x, whole_w = blocks.gather(x, product.gather_x, moves), blocks.gather_rows(w, product.gather_w, moves)
    if moves:
        lines += [*(f"forward: {line}" for line in moves), *blocks.show(whole_x, whole_w)]
    partial = blocks.named("Y", product.y.without(product.scatter_y), whole_x.numbers @ whole_w.numbers.T)
    lines += blocks.show(partial)
    summed: list[str] = []
    y = blocks.scatter(partial, product.scatter_y, product.sum_y, summed)
    if summed:
        lines += [*(f"forward: {line}" for line in summed), *blocks.show(y, note=" summed")]
    elif not moves:
        lines.append("forward: sends nothing")
    backward: list[str] = []
    grad = blocks.gather(dy, product.scatter_y, backward)
    dx = blocks.named("dX", product.gathered_x, grad.numbers @ whole_w.numbers)
    dx = blocks.scatter(dx, product.gather_x, product.sum_x, backward)
    dw = blocks.weight_gradient(grad.numbers.T @ whole_x.numbers, backward)
    lines += [f"backward: {line}" for line in backward or ["sends nothing"]]
    if product.gather_x or product.gather_w:
        lines += blocks.show(dx, dw)
    return lines, {"Y": y, "dX": dx, "dW": dw}


def _by_panels(blocks: Matrices) -> tuple[list[str], dict[str, Block]]:
    """SUMMA: Y is added up panel by panel; the gradients of X and W are summed, panel by panel, where they lie."""
    x, w, dy = blocks.held("X"), blocks.held("W"), blocks.held("Y", "dY")
    lines = blocks.show(x, w)
    y = blocks.named("Y", blocks.product.y, torch.zeros_like(dy.numbers))
    dx, dw = (torch.zeros_like(block.numbers) for block in (x, w))
    for step in range(blocks.num_panels):
        moves: list[str] = []
        panel_x, panel_w = blocks.panel(x, step, moves), blocks.panel(w, step, moves)
        y = blocks.named("Y", blocks.product.y, y.numbers + panel_x.numbers @ panel_w.numbers.T)
        lines += [f"step {step}: {line}" for line in moves]
        lines += blocks.show(panel_x, panel_w, y, note=f" after step {step}")
    backward: list[str] = []
    for step in range(blocks.num_panels):
        panel_x, panel_w = blocks.panel(x, step, []), blocks.panel(w, step, [])
        dx = blocks.reduce_panel("dX", dy.numbers @ panel_w.numbers, step, dx, backward)
        dw = blocks.reduce_panel("dW", dy.numbers.T @ panel_x.numbers, step, dw, backward)
    results = {"Y": y, "dX": blocks.named("dX", blocks.product.x, dx), "dW": blocks.sum_copies(dw, backward)}
    lines += [f"backward: {line}" for line in backward]
    return lines + blocks.show(results["dX"], results["dW"]), results


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """rows, inner, columns."""
    columns, inner = plan.spec.parameters[WEIGHT].shape
    return plan.spec.sample_shape[0], inner, columns


def _place(plan: Plan, rank: int) -> str:
    coordinate = plan.mesh.coordinate(rank)
    axes = [f"{axis} {coordinate[axis]}" for axis in plan.mesh.mesh_dim_names if plan.mesh.size(axis) > 1]
    return f"rank {rank}" + (f" ({', '.join(axes)})" if axes else "")


def _gather(report: tuple[int, list[str], bool], mesh: Mesh) -> list[tuple[int, list[str], bool]]:
    """Every rank's report, by rank, on every rank."""
    if mesh.shape.num_ranks == 1:
        return [report]
    reports: list = [None] * mesh.shape.num_ranks
    with comm.label("world", "control"):
        dist.all_gather_object(reports, report)
    return reports
