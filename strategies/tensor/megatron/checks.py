"""Checks of a request for Megatron's strategy: layer roles, and sizes and sequences that tp must divide."""

from __future__ import annotations

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.models.moe.spec import has_own_router, inside_dim
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE, LayerSpec, ModelSpec

from ..common import checks as common

SPLIT_ROLES = ("column_parallel", "row_parallel", "embedding", "head")


def check(request: Request, wanted: bool) -> list[Problem]:
    """Heads, kv heads, widths and, under sequence parallelism, the sequence must divide; the vocabulary need not.

    wanted: the user asks for sequence parallelism.
    """
    if request.tp == 1:
        return []
    problems = [*_roles(request), *_sequence(request.spec, request.tp, wanted)]
    misfits = _misfits(request.spec, request.tp)
    if not misfits:
        return problems
    key, size, _ = misfits[0]  # a legal tp divides it; kv heads may be fewer than tp, which then divides the heads
    possible = divisors(request.spec.heads if key == "model.kv_heads" else size)
    legal = [tp for tp in possible if tp < 4 * request.tp and _fits(request.spec, tp, wanted)]
    fix = either("tp", nearest(request.tp, legal))
    for key, size, message in misfits:
        legal_sizes = nearest(size, _legal_sizes(key, size, request.spec, request.tp))
        sizes = f" or {either(key, legal_sizes)}" if legal_sizes else ""
        problems.append(Problem(message, "tp", fix + sizes, kind="arithmetic"))
    return problems


def is_legal(request: Request, wanted: bool) -> bool:
    """Return whether `check` finds nothing."""
    if request.tp == 1:
        return True
    misfits = _misfits(request.spec, request.tp)
    return not (misfits or _roles(request) or _sequence(request.spec, request.tp, wanted))


def _roles(request: Request) -> list[Problem]:
    """There must be something to split, and nothing with weights may stand where activations are split."""
    spec, tp = request.spec, request.tp
    layers = list(spec.layers())
    if not any(layer.layer_role in SPLIT_ROLES for layer in layers):
        possible = [x for x in layers if not x.layer_role and "column_parallel" in x.possible_roles]
        name = next((layer.name for layer in [*possible, *layers] if possible or layer.parameters), spec.name)
        message = f"layer {name} has no layer role, so tp={tp} has nothing to split"
        return [common.wrong_role(message, request, name, "column_parallel")]
    column: LayerSpec | None = None  # whose output is split here
    for layer in layers:
        role = layer.layer_role
        of_channels = role == SAMPLE_SET_ROLE and layer.name in spec.pair_of
        # of what is here, or of a column's input
        if role in ("per_head", "attention", "adapter") or layer.spans_heads or of_channels:
            continue
        if column and layer.parameters and role not in ("row_parallel", "column_parallel"):  # q, k, v are side by side
            opener = column.name
            message = f"layer {layer.name} reads what {opener} has split over tp={tp}: only a row_parallel layer may"
            return [common.wrong_role(message, request, layer.name, "row_parallel")]
        column = layer if role == "column_parallel" else None if role == "row_parallel" else column
    return []


def _sequence(spec: ModelSpec, tp: int, wanted: bool) -> list[Problem]:
    """Sequence parallel cuts the sequence evenly, so there must be one."""
    key = "strategy.tensor.sequence_parallel"
    if not wanted:
        return []
    if spec.kind != "tokens" or not spec.seq:
        message = f"sequence_parallel=true: {spec.name} has no sequence to cut"
        return [Problem(message, key, f"{key}=false", kind="undefined")]
    if spec.seq % tp == 0:
        return []
    message = f"model.seq={spec.seq} is not divisible by tp={tp}, and sequence_parallel cuts it evenly"
    fix = f"{either('model.seq', common.multiples(spec.seq, tp))} or {key}=false"
    return [Problem(message, "tp", fix, kind="arithmetic")]


def _misfits(spec: ModelSpec, tp: int) -> list[tuple[str, int, str]]:
    """(key of the size, the size, what is wrong) for everything that tp does not divide.

    Where no row layer follows, as in the matmul lesson, uneven columns are as good as even ones.
    """
    misfits = []
    if spec.heads % tp:
        misfits.append(("model.heads", spec.heads, f"model.heads={spec.heads} is not divisible by tp={tp}"))
    elif spec.kv_heads and spec.kv_heads % tp and tp % spec.kv_heads:
        message = f"model.kv_heads={spec.kv_heads} is not divisible by tp={tp}, nor tp by it (each held by some ranks)"
        misfits.append(("model.kv_heads", spec.kv_heads, message))
    if spec.ffn and spec.ffn % tp:
        misfits.append(("model.ffn", spec.ffn, f"model.ffn={spec.ffn} is not divisible by tp={tp}"))
    expert = next((layer.parameters[0] for layer in spec.layers() if layer.layer_role == "expert"), None)  # all alike
    width = expert.shape[inside_dim(expert)] if expert and not has_own_router(spec) else spec.ffn
    if width % tp and width != spec.ffn:
        message = f"model.expert_ffn={width} is not divisible by tp={tp}: it cuts the inside of every expert"
        misfits.append(("model.expert_ffn", width, message))
    if not spec.heads and any(layer.layer_role == "row_parallel" for layer in spec.layers()):
        first = {size: layer for layer in reversed(list(spec.layers())) for size in _widths(layer)}
        misfits += [
            (layer.name, size, f"layer {layer.name}: {size} {_parts(layer)} are not divisible by tp={tp}")
            for size, layer in reversed(first.items())
            if size % tp and size != spec.ffn
        ]
    return misfits


def _legal_sizes(key: str, size: int, spec: ModelSpec, tp: int) -> list[int]:
    """Values of the size at `key` that tp divides, as far as the rest of the model allows them."""
    if key == "model.kv_heads":
        return [kv_heads for kv_heads in divisors(spec.heads) if kv_heads % tp == 0 or tp % kv_heads == 0]
    return common.legal_sizes(key, size, tp, spec)


def _widths(layer: LayerSpec) -> list[int]:
    """The sizes of a layer that are cut evenly."""
    if layer.layer_role == "row_parallel":
        return [layer.in_features]
    if layer.layer_role == "column_parallel":
        return [parameter.shape[0] for parameter in layer.parameters]
    return []


def _parts(layer: LayerSpec) -> str:
    return "channels" if layer.areas else "features"


def _fits(spec: ModelSpec, tp: int, sequence_parallel: bool) -> bool:
    return not _misfits(spec, tp) and not (sequence_parallel and spec.seq % tp)
