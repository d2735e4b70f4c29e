"""What Megatron's tensor strategy will do: checks, layouts, collectives, memory. Torch-free.

Source: Shoeybi et al. 2019 (columns then rows, split vocabulary), Korthikanti et al. 2022 (sequence parallel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallelrun.config.schema import Config, TensorStrategyConfig
from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import BlockSpec, LayerSpec, ModelSpec, ParameterSpec
from parallelrun.models.moe.spec import inside_dim
from parallelrun.plan.messages import Explanation
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import Collective, Plan
from parallelrun.plan.tensor_strategy import LayerBackward, LayoutChoice, MeshDims, TensorStrategy
from parallelrun.wording import divisors, either, nearest

from ..common import roles
from ..common.traffic import explanation
from . import layouts, memory, traffic
from .layouts import AXIS, COPY_AXIS, KV_AXIS

if TYPE_CHECKING:
    from typing_extensions import Self

SPLIT_ROLES = ("column_parallel", "row_parallel", "embedding", "head")


@dataclass(frozen=True)
class Megatron1D(TensorStrategy):
    """Column-parallel layers followed by row-parallel ones, over one axis (layout 1d)."""

    kind: ClassVar[str] = "megatron"
    layout_name: ClassVar[str] = "1d"
    reads: ClassVar[tuple[str, ...]] = ("sequence_parallel", "overlap")
    is_one_dimensional: ClassVar[bool] = True
    splits_images: ClassVar[bool] = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """Heads, kv heads, widths and, under sequence parallel, the sequence must divide; the vocabulary need not."""
        if request.tp == 1:
            return []
        wanted = request.config.strategy.tensor.sequence_parallel
        problems = [*_roles(request.spec, request.config, request.tp), *_sequence(request.spec, request.tp, wanted)]
        misfits = _misfits(request.spec, request.tp)
        if not misfits:
            return problems
        legal = [tp for tp in range(1, 4 * request.tp) if _fits(request.spec, tp, wanted)]
        fix = either("tp", nearest(request.tp, legal))
        for key, size, what in misfits:
            legal_sizes = nearest(size, _legal_sizes(key, size, request.spec, request.tp))
            sizes = f" or {either(key, legal_sizes)}" if legal_sizes else ""
            problems.append(Problem(what, "tp", fix + sizes, kind="arithmetic"))
        return problems

    @classmethod
    def resolve(cls, request: Request) -> Self:
        """Sequence parallel needs several ranks to split the sequence over."""
        asked, kv_heads = request.config.strategy.tensor, request.spec.kv_heads
        return cls(
            sequence_parallel=asked.sequence_parallel and request.tp > 1,
            overlap=asked.overlap,
            kv_copies=request.tp // kv_heads if kv_heads and request.tp > kv_heads else 1,
        )

    @classmethod
    def mesh_dims(cls, request: Request) -> MeshDims:
        """One mesh dim, `tp`; with more ranks than kv heads, one for the kv heads and one for their copies."""
        kv_heads = request.spec.kv_heads
        if not 0 < kv_heads < request.tp:
            return ((AXIS, request.tp),), ()
        return ((KV_AXIS, kv_heads), (COPY_AXIS, request.tp // kv_heads)), ((AXIS, (KV_AXIS, COPY_AXIS)),)

    @classmethod
    def vocab_degrees(cls, request: Request) -> tuple[int, ...]:
        """All of tp."""
        return tuple(degree for _, degree in cls.mesh_dims(request)[0])

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """Without and with sequence parallelism."""
        sequence = TensorStrategyConfig(cls.kind, sequence_parallel=True)
        return [LayoutChoice("1d", TensorStrategyConfig(cls.kind)), LayoutChoice("1d sequence", sequence, "1d")]

    def label(self, plan: Plan) -> str:
        """`1d` or `1d sequence`."""
        return "1d sequence" if self.sequence_parallel else "1d"

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """See `layouts`."""
        return layouts.layout(parameter, plan)

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """Under sequence parallelism only a slice of the sequence."""
        first, *rest = plan.spec.boundary_shape
        parts = plan.mesh.size(AXIS) if self.sequence_parallel else 1
        return (plan.batch.micro_batch, first // parts, *rest)

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Of the rank that saves most. See `memory`."""
        return memory.saved_bytes(block, plan)

    def layer_backwards(self, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """See `memory` and `backward`."""
        return memory.layer_backwards(block, plan)

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """See `traffic`."""
        return traffic.collectives(blocks, plan)

    def explain(self, plan: Plan) -> Explanation:
        """The collectives of every block."""
        text = (
            "Layers come in pairs. A column parallel layer splits its outputs over the ranks and sends nothing in "
            "forward; the row parallel layer behind it splits its inputs, and its partial sums are added up. Backward "
            "mirrors it. With sequence parallelism each all-reduce is a reduce-scatter and an all-gather of the same "
            "bytes."
        )
        return explanation(plan, text, "Shoeybi et al. 2019; Korthikanti et al. 2022", traffic.steps)


def _roles(spec: ModelSpec, config: Config, tp: int) -> list[Problem]:
    """There must be something to split, and nothing with weights may stand where activations are split."""
    layers = list(spec.layers())
    if not any(layer.layer_role in SPLIT_ROLES for layer in layers):
        named = next((layer for layer in layers if layer.parameters), None)
        name = roles.could_be(spec, "column_parallel") or (named.name if named else spec.name)
        what = f"layer {name} has no layer role, so tp={tp} has nothing to split"
        fix = (
            f"{roles.suggestion(config, name, 'column_parallel')} or tp=1"
            if roles.could_be(spec, "column_parallel")
            else "tp=1"
        )
        return [Problem(what, "model.roles", fix, kind="undefined")]
    open_columns: LayerSpec | None = None
    for layer in layers:
        beside = layer.layer_role == "column_parallel"  # q, k and v of a user's module read the same input
        if open_columns and layer.parameters and layer.layer_role != "row_parallel" and not beside:
            what = f"layer {layer.name} reads what {open_columns.name} has split over tp={tp}: only a row layer can"
            fix = (
                f"{roles.suggestion(config, layer.name, 'row_parallel')} or tp=1"
                if roles.fits(layer, "row_parallel")
                else "tp=1"
            )
            return [Problem(what, "model.roles", fix, kind="undefined")]
        open_columns = (
            layer
            if layer.layer_role == "column_parallel"
            else None
            if layer.layer_role == "row_parallel"
            else open_columns
        )
    return []


def _sequence(spec: ModelSpec, tp: int, wanted: bool) -> list[Problem]:
    """Sequence parallel cuts the sequence evenly, so there must be one."""
    key = "strategy.tensor.sequence_parallel"
    if not wanted:
        return []
    if spec.kind != "tokens" or not spec.seq:
        what = f"sequence_parallel=true: {spec.name} has no sequence to cut"
        return [Problem(what, key, f"{key}=false", kind="undefined")]
    if spec.seq % tp == 0:
        return []
    what = f"model.seq={spec.seq} does not divide by tp={tp}, and sequence_parallel cuts it evenly"
    fix = f"{either('model.seq', _multiples(spec.seq, tp))} or {key}=false"
    return [Problem(what, "tp", fix, kind="arithmetic")]


def _misfits(spec: ModelSpec, tp: int) -> list[tuple[str, int, str]]:
    """(key of the size, the size, what is wrong) for everything that tp does not divide.

    Where no row layer follows, as in the matmul lesson, uneven columns are as good as even ones.
    """
    found = []
    if spec.heads % tp:
        found.append(("model.heads", spec.heads, f"model.heads={spec.heads} does not divide by tp={tp}"))
    elif spec.kv_heads and spec.kv_heads % tp and tp % spec.kv_heads:
        what = f"model.kv_heads={spec.kv_heads} does not divide by tp={tp}, nor tp by it (each held by some ranks)"
        found.append(("model.kv_heads", spec.kv_heads, what))
    if spec.ffn and spec.ffn % tp:
        found.append(("model.ffn", spec.ffn, f"model.ffn={spec.ffn} does not divide by tp={tp}"))
    for key, size in _expert_widths(spec):
        if size % tp and size != spec.ffn:
            found.append((key, size, f"{key}={size} does not divide by tp={tp}: it cuts the inside of every expert"))
    if not spec.heads and any(layer.layer_role == "row_parallel" for layer in spec.layers()):
        for layer in spec.layers():
            misfits = [size for size in _widths(layer) if size % tp and size != spec.ffn]
            found += [
                (layer.name, size, f"layer {layer.name}: {size} features do not divide by tp={tp}") for size in misfits
            ]
    return list(dict.fromkeys(found))


def _legal_sizes(key: str, size: int, spec: ModelSpec, tp: int) -> list[int]:
    """Values of the size at `key` that tp divides, as far as the rest of the model allows them."""
    if key == "model.heads":
        groups = spec.kv_heads if spec.kv_heads != spec.heads else 1  # as many as heads: they follow
        return [heads for heads in divisors(spec.hidden) if heads % tp == 0 and heads % groups == 0]
    if key == "model.kv_heads":
        return [kv_heads for kv_heads in divisors(spec.heads) if kv_heads % tp == 0 or tp % kv_heads == 0]
    return _multiples(size, tp) if key.startswith("model.") else []


def _widths(layer: LayerSpec) -> list[int]:
    """The sizes of a layer that are cut evenly."""
    if layer.layer_role == "row_parallel":
        return [layer.in_features]
    if layer.layer_role == "column_parallel":
        return [parameter.shape[0] for parameter in layer.parameters]
    return []


def _expert_widths(spec: ModelSpec) -> list[tuple[str, int]]:
    """(key, width inside) of an expert: of the first layer of them, all are alike."""
    first = next((layer for layer in spec.layers() if layer.layer_role == "expert"), None)
    if first is None:
        return []
    weight = first.parameters[0]
    return [("model.expert_ffn", weight.shape[inside_dim(weight)])]


def _fits(spec: ModelSpec, tp: int, sequence_parallel: bool) -> bool:
    return not _misfits(spec, tp) and not (sequence_parallel and spec.seq % tp)


def _multiples(size: int, tp: int) -> list[int]:
    """The multiples of tp around `size`."""
    below = size // tp * tp
    return [n for n in (below, below + tp) if n > 0]
