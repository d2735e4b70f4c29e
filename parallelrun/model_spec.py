"""Torch-free description of a model: what `plan` works from and what the module is built to match.

A spec lists, in order, the blocks (the units that pipeline stages are cut between), their layers with a layer role,
and each layer's logical parameters by one-device name. A test holds every spec and its module equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import ceil, prod

from parallelrun.errors import Problem

SAMPLE_SET_ROLE = "batch_norm"  # layer role of what takes statistics over a set of samples


def too_small(sizes: dict[str, int]) -> list[Problem]:
    """A problem for each of the model's sizes (by key of `model`) that is below 1."""
    small = {key: size for key, size in sizes.items() if size < 1}
    return [
        Problem(f"model.{key}={size} must be at least 1", f"model.{key}", f"model.{key}=1")
        for key, size in small.items()
    ]


@dataclass(frozen=True)
class Initialiser:
    """normal(0, std), zeros, ones, uniform(-bound, bound) with `std` as the bound, or own: what a user's module makes
    of it when it is built under the run's seed."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One logical parameter of the one-device model. Logical parameters are never fused (wq, wk, wv apart).

    heads: for rows of dim 0 that belong to attention heads, how many heads they hold (kv heads for wk, wv); else None.
    frozen: it keeps its initial (or resumed) values: no gradient, no optimizer state, no part in the norm.
    """

    name: str
    shape: tuple[int, ...]
    initialiser: Initialiser
    layer_role: str
    heads: int | None = None
    frozen: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class LayerSpec:
    """One role layer: the unit that a tensor strategy places.

    name: one-device module name (`layers.0.attention.qkv`). layer_role: `columns` (one input, one or more outputs split
    by a tensor strategy), `row`, `linear` (between two layers that see the whole hidden size: nothing is split in
    between),
    `embedding`, `position`, `head`, `norm`, `dropout`; `enter` and `leave` (no parameters: around what reads the whole
    sequence and hidden size and gives a sum over split features), `router` and `expert` between them; empty for what
    has none (a user's own layer).
    in_features and out_features are global; `columns` counts the sum of its outputs. For `head` with a tied
    weight, `parameters` is empty and `tied` names the parameter it reads. possible_roles: of a user's own layer, the
    roles that its kind of module can have.
    """

    name: str
    layer_role: str
    in_features: int
    out_features: int
    parameters: tuple[ParameterSpec, ...] = ()
    tied: str | None = None
    possible_roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """The column layers of a block that read one input, and the row layer that reads what they give.

    A column layer that no row layer follows is alone (row None); so is a row layer that follows none (no columns).
    inside: what stands between the two.
    """

    columns: tuple[LayerSpec, ...]
    row: LayerSpec | None
    inside: tuple[LayerSpec, ...] = ()


@dataclass(frozen=True)
class BlockSpec:
    """One block: what a pipeline stage holds whole.

    kind: `embedding`, `transformer`, `head`, or a model's own word. forward_flops: for one sample. saved_elements: a
    model's own count of activation elements kept for backward per sample, outside the tensor strategies' knowledge
    (filled
    by models without role layers; None for transformer blocks, whose memory the tensor strategy computes). input_shape:
    of
    what it takes, for one sample, where that differs from block to block (images); None: the model's boundary_shape.
    """

    name: str
    kind: str
    layers: tuple[LayerSpec, ...]
    forward_flops: float
    saved_elements: float | None = None
    input_shape: tuple[int, ...] | None = None

    @cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(parameter for layer in self.layers for parameter in layer.parameters)

    @cached_property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def is_recomputed(self) -> bool:
        """Does `recompute` apply to it? Not to the ends of a model, where there is nothing to win."""
        return self.kind not in ("embedding", "head")


def renamed(block: BlockSpec, name: str) -> BlockSpec:
    """The same block under another name, which all names in it begin with."""
    old = len(block.name)
    names = [*(layer.name for layer in block.layers), *(parameter.name for parameter in block.parameters)]
    assert all(inside.startswith(f"{block.name}.") for inside in names)
    layers = tuple(
        LayerSpec(
            name + x.name[old:], x.layer_role, x.in_features, x.out_features,
            tuple([
                ParameterSpec(name + p.name[old:], p.shape, p.initialiser, p.layer_role, p.heads, p.frozen)
                for p in x.parameters
            ]),
            x.tied,
        )
        for x in block.layers
    )  # fmt: skip
    return BlockSpec(name, block.kind, layers, block.forward_flops, block.saved_elements, block.input_shape)


@dataclass(frozen=True)
class RouterSpec:
    """How every layer with experts chooses them: `config.schema.RouterConfig`, settled (see there)."""

    kind: str
    top_k: int
    score: str
    renormalise: str
    scaling: float
    capacity_factor: float | None
    eval_capacity_factor: float | None
    min_capacity: int
    drop_policy: str
    second_expert: str
    group_samples: int
    aux_coefficient: float
    z_coefficient: float
    jitter: float
    bias_rate: float

    @property
    def limited(self) -> bool:
        """Has an expert a capacity? Expert choice has by its nature."""
        return self.capacity_factor is not None or self.kind == "expert_choice"

    def capacity(self, num_tokens: int, num_experts: int, training: bool = True) -> int:
        """Tokens that an expert takes of a routing group of `num_tokens` at most; all of them without a limit.

        GShard's 2 S / E x factor, rounded up, for any top_k; at least min_capacity, never more than the group.
        """
        factor = self.capacity_factor
        if not training and self.eval_capacity_factor is not None:
            factor = self.eval_capacity_factor
        if factor is None and self.kind == "expert_choice":
            factor = 1.0
        if factor is None:
            return num_tokens
        exact = Fraction(str(factor))  # in floats, 50 * 1.1 / 5 is more than 11 and rounds up to 12
        share = ceil(num_tokens * self.top_k * exact / num_experts)
        return min(num_tokens, max(share, self.min_capacity))


@dataclass(frozen=True)
class ModelSpec:
    """A model as `plan` sees it. Sizes are global; `kind` is `tokens` (language models), `features` or `images`.

    sample_shape: shape of one input sample; boundary_shape: shape of what passes between blocks, for one sample
    (`(seq, hidden)` for gpt). targets_per_sample: loss terms a sample contributes (seq for gpt, 1 for a classifier).
    tied: (copy, original) parameter names that are one logical tensor; only the original is listed in `parameters`.
    mask_token: the id that hides a token, for models that fill in masked ones; no token of the data has it.
    """

    name: str
    kind: str
    blocks: tuple[BlockSpec, ...]
    sample_shape: tuple[int, ...]
    boundary_shape: tuple[int, ...]
    targets_per_sample: int
    vocab: int
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    seq: int = 0
    num_layers: int = 0
    activation: str = "gelu"
    norm: str = "layernorm"
    attention_dropout: float = 0.0
    tied: tuple[tuple[str, str], ...] = ()
    mask_token: int | None = None
    experts: int = 0
    router: RouterSpec | None = None  # None: no layer has experts
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Every logical parameter by one-device name, in block order."""
        return {p.name: p for block in self.blocks for p in block.parameters}

    @property
    def num_parameters(self) -> int:
        return sum(block.num_parameters for block in self.blocks)

    @property
    def num_frozen(self) -> int:
        """Elements of frozen parameters."""
        return sum(parameter.numel for parameter in self.parameters.values() if parameter.frozen)

    @property
    def forward_flops(self) -> float:
        """For one sample."""
        return sum(block.forward_flops for block in self.blocks)

    def block(self, name: str) -> BlockSpec:
        """The block of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, BlockSpec]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def first_alike(self) -> dict[str, str]:
        """By block name: the first block that is alike in all that costs depend on. A deep model has few of those.

        A block with a tied weight is like no other.
        """
        tied = {name for pair in self.tied for name in pair}
        found: dict[object, str] = {}
        return {block.name: found.setdefault(_looks_of_block(block, tied), block.name) for block in self.blocks}

    @cached_property
    def layer_of(self) -> dict[str, LayerSpec]:
        """The layer that lists each logical parameter, by the parameter's name."""
        return {parameter.name: layer for layer in self.layers() for parameter in layer.parameters}

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Every pair of column layers and row layer, in order."""
        return tuple({id(pair): pair for pair in self.pair_of.values()}.values())

    @cached_property
    def distinct_pairs(self) -> tuple[Pair, ...]:
        """The first of all pairs that are alike in their shapes and heads: a deep model has few."""
        found: dict[object, Pair] = {}
        for pair in self.pairs:
            layers = (*pair.columns, *((pair.row,) if pair.row else ()))
            found.setdefault(tuple(_looks(layer) for layer in layers), pair)
        return tuple(found.values())

    @cached_property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """The first of all layers that are alike in role, shapes and heads."""
        found: dict[object, LayerSpec] = {}
        for layer in self.layers():
            found.setdefault(_looks(layer), layer)
        return tuple(found.values())

    @cached_property
    def pair_of(self) -> dict[str, Pair]:
        """By layer name: the pair that a layer is part of, or stands in between of."""
        return {name: pair for block in self.blocks for name, pair in _pairs(block).items()}

    def layers(self) -> Iterator[LayerSpec]:
        for block in self.blocks:
            yield from block.layers


def _looks_of_block(block: BlockSpec, tied: set[str]) -> object:
    layers = tuple(
        (
            x.layer_role,
            x.in_features,
            x.out_features,
            tuple((p.shape, p.heads, p.frozen, p.layer_role) for p in x.parameters),
        )
        for x in block.layers
    )
    alone = block.name if any(p.name in tied for p in block.parameters) or any(x.tied for x in block.layers) else ""
    return block.kind, alone, block.forward_flops, block.saved_elements, block.input_shape, layers


def _looks(layer: LayerSpec) -> object:
    """All that sizes of a layer depend on."""
    return (
        layer.layer_role, layer.in_features, layer.out_features, *((p.shape, p.heads) for p in layer.parameters)
    )  # fmt: skip


def _pairs(block: BlockSpec) -> dict[str, Pair]:
    """By name, in order: the pair of each layer of `block` that has one."""
    found: dict[str, Pair] = {}
    opened: list[LayerSpec] = []
    for layer in block.layers:
        if layer.layer_role == "row":
            columns = tuple(other for other in opened if other.layer_role == "columns")
            pair = Pair(columns, layer, tuple(other for other in opened if other.layer_role != "columns"))
            found |= {inside.name: pair for inside in (*opened, layer)}
            opened = []
        elif layer.layer_role == "columns" or opened:
            opened.append(layer)
    found |= {layer.name: Pair((layer,), None) for layer in opened if layer.layer_role == "columns"}
    return found
