"""The lesson that replaces training: ranks multiply the blocks that they hold, and print what they hold and send."""

from __future__ import annotations

from textwrap import wrap

import torch
from torch import Tensor

from parallelrun.base.errors import VerificationError
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.comm import gather_json
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.models.matmul.blocks import (
    COLUMNS,
    ROWS,
    BlockOperations,
    MatrixBlock,
    as_layout,
    moves_of,
    picture,
    transposed,
)
from parallelrun.models.matmul.cuts import ProductCut, cuts
from parallelrun.models.matmul.spec import WEIGHT
from parallelrun.planner.contract.plan import Plan

WIDTH, INDENT = 100, "   "


def run(config: Config, plan: Plan, device: torch.device, show: bool) -> list[str]:
    """Compute the product and its gradients under every cut that the plan's mesh can show. Return the lines that
    describe it, of all ranks, and print them if `show` is set.

    Collective. Every rank checks its blocks against the full product. Raises VerificationError naming the ranks whose
    blocks are wrong.
    """
    mesh = build_mesh(plan, device)
    rows, inner, columns = _sizes(plan)
    lines = [f"Y = X W: X is {rows}x{inner}, W is {inner}x{columns}; dY is the gradient of Y, dX = dY W^T, dW = X^T dY"]
    wrong: list[str] = []
    for number, cut in enumerate(cuts(plan.mesh, plan.tensor.asked_form(config)), start=1):
        reports = gather_json((mesh.rank, *multiply(plan, mesh, cut)), mesh)
        lines += ["", f"{number}. {cut.title}", *wrap(cut.text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)]
        for rank, report, right in reports:
            lines += ["", f"   {_rank_title(plan, rank)}", *(f"     {line}".rstrip() for line in report)]
            wrong += [] if right else [f"rank {rank} ({cut.title})"]
        equal = all(right for _, _, right in reports)
        lines += ["", f"   {'Equal' if equal else 'NOT equal'} to X W, dX and dW computed by one rank."]
    if show:
        print("\n".join(lines), flush=True)
    if wrong:
        raise VerificationError(f"the product differs from one device's on {', '.join(wrong)}")
    return lines


def multiply(plan: Plan, mesh: Mesh, cut: ProductCut) -> tuple[list[str], bool]:
    """This rank's part of one cut: the lines that describe it, and whether all its results are right."""
    rows, inner, columns = _sizes(plan)
    x, w, dy = (matrix.to(mesh.device) for matrix in matrices(rows, inner, columns))
    blocks = BlockOperations(cut.product, {"X": x, "W": w, "Y": dy}, mesh)
    lines, results = _by_panels(blocks) if cut.product.panels else _by_gathers(blocks)
    expected = {"Y": x @ w, "dX": dy @ w.T, "dW": x.T @ dy}
    return lines, all(torch.equal(block.numbers, block.part_of(expected[block.name])) for block in results)


def matrices(rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY of small whole numbers, so that every sum is exact and can be checked by hand."""
    i, j, k = (torch.arange(size, dtype=torch.float64) for size in (rows, inner, columns))
    return (3 * i[:, None] + j) % 5 - 1, (2 * j[:, None] + k) % 7 - 3, (i[:, None] + 2 * k) % 3 - 1


def _by_gathers(blocks: BlockOperations) -> tuple[list[str], list[MatrixBlock]]:
    """Gather what the product gathers, multiply, reduce; then the same backwards."""
    product = blocks.product
    weight_moves = [(COLUMNS, axis) for axis in product.gather_w]
    x, w, dy = blocks.stored("X"), blocks.stored("W"), blocks.stored("dY")
    lines = picture(x, w)
    gathered_x, gathered_w = blocks.gather(x, moves_of(product.gather_x)), blocks.gather(w, weight_moves)
    gathers = blocks.take_messages("forward")
    lines += [*gathers, *picture(gathered_x, gathered_w)] if gathers else []
    partial = blocks.block(
        "Y", as_layout(product.y.without(product.scatter_y)), gathered_x.numbers @ gathered_w.numbers
    )
    lines += picture(partial)
    y = blocks.reduce(partial, moves_of(product.scatter_y), [product.sum_y])
    reductions = blocks.take_messages("forward")
    if reductions:
        lines += [*reductions, *picture(y, note=" summed")]
    elif not gathers:
        lines.append("forward: sends nothing")
    gradient = blocks.gather(dy, moves_of(product.scatter_y)).numbers
    dx = blocks.block("dX", as_layout(product.gathered_x), gradient @ gathered_w.numbers.T)
    dx = blocks.reduce(dx, moves_of(product.gather_x), [product.sum_x])
    dw = blocks.block("dW", transposed(product.gathered_weight), gathered_x.numbers.T @ gradient)
    dw = blocks.reduce(dw, reversed(weight_moves), product.partial_weight)
    lines += blocks.take_messages("backward") or ["backward: sends nothing"]
    if product.gather_x or product.gather_w:
        lines += picture(dx, dw)
    return lines, [y, dx, dw]


def _by_panels(blocks: BlockOperations) -> tuple[list[str], list[MatrixBlock]]:
    """SUMMA: Y is summed panel by panel; so are the gradients of X and W, on the ranks that have them."""
    product = blocks.product
    x, w, dy = blocks.stored("X"), blocks.stored("W"), blocks.stored("dY")
    lines = picture(x, w)
    backward: list[str] = []
    y, dx, dw = (torch.zeros_like(block.numbers) for block in (dy, x, w))
    for step in range(blocks.num_panels):
        panel_x, panel_w = blocks.panel(x, COLUMNS, step), blocks.panel(w, ROWS, step)
        y += panel_x.numbers @ panel_w.numbers
        shown = blocks.block("Y", as_layout(product.y), y)
        lines += [*blocks.take_messages(f"step {step}"), *picture(panel_x, panel_w, shown, note=f" after step {step}")]
        dx = blocks.reduce_panel("dX", COLUMNS, step, dy.numbers @ panel_w.numbers.T, dx)
        dw = blocks.reduce_panel("dW", ROWS, step, panel_x.numbers.T @ dy.numbers, dw)
        backward += blocks.take_messages("backward")  # a training broadcasts the panels again
    results = [blocks.block("dX", as_layout(product.x), dx), blocks.block("dW", transposed(product.weight), dw)]
    results[1] = blocks.reduce(results[1], [], product.partial_weight)
    lines += [*backward, *blocks.take_messages("backward"), *picture(*results)]
    return lines, [shown, *results]


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """rows, inner, columns."""
    columns, inner = plan.spec.parameters[WEIGHT].shape
    return plan.spec.sample_shape[0], inner, columns


def _rank_title(plan: Plan, rank: int) -> str:
    coordinate = plan.mesh.coordinate(rank)
    axes = [f"{axis} {coordinate[axis]}" for axis in plan.mesh.mesh_dim_names if plan.mesh.size(axis) > 1]
    return f"rank {rank}" + (f" ({', '.join(axes)})" if axes else "")
