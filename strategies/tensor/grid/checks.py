"""What a request for a grid tensor strategy can have wrong, each with the nearest legal values. Torch-free.

Whether tp ranks form a grid at all is checked in `shape`; here: layer roles, sizes and samples that do not divide, and
settings that exclude each other.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

from parallelrun import definitions
from parallelrun.errors import Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.plan.load import splits_backward
from parallelrun.plan.request import Request
from parallelrun.precision import BYTES, TABLE
from parallelrun.wording import divisors, either, nearest

from ..common import roles
from . import choose, shape
from .choose import Misfit, boundary_layout, degree
from .keys import GridConfig

# roles of layers that may have parameters
ROLES = ("column_parallel", "row_parallel", "linear", "embedding", "position_embedding", "norm", "head")


def asked_form(request: Request) -> str:
    """`strategy.tensor.form`; 3d has one form only."""
    tensor = GridConfig.of(request.config)
    return "auto" if tensor.kind == "3d" else tensor.form


def choice(request: Request) -> choose.Choice:
    """What the forms depend on, for a tp that can be laid out."""
    tensor, precision = GridConfig.of(request.config), TABLE[request.config.precision.name]
    sizes = shape.arranged(request)
    assert sizes, "checked before"
    samples = request.batch.micro_batch if request.batch else 0
    return choose.Choice(
        kind=tensor.kind,
        asked=asked_form(request),
        sizes=sizes,
        num_rows=max(1, samples) * prod(request.spec.boundary_shape[:-1]),
        samples=samples,
        save_gathered=tensor.save_gathered,
        compute=BYTES[precision.compute],
        reduce=BYTES[precision.reduce],
    )


def sample_parts(request: Request) -> int:
    """Into how many parts the samples of a microbatch are cut: the axes of rows, at their most, in any layer."""
    if definitions.model(request.config).is_lesson or shape.arranged(request) is None:
        return 1
    asked = choice(replace(request, batch=None))
    parts = degree(boundary_layout(asked.sizes).rows, asked.sizes)
    for pairs in choose.distinct(request.spec).values():
        needed = [choose.sample_parts(forms, asked) for forms in choose.legal(pairs, asked, request.spec)]
        parts = lcm(parts, min(needed, default=1))
    return parts


def check(request: Request) -> list[Problem]:
    """All violations."""
    problems = _together(request) + _summa(request)
    lesson = definitions.model(request.config).is_lesson
    if request.tp > 1 and request.spec.experts:
        return [*problems, _experts(request)]
    if request.tp > 1 and not lesson:
        problems += _roles(request.spec, request)
    sizes = shape.arranged(request)
    if sizes is None:
        return [*problems, *shape.check(request, _fits(request))]
    if request.tp == 1 or lesson:
        return problems
    return problems + _indivisible(request, sizes) + _samples(request, sizes)


def _fits(request: Request) -> shape.Fits:
    """Would the model's sizes divide on the grid of another request, and the form that is asked for do there?"""
    standing = _summa(request)
    return lambda other: not _misfits(other) and (bool(standing) or not _summa(other))


def _misfits(request: Request) -> list[Misfit]:
    """What of the model's sizes does not divide, in the forms where least does not."""
    asked = choice(replace(request, batch=None))
    features = request.spec.boundary_shape[-1]
    parts = degree(boundary_layout(asked.sizes).features, asked.sizes)
    found = [Misfit(choose.size_key(features, "the model", request.spec), features, parts)]
    for pairs in choose.distinct(request.spec).values():
        found += choose.fewest_misfits(pairs, asked, request.spec)
    found += choose.linear_misfits(asked, request.spec)
    return [misfit for misfit in dict.fromkeys(found) if misfit.size % misfit.parts]


def _together(request: Request) -> list[Problem]:
    """What backward in two halves rules out: nodes that do more than one product, or that gather again for both."""
    tensor, pipeline = GridConfig.of(request.config), request.config.strategy.pipeline.kind
    if request.tp == 1 or not splits_backward(request):
        return []
    problems = []
    if not tensor.save_gathered:
        key = "strategy.tensor.save_gathered"
        what = f"{key}=false under {pipeline}: both halves of its backward would gather again"
        problems.append(Problem(what, key, f"{key}=true or schedule=1f1b", kind="undefined"))
    if asked_form(request) == "summa":
        what = f"strategy.tensor.form=summa under {pipeline}: its panels cannot be cut into two halves of backward"
        fix = "strategy.tensor.form=auto or schedule=1f1b"
        problems.append(Problem(what, "strategy.tensor.form", fix, kind="undefined"))
    return problems


def _roles(spec: ModelSpec, request: Request) -> list[Problem]:
    """Samples and features are split everywhere, so every layer with parameters must be one that knows how."""
    where = f"tp={request.tp} of kind {request.config.strategy.tensor.kind}"

    def refuse(name: str, role: str, why: str) -> list[Problem]:
        layer = next((layer for layer in spec.layers() if layer.name == name), None)
        possible = layer is not None and roles.fits(layer, role)
        fix = f"{roles.suggestion(request.config, name, role)} or tp=1" if possible else "tp=1"
        return [Problem(f"layer {name} {why}", "model.roles", fix, kind="undefined")]

    for layer in spec.layers():
        if layer.parameters and layer.layer_role not in ROLES:
            role = next(iter(layer.possible_roles), "column_parallel")
            return refuse(layer.name, role, f"has no layer role, and {where} splits what every layer reads")
    for pair in spec.pairs:
        reader = next((layer for layer in pair.inside if layer.parameters), None)
        if reader:
            opener = pair.columns[0].name
            return refuse(
                reader.name,
                "row_parallel",
                f"reads what {opener} has split over {where}: only a row_parallel layer may",
            )
    last = [layer for layer in spec.blocks[-1].layers if layer.parameters or layer.tied]
    if not last or last[-1].layer_role != "head":
        name = last[-1].name if last else spec.blocks[-1].name
        return refuse(name, "head", f"gives the logits, and {where} splits them: it must have the layer role head")
    return []


def _experts(request: Request) -> Problem:
    """Routing groups are whole samples of whole rows; here samples and features are both cut, so that every expert's
    product would be one of a grid, of rows whose number differs from step to step."""
    kind = request.config.strategy.tensor.kind
    what = (
        f"{request.spec.name} has experts, and layout {kind} cuts samples and features of what they read: products of "
        "experts over a grid are not built"
    )
    return Problem(what, "layout", "layout=1d", kind="not_built")


def _summa(request: Request) -> list[Problem]:
    """Panels go round a square; other grids gather."""
    grid = shape.asked_grid(request)
    if asked_form(request) != "summa" or grid is None or grid[0] == grid[1]:
        return []
    key = "strategy.tensor.form"
    what = f"{key}=summa on a grid of {grid[0]}x{grid[1]}: panels of one width need a square grid"
    return [Problem(what, key, f"{key}=stationary_y or {key}=auto", kind="undefined")]


def _indivisible(request: Request, sizes: dict[str, int]) -> list[Problem]:
    """One problem per size, with the nearest tp and the nearest sizes that fit."""
    misfits = _misfits(request)
    if not misfits:
        return []
    parts: dict[tuple[str, int], int] = {}
    for misfit in misfits:
        place = (misfit.key, misfit.size)
        parts[place] = lcm(parts.get(place, 1), misfit.parts)
    legal = shape.nearest_tp(request, _fits(request))
    problems = []
    for (key, size), count in parts.items():
        told = f"{key}={size} does not" if key.startswith("model.") else f"layer {key}: {size} features do not"
        what = f"{told} divide by {count} ({shape.shown(sizes)})"
        copies = key == "model.kv_heads" and size != request.spec.heads and count % size == 0
        fixes = [either("tp", legal), either(key, nearest(size, _legal_sizes(key, size, count, request.spec)))]
        fixes += ["" if legal else shape.grid_fix(request, _fits(request)) or "layout=1d"]
        if asked_form(request) != "auto":
            fixes.append("strategy.tensor.form=auto")
        if copies:
            what += "; copies of kv heads are built for layout=1d only"
        kind = "not_built" if copies else "arithmetic"
        problems.append(Problem(what, "tp", " or ".join(filter(None, fixes)), kind=kind))
    return problems


def _legal_sizes(key: str, size: int, parts: int, spec: ModelSpec) -> list[int]:
    """Values of the size at `key` that divide by `parts`, as far as the rest of the model allows them."""
    if key == "model.heads":
        groups = spec.kv_heads if spec.kv_heads != spec.heads else 1  # as many as heads: they follow
        return [heads for heads in divisors(spec.hidden) if heads % parts == 0 and heads % groups == 0]
    if key == "model.kv_heads":
        return [heads for heads in divisors(spec.heads) if heads % parts == 0]
    if not key.startswith("model."):
        return []
    step = lcm(parts, spec.heads or 1) if key == "model.hidden" else parts
    return [n for n in (size // step * step, size // step * step + step) if n > 0]


def _samples(request: Request, sizes: dict[str, int]) -> list[Problem]:
    """Whole samples are split: micro_batch must divide."""
    batch, parts, config = request.batch, sample_parts(request), request.config
    if batch is None or batch.micro_batch % parts == 0:
        return []
    replica = batch.replica_batch
    cut = f"{parts} parts ({shape.shown(sizes)}): only whole samples are split"
    what = f"micro_batch={batch.micro_batch} does not divide into {cut}"
    where = next((key for key in ("micro_batch", "microbatches") if getattr(config, key) is not None), "global_batch")
    fixes = []
    if where == "micro_batch":
        legal = [n for n in divisors(replica) if n % parts == 0] or [parts]
        fixes.append(either("micro_batch", nearest(batch.micro_batch, legal)))
    elif where == "microbatches":
        legal = [n for n in divisors(replica) if replica // n % parts == 0]
        fixes.append(either("microbatches", nearest(batch.microbatches, legal)))
    step = request.dp * parts * (batch.microbatches if where == "microbatches" else request.pp)
    below = batch.global_batch // step * step
    batches = [n for n in (below, below + step) if n > 0]
    key, scale = ("local_batch", request.dp) if config.local_batch is not None else ("global_batch", 1)
    fixes.append(either(key, [n // scale for n in batches]))
    return [Problem(what, where, " or ".join(filter(None, fixes)), kind="arithmetic")]
