"""The base class of tensor-parallel strategies: how layers are split over the tp ranks of a replica."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import Config, TensorStrategyConfig
from parallelrun.planner.contract.axis_strategy import AxisStrategy
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec, ParameterSpec
from parallelrun.planner.model.product import ActivationLayout, Product

if TYPE_CHECKING:
    from parallelrun.planner.contract.request import Request

MeshDims = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]


@dataclass(frozen=True)
class LayoutChoice:
    """A layout that `parallelrun plan` compares with the others. config: its settings. variant_of: the layout that this
    one varies: where that one is illegal, this one is not listed. searched: a search for the best plan tries it."""

    name: str
    config: TensorStrategyConfig
    variant_of: str = ""
    searched: bool = True


@dataclass(frozen=True)
class LayerBackward:
    """One layer's part of a block's backward pass: bytes on a rank for one microbatch.

    kept: what forward has saved for it, freed when it is over. arriving, giving: gradients of activations that it reads
    and gives, and those that wait for an earlier layer meanwhile. scratch: what only it needs. weights: the gradient of
    its weights, in their dtype; weight_scratch: what computing that needs besides; widened: the largest of them in the
    compute dtype, from which it is widened when what was saved is free. reads: the gradient of its output, from which
    the weights' one is computed: where that is done apart (zero bubble), it stays until then. in_forward: what the last
    layer needs at the end of forward. stops: rows of experts are sent before it in forward, and behind it in backward.
    """

    kept: int = 0
    arriving: int = 0
    giving: int = 0
    scratch: int = 0
    weights: int = 0
    reads: int = 0
    in_forward: int = 0
    weight_scratch: int = 0
    widened: int = 0
    stops: bool = False

    @property
    def of_weights(self) -> int:
        """Bytes for the gradient of its weights, beyond what is saved."""
        return self.weights + self.weight_scratch + max(0, self.widened - self.kept)


@dataclass(frozen=True)
class TensorCollective:
    """A collective of one microbatch of a block. during: FORWARD | RECOMPUTATION | BACKWARD; layer: by which it is
    issued, empty for the loss and in recomputation."""

    during: str
    layer: str
    row: Collective

    @property
    def title(self) -> str:
        """For people, such as `forward, attention.out`."""
        if self.layer:
            return f"{self.during}, {self.layer}"
        return "loss" if self.during == FORWARD else "forward again, to recompute"


FORWARD, RECOMPUTATION, BACKWARD = "forward", "recomputation", "backward"


@dataclass(frozen=True)
class TensorStrategy(AxisStrategy):
    """How weights and activations are split over the tp ranks; `plan.tensor` is one.

    layout_name: the value of `layout` that chooses it. config_class: its keys of
    `strategy.tensor`; others are refused. is_one_dimensional: every layer is split over one axis, tp, as the
    layout that all others are compared with. splits_images: it splits the channels of image classifiers.

    sequence_parallel: activations between blocks are split along the sequence. overlap: the reduction of input
    gradients runs while weight gradients are computed. kv_copies: ranks that hold a copy of one kv head (tp > kv
    heads), else 1. forms: how each pair of layers multiplies on a grid, by its sizes. save_gathered: backward reuses
    what forward gathered; False: it gathers again.
    """

    layout_name: ClassVar[str]
    config_class: ClassVar[type[TensorStrategyConfig]] = TensorStrategyConfig
    is_one_dimensional: ClassVar[bool] = False
    splits_images: ClassVar[bool] = False

    sequence_parallel: bool = False
    overlap: bool = True
    kv_copies: int = 1
    forms: tuple[tuple[tuple[int, int, int, int], tuple[str, str]], ...] = ()
    save_gathered: bool = True

    @classmethod
    @abstractmethod
    def mesh_dims(cls, request: Request) -> MeshDims:
        """Return (mesh dims with degrees that make up tp, flattened dims): see MeshShape."""

    @classmethod
    @abstractmethod
    def vocab_degrees(cls, request: Request) -> tuple[int, ...]:
        """Return the degrees of the mesh dims that split the vocabulary, major first."""

    @classmethod
    def micro_batch_divisor(cls, request: Request) -> int:
        """Return the number that micro_batch must be a multiple of, because samples are split over so many ranks."""
        return 1

    @classmethod
    def head_parts(cls, request: Request) -> int:
        """Return over how many ranks the heads of attention are split."""
        return request.tp

    @classmethod
    def token_ranks(cls, request: Request) -> int:
        """Return how many ranks of tp have the same tokens where a layer reads complete rows; the others have those of
        other samples."""
        return request.tp

    def token_axis(self, plan: Plan) -> str:
        """Return the axis of these ranks. They split every expert or, where ep spans tp, the tokens."""
        return "tp"

    @property
    def slices_tokens(self) -> bool:
        """Whether, where ep spans tp, its own layers give each of these ranks a slice of every sequence, and take the
        results back."""
        return self.sequence_parallel

    @classmethod
    def layout_choices(cls, tp: int) -> list[LayoutChoice]:
        """Return the layouts of this kind that are worth comparing at this tp, legal or not."""
        return []

    def label(self, plan: Plan) -> str:
        """Return the layout's name with its sizes: `1d sequence`, `2d 2x3`."""
        return self.layout_name

    @classmethod
    def asks_for_slices(cls, config: Config) -> bool:
        """Return whether the user asks for activations that are split along the sequence."""
        return False

    @classmethod
    def asked_form(cls, config: Config) -> str:
        """Return the form of products that the user asks for; `auto` leaves it open."""
        return "auto"

    def resolved_config(self, config: Config, plan: Plan) -> TensorStrategyConfig:
        """Return the section of `config` with the values that were filled in."""
        return config.strategy.tensor

    @abstractmethod
    def layout(self, parameter: ParameterSpec, plan: Plan) -> Layout:
        """Return a parameter's layout on the tensor axes, with the axes over which its gradient is a partial sum."""

    @abstractmethod
    def boundary_shape(self, plan: Plan) -> tuple[int, ...]:
        """Return the shape of the local tensor that passes between blocks, for one microbatch."""

    def loss_axes(self, plan: Plan) -> tuple[str, ...]:
        """Return the mesh dims over which samples are split, so that each rank has the loss of its own samples."""
        return ()

    @abstractmethod
    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Return the bytes that one microbatch of `block` saves for backward on a rank, under plan.recompute."""

    @abstractmethod
    def saves_input(self, block: BlockSpec, plan: Plan) -> bool:
        """Return whether the layers of `block` that read its input save it as it arrives, where nothing is recomputed
        in full."""

    @abstractmethod
    def layer_backwards(self, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """Return what each layer of `block` needs in backward, in forward order; where the block is recomputed in full,
        with what its second forward saves."""

    def rounded_again_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Return the bytes of weights in the compute dtype that a block's second forward keeps for its backward.

        A first one leaves them to be rounded again (`rounding`); torch's checkpoint saves whatever it meets."""
        return 0

    def recomputed_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Return what the end of a block's second forward needs beside all that it saves; 0: less than its backward."""
        return 0

    @abstractmethod
    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """Return one rank's collectives over the tensor axes in one step (all microbatches) for those blocks."""

    @abstractmethod
    def traffic(self, block: BlockSpec, plan: Plan) -> list[TensorCollective]:
        """Return what one microbatch of a block sends, in order."""

    @abstractmethod
    def product_of(self, layer: LayerSpec, plan: Plan) -> Product | None:
        """Return how a layer multiplies; None for a layer that does not."""

    @abstractmethod
    def activation_layout(self, layer: LayerSpec | None, plan: Plan) -> ActivationLayout:
        """Return the layout of what a layer reads; None: of what passes between blocks."""
