"""What a request for a grid tensor way can have wrong, each with the nearest legal values. Torch-free."""

from __future__ import annotations

from math import prod

from parallelrun.errors import Problem
from parallelrun.plan.ways import Request
from parallelrun.precision import BYTES, TABLE

from . import axes, choose


def arranged(request: Request) -> dict[str, int] | None:
    """Degree of every tensor axis; None where the grid is unreadable or does not make tp."""
    tensor = request.config.strategy.tensor
    try:
        grid = axes.read_grid(tensor.grid)
    except ValueError:
        return None
    return axes.arrange(tensor.kind, request.tp, grid, tensor.depth)


def asked_form(request: Request) -> str:
    """`strategy.tensor.form`; 3d has one form only."""
    tensor = request.config.strategy.tensor
    return "auto" if tensor.kind == "3d" else tensor.form


def choice(request: Request, sizes: dict[str, int] | None = None) -> choose.Choice:
    """What the forms depend on."""
    tensor, precision = request.config.strategy.tensor, TABLE[request.config.precision.name]
    sizes = sizes or arranged(request)
    assert sizes, "checked before"
    samples = request.batch.micro_batch if request.batch else 0
    return choose.Choice(
        kind=tensor.kind,
        asked=asked_form(request),
        sizes=sizes,
        positions=max(1, samples) * prod(request.spec.boundary_shape[:-1]),
        samples=samples,
        save_gathered=tensor.save_gathered,
        compute=BYTES[precision.compute],
        reduce=BYTES[precision.reduce],
    )


def check(request: Request) -> list[Problem]:
    """All violations."""
    if request.tp == 1:
        return []
    sizes = arranged(request)
    if sizes is None:
        what = f"tp={request.tp} is no {axes.LETTERS[request.config.strategy.tensor.kind]}"
        return [Problem(what, "tp", "tp=4 or tp=8", kind="arithmetic")]
    return []
