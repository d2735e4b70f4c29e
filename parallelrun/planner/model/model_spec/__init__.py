"""A model as data. `plan` uses it, and a test checks that the model's module matches it.

A spec lists, in order, the blocks (pipeline stages are cut between them), their layers with a layer role, and each
layer's logical parameters by one-device name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from parallelrun.planner.model.model_spec.attention import AttentionSpec, LatentSpec
from parallelrun.planner.model.model_spec.backward import BlockBackward
from parallelrun.planner.model.model_spec.layers import LayerSpec, Pair, pairs_in
from parallelrun.planner.model.model_spec.parameters import Initialiser, ParameterSpec, weight_and_bias
from parallelrun.planner.model.model_spec.router import RouterSpec
from parallelrun.planner.model.model_spec.text import LABELLED, TextSamples

GATED = ("swiglu", "geglu", "swiglu_clamped")  # activations of two inputs, gate and up
PLAIN = AttentionSpec()
MEASURED = "block"  # kind of the blocks of a user's module, whose FLOPs and saved elements are measured
SAMPLE_SET_ROLE = "batch_norm"  # role of the layers that take statistics over a set of samples


@dataclass(frozen=True)
class BlockSpec:
    """One block, which a pipeline stage never divides.

    kind: `embedding`, `transformer`, `head`, or a model's own kind. forward_flops: for one sample. convolution_flops,
    attention_flops: the parts of them in convolutions and, of a user's module, in products of activations with each
    other. saved_elements: activation elements saved for backward per sample; None for transformer blocks, for which the
    tensor strategy computes them. replicated_elements: the part of them that every rank of a one-dimensional tensor
    strategy saves; None where it is unknown. input_shape: of one sample, if it differs from block to block (images);
    None: the model's boundary_shape. splits_input: such a strategy splits its dim 0. backward: where the model
    describes it. saves_after_sum: of a user's module, whether backward needs a tensor that forward computes after its
    last row-parallel layer or embedding; None: its layers tell. follows: it is on the stage of the block before it.
    num_outputs: of a user's module, the length of the tuple that it returns, of which the first item is x; 0: a tensor.
    output_shape: of x behind a user's module for one sample, unless that is (1, *boundary_shape). attention: of a
    transformer block.
    """

    name: str
    kind: str
    layers: tuple[LayerSpec, ...]
    forward_flops: float
    saved_elements: float | None = None
    input_shape: tuple[int, ...] | None = None
    backward: BlockBackward | None = None
    saves_after_sum: bool | None = None
    convolution_flops: float = 0.0
    attention_flops: float = 0.0
    replicated_elements: float | None = None
    splits_input: bool = False
    follows: bool = False
    num_outputs: int = 0
    output_shape: tuple[int, ...] | None = None
    attention: AttentionSpec = PLAIN

    @cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(parameter for layer in self.layers for parameter in layer.parameters)

    @cached_property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def outside(self) -> frozenset[str]:
        """The parameters that a module around the block holds, as a class token: its forward reads them before it."""
        return frozenset(p.name for p in self.parameters if not p.name.startswith(f"{self.name}."))

    def reads_sum(self, dropout: float) -> bool:
        """Whether backward needs a tensor that forward computes after the last sum or gather of partial results: of a
        dropout mask, or of a norm (of a post-norm block)."""
        if self.saves_after_sum is not None:
            return self.saves_after_sum
        last = next(layer for layer in reversed(self.layers) if layer.layer_role != "dropout")
        return dropout > 0 or last.layer_role == "norm"

    def saved_on_rank(self, tp: int) -> float:
        """The `saved_elements` of one of `tp` ranks, all of them where it is unknown which are split."""
        saved = self.saved_elements or 0.0
        replicated = saved if self.replicated_elements is None else self.replicated_elements
        return replicated + (saved - replicated) / tp

    @property
    def is_recomputed(self) -> bool:
        """Whether `recompute` repeats it: not the embedding or the head, where it would save nothing."""
        return self.kind not in ("embedding", "head")


@dataclass(frozen=True)
class ModelSpec:
    """A model as `plan` sees it. Sizes are global; `kind` is `tokens` (language models), `features` or `images`.

    sample_shape, boundary_shape: of one sample, at the input and between blocks (`(seq, hidden)` for gpt).
    targets_per_sample: loss terms of a sample (seq for gpt, 1 for a classifier). tied: (copy, original) names of
    parameters that are one logical tensor; `parameters` lists only the original. mask_token: for masked language
    models, the id of [MASK], which does not occur in the data. packed: samples consist of documents, each attending to
    itself, and padding. hides_targets: the dataset has a loss on a part of the tokens. norm_position: post, if norms
    are of what branches add to x, so that no product reads them. logit_softcap: of the output layer. documents: the
    lengths of the documents of some samples, where they are known. own_loss: the user's function computes the loss, and
    the count by which it is divided. z_loss: its weight. mtp_depth, mtp_weight: the modules of multi-token prediction
    and the weight of their losses.
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
    head_dim: int | None = None  # None: hidden / heads
    ffn: int = 0
    seq: int = 0
    num_layers: int = 0
    activation: str = "gelu"
    norm: str = "layernorm"
    norm_position: str = "pre"
    attention_dropout: float = 0.0
    tied: tuple[tuple[str, str], ...] = ()
    mask_token: int | None = None
    experts: int = 0
    router: RouterSpec | None = None  # None: no layer has experts
    latent: LatentSpec | None = None  # None: queries, keys and values are products of x, alike in width
    logit_softcap: float | None = None
    z_loss: float = 0.0
    mtp_depth: int = 0
    mtp_weight: float = 0.0
    packed: bool = False
    hides_targets: bool = False
    documents: tuple[tuple[int, ...], ...] = ()
    text: TextSamples | None = None  # None: a model of tokens predicts the next one, or masked ones
    own_loss: bool = False

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Every logical parameter by one-device name, in block order."""
        return {p.name: p for block in self.blocks for p in block.parameters}

    @cached_property
    def num_parameters(self) -> int:
        return sum(block.num_parameters for block in self.blocks)

    @property
    def num_frozen(self) -> int:
        """Elements of frozen parameters."""
        return sum(parameter.numel for parameter in self.parameters.values() if parameter.frozen)

    @property
    def has_ignored(self) -> bool:
        """Whether some targets are ignored, so that valid ones are counted before every step."""
        return self.packed or self.hides_targets or self.mask_token is not None or self.own_loss

    @property
    def classifies(self) -> bool:
        """Whether a sample has one class, and not a target for each token."""
        return not self.own_loss and (self.kind != "tokens" or self.sample_kind == LABELLED)

    @property
    def sample_kind(self) -> str:
        """The kind of the samples that a dataset must have: `kind`, or `labelled texts`."""
        return LABELLED if self.text is not None and self.text.kind == LABELLED else self.kind

    @cached_property
    def learns_positions(self) -> bool:
        """Whether positions are embedded by a table, and not by rotating queries and keys."""
        return any(layer.layer_role == "position_embedding" for layer in self.layers())

    @cached_property
    def normalises_heads(self) -> bool:
        """Whether attention normalises queries and keys of every head."""
        return self.num_layers > 0 and any(layer.layer_role == "per_head" for layer in self.layers())

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to earlier ones only: not in a model that fills in masked tokens."""
        return self.mask_token is None

    @cached_property
    def forward_flops(self) -> float:
        """For one sample."""
        return sum(block.forward_flops for block in self.blocks)

    @cached_property
    def window(self) -> int | None:
        """The keys that a token sees in the layers where it sees most; None: all before it."""
        windows = [block.attention.window for block in self.blocks if block.kind == "transformer"]
        return None if None in windows else max(filter(None, windows), default=None)

    @property
    def qk_features(self) -> int:
        """Features of the queries, or keys, of all query heads together: those that scores are sums over."""
        width = self.latent.head_dim if self.latent else self.head_dim
        return self.heads * width if width else self.hidden

    @property
    def attention_features(self) -> int:
        """Features that attention multiplies by each score: those of queries and of values."""
        return self.qk_features + (self.heads * self.latent.value if self.latent else self.qk_features)

    @cached_property
    def has_convolutions(self) -> bool:
        return any(block.convolution_flops for block in self.blocks)

    def block(self, name: str) -> BlockSpec:
        """The block of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, BlockSpec]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def first_alike(self) -> dict[str, str]:
        """By block name: the first block with equal costs. A block with a tied weight equals no other."""
        tied = {name for pair in self.tied for name in pair}
        names: dict[object, str] = {}
        return {block.name: names.setdefault(_block_key(block, tied), block.name) for block in self.blocks}

    @cached_property
    def tied_blocks(self) -> dict[str, frozenset[str]]:
        """By the name of a tied parameter: the block that owns it and the blocks that read it."""
        originals = {original for _, original in self.tied}
        owners = [(p.name, block.name) for block in self.blocks for p in block.parameters if p.name in originals]
        readers = [(layer.tied, block.name) for block in self.blocks for layer in block.layers if layer.tied]
        return {name: frozenset(block for tied, block in owners + readers if tied == name) for name in originals}

    @cached_property
    def readers(self) -> dict[str, str]:
        """By the name of a tied parameter: the block that reads it, by a layer without a weight of its own."""
        return {layer.tied: block.name for block in self.blocks for layer in block.layers if layer.tied}

    @cached_property
    def layer_of(self) -> dict[str, LayerSpec]:
        """The layer that lists each logical parameter, by the parameter's name."""
        return {parameter.name: layer for layer in self.layers() for parameter in layer.parameters}

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Every `Pair`, in order."""
        return tuple({id(pair): pair for pair in self.pair_of.values()}.values())

    @cached_property
    def distinct_pairs(self) -> tuple[Pair, ...]:
        """The first of all pairs with equal shapes and heads."""
        pairs: dict[object, Pair] = {}
        for pair in self.pairs:
            layers = (*pair.columns, *((pair.row,) if pair.row else ()))
            pairs.setdefault(tuple(_key(layer) for layer in layers), pair)
        return tuple(pairs.values())

    @cached_property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """The first of all layers with equal roles, shapes and heads."""
        first: dict[object, LayerSpec] = {}
        for layer in self.layers():
            first.setdefault(_key(layer), layer)
        return tuple(first.values())

    @cached_property
    def pair_of(self) -> dict[str, Pair]:
        """By layer name: the pair that contains a layer."""
        return {name: pair for block in self.blocks for name, pair in pairs_in(block.layers).items()}

    @cached_property
    def latent_layers(self) -> dict[str, tuple[LayerSpec, ...]]:
        """By the name of each: the layers of its block's latent attention in front of the product, as they run."""
        named: dict[str, tuple[LayerSpec, ...]] = {}
        for block in self.blocks if self.latent else ():
            if block.kind == "transformer":
                start = next(i for i, x in enumerate(block.layers) if x.layer_role == "linear")
                stop = next(i for i, x in enumerate(block.layers) if x.layer_role == "row_parallel")
                layers = tuple(layer for layer in block.layers[start:stop] if layer.layer_role != "attention")
                named |= {layer.name: layers for layer in layers}
        return named

    def layers(self) -> Iterator[LayerSpec]:
        for block in self.blocks:
            yield from block.layers


def _block_key(block: BlockSpec, tied: set[str]) -> object:
    """Equal for blocks of equal costs."""
    layers = tuple((_key(x), tuple((p.frozen, p.layer_role) for p in x.parameters)) for x in block.layers)
    is_tied = any(p.name in tied for p in block.parameters) or any(x.tied for x in block.layers)
    name = block.name if is_tied else ""
    flops = block.forward_flops, block.convolution_flops, block.attention_flops
    saved = block.saved_elements, block.replicated_elements, block.saves_after_sum
    return block.kind, name, flops, saved, block.input_shape, block.attention, layers


def _key(layer: LayerSpec) -> object:
    """Equal for layers of equal sizes."""
    return layer.layer_role, layer.in_features, layer.out_features, tuple((p.shape, p.heads) for p in layer.parameters)
