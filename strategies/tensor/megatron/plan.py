"""Prediction of Megatron's tensor strategy: layouts, products and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.moe.spec import has_own_router, inside_dim
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.contract.tensor_strategy import LayoutChoice, MeshDims
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE, BlockSpec, LayerSpec, ParameterSpec
from parallelrun.planner.model.product import ActivationLayout, Product
from parallelrun.planner.model.product.forms import column_1d, row_1d

from ..common.activation_memory import local_numel
from ..common.keys import MegatronConfig
from ..common.product_strategy import ProductStrategy
from ..common.traffic import AXIS, overlaps
from . import checks

KV_AXIS, COPY_AXIS = "tp_kv", "tp_copy"
COLUMN_ROLES = ("column_parallel", "head", "shared_input", "expert_input")  # roles of layers that read whole rows
ROW_ROLES = ("row_parallel", "embedding", "expert_output")  # roles of layers whose results are summed over the ranks
OF_EXPERTS = ("expert_input", "expert_output")


@dataclass(frozen=True)
class Megatron1D(ProductStrategy):
    """Column-parallel layers followed by row-parallel ones, over one axis (layout 1d)."""

    kind: ClassVar[str] = "megatron"
    layout_name: ClassVar[str] = "1d"
    config_class = MegatronConfig
    is_one_dimensional: ClassVar[bool] = True
    splits_images: ClassVar[bool] = True
    skips_frozen: ClassVar[bool] = False  # a user's module computes every input gradient under tp
    source: ClassVar[str] = "Shoeybi et al. 2019; Korthikanti et al. 2022"
    explanation: ClassVar[str] = (
        "Layers come in pairs. A column parallel layer splits its outputs over the ranks and sends nothing in "
        "forward; the row parallel layer behind it splits its inputs, and its partial sums are added up. Backward "
        "mirrors it. With sequence parallelism each all-reduce is a reduce-scatter and an all-gather of the same "
        "bytes."
    )

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return checks.check(request, cls.asks_for_slices(request.config))

    @classmethod
    def is_legal(cls, request: Request) -> bool:
        return checks.is_legal(request, cls.asks_for_slices(request.config))

    @classmethod
    def resolve(cls, request: Request) -> Megatron1D:
        """Sequence parallelism needs several ranks to split the sequence over."""
        kv_heads = request.spec.kv_heads
        return cls(
            sequence_parallel=cls.asks_for_slices(request.config) and request.tp > 1,
            overlap=request.config.strategy.tensor.overlap,
            kv_copies=request.tp // kv_heads if kv_heads and request.tp > kv_heads else 1,
        )

    @classmethod
    def asks_for_slices(cls, config: Config) -> bool:
        return MegatronConfig.of(config).sequence_parallel

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
        sequence = MegatronConfig(sequence_parallel=True)
        return [LayoutChoice("1d", MegatronConfig()), LayoutChoice("1d sequence", sequence, "1d")]

    def label(self, plan: Plan) -> str:
        """`1d` or `1d sequence`."""
        return "1d sequence" if self.sequence_parallel else "1d"

    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """Column layers, norms over all heads, BatchNorms in a pair, embedding and head: dim 0; weights of row layers:
        dim 1; experts: their inside, if they are ours and ep does not span tp; else whole.

        Partial over tp: gradients that come from a slice of the sequence, and a router's, whose weights are multiplied
        by what a slice of every expert gives, or by some of the tokens. Partial over tp_copy: copies of a kv head, each
        of which serves its own query heads.
        """
        replicated, axes = Layout.replicated(len(parameter.shape)), plan.mesh.mesh_dims_of(AXIS)
        if parameter.layer_role == "row_parallel" and len(parameter.shape) > 1:
            return Layout(((), axes, *replicated.dims[2:]))
        is_split = parameter.layer_role in ("column_parallel", "embedding", "head") or bool(parameter.heads)
        if parameter.layer_role == SAMPLE_SET_ROLE:
            is_split = plan.spec.layer_of[parameter.name].name in plan.spec.pair_of
        if is_split:
            if plan.mesh.size(COPY_AXIS) > 1 and parameter.heads == plan.mesh.size(KV_AXIS):
                return Layout(((KV_AXIS,), *replicated.dims[1:]), (COPY_AXIS,))
            return Layout((axes, *replicated.dims[1:]))
        if parameter.layer_role == "expert" and not has_own_router(plan.spec):
            if plan.ep_spans_tp:
                return replicated
            split = inside_dim(parameter)
            if split < 0:
                return Layout(replicated.dims, (AXIS,) if plan.mesh.size(AXIS) > 1 else ())
            return Layout(tuple(axes if dim == split else () for dim in range(len(parameter.shape))))
        if parameter.layer_role in ("router", "per_head"):
            is_partial = plan.mesh.size(AXIS) > 1 and not parameter.frozen
        else:
            is_partial = self.sequence_parallel
        return Layout(replicated.dims, (AXIS,)) if is_partial else replicated

    def product_of(self, layer: LayerSpec, plan: Plan) -> Product | None:
        """Column or row product; an embedding sums rows of a split table."""
        if layer.layer_role in OF_EXPERTS and plan.ep_spans_tp:
            return None  # the expert dispatcher divides the tokens
        if layer.layer_role in COLUMN_ROLES:
            return column_1d(AXIS, self.sequence_parallel)
        if layer.layer_role in ROW_ROLES:
            return row_1d(AXIS, self.sequence_parallel, lookup=layer.layer_role == "embedding")
        if layer.layer_role == "linear":
            between = self.activation_layout(None, plan)
            return Product("replicated", between, between, Layout.replicated(2))
        return None

    def activation_layout(self, layer: LayerSpec | None, plan: Plan) -> ActivationLayout:
        """Whole, or a slice of the sequence; of a norm over all heads, those that its weights are for."""
        if layer is not None and layer.spans_heads:
            return ActivationLayout((), self.layout(layer.parameters[0], plan).dims[0])
        return column_1d(AXIS, self.sequence_parallel).x

    def norm_axes(self, layer: LayerSpec, plan: Plan) -> tuple[str, ...]:
        """All of tp: copies of a kv head are summed as often as they are counted."""
        return (AXIS,) if layer.spans_heads else ()

    def saves_gathered(self, layer: LayerSpec, plan: Plan) -> bool:
        """The overlapped node saves the slice and gathers again; the router and the experts are no such node, nor a
        head whose gradients are computed in forward."""
        apart = ("shared_input", "expert_input", *(("head",) if plan.loss_chunks > 1 else ()))
        return not overlaps(plan) or layer.layer_role in apart

    def local_outputs(self, layer: LayerSpec, product: Product, plan: Plan) -> int:
        """Outputs that are copied kv heads count as often as they are held."""
        if layer.layer_role != "column_parallel":
            return super().local_outputs(layer, product, plan)
        return sum(local_numel(p, plan) // p.shape[1] for p in layer.parameters if len(p.shape) == 2)

    def recomputes_last_call(self, block: BlockSpec, forward: list[Collective], plan: Plan) -> bool:
        """Recomputation stops at the last tensor that backward needs. The last reduction is behind it, unless more is
        read (`reads_sum`), or experts that ep spans come after it; a last gather (of a head in a recomputed block) is
        before the product that backward needs."""
        if block.reads_sum(plan.dropout) or not forward or forward[-1].operation == "all_gather":
            return True
        return plan.ep_spans_tp and any(x.layer_role == "expert" for x in block.layers)

    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """Under sequence parallelism only a slice of the rank's part of the sequence."""
        first, *rest = plan.spec.boundary_shape
        parts = plan.mesh.size("cp") * (plan.mesh.size(AXIS) if self.sequence_parallel else 1)
        return (plan.batch.micro_batch, first // parts, *rest)
