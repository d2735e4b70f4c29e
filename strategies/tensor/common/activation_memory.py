"""Bytes that norms, attention and activations save for backward, on a rank's rows and features."""

from __future__ import annotations

from collections.abc import Iterable

from parallelrun.base.precision import BYTES
from parallelrun.models.blockwise.memory import own_bytes
from parallelrun.planner.contract.parameters import element_bytes
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec, ModelSpec, ParameterSpec
from parallelrun.planner.model.model_spec.attention import WINDOW_PART

INDEX, MASK = 8, 1  # bytes of a token id and of a dropped-or-kept flag


def local_numel(parameter: ParameterSpec, plan: Plan) -> int:
    """Elements of the largest part of a parameter that a rank holds: `torch.chunk` makes the first parts largest."""
    return once(
        plan.blocks_cache, ("local numel", parameter.name),
        lambda: plan.tensor.layout(parameter, plan).local_numel(parameter.shape, plan.mesh.sizes, {}),
    )  # fmt: skip


def rounded_bytes(parameters: Iterable[ParameterSpec], plan: Plan) -> int:
    """Bytes, in the compute dtype, of the weights (`local_numel`) that the modules hold in another dtype: of their
    rounded copies, or of their gradients before these are widened."""
    compute = BYTES[plan.precision.compute]
    return compute * sum(local_numel(spec, plan) for spec in parameters if element_bytes(spec, plan) != compute)


def adds_to_head(layer: LayerSpec, plan: Plan) -> bool:
    """Whether autograd adds the gradients of a layer's weights to those that the head left for the same weights: in a
    third tensor."""
    return len(plan.stages) == 1 and any(parameter.name in plan.spec.readers for parameter in layer.parameters)


def weight_gradients(layer: LayerSpec, plan: Plan) -> int:
    """Bytes of the gradients of a layer's weights, as backward leaves them. A tied head has the embedding's."""
    weights = (*layer.parameters, *((plan.spec.parameters[layer.tied],) if layer.tied else ()))
    ep = plan.mesh.size("ep") if layer.layer_role == "expert" else 1
    return sum(local_numel(weight, plan) // ep * element_bytes(weight, plan) for weight in weights if not weight.frozen)


def as_computed(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers of a block in the order in which they run: shared experts before the others."""
    routed = tuple(layer for layer in layers if layer.layer_role in ("expert", "expert_output"))
    rest = tuple(layer for layer in layers if layer not in routed)
    last = len(rest) - (bool(routed) and rest[-1].layer_role == "dropout")
    return (*rest[:last], *routed, *rest[last:])


def recomputed(block: BlockSpec, plan: Plan) -> bool:
    """Whether the results of the block's norms and activations are computed again rather than saved."""
    return plan.recompute == "selective" and block.is_recomputed


def recomputes_norms(block: BlockSpec, plan: Plan) -> bool:
    """Whether products read results of norms that are computed again."""
    return recomputed(block, plan) and plan.spec.norm_position != "post"


def norm_bytes(num_rows: int, layer: LayerSpec, plan: Plan) -> int:
    """Input and statistics of a norm over whole rows: RMSNorm keeps one in the accurate dtype; on CPU layer_norm keeps
    two in the dtype of its input."""
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    statistics = accurate if plan.spec.norm == "rmsnorm" else 2 * compute
    return num_rows * (layer.in_features * compute + statistics)


def head_norm_bytes(num_rows: int, outputs: int, layer: LayerSpec, plan: Plan) -> int:
    """Inputs and statistics of the norms of heads behind a layer that gives `outputs` features of queries, keys and
    values on this rank."""
    norms = [x for x in plan.spec.pair_of[layer.name].inside if x.layer_role == "per_head"]
    features = outputs * sum(x.in_features for x in norms) // layer.out_features
    heads = features // (plan.spec.qk_features // plan.spec.heads)
    compute, accurate = BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    return num_rows * (features * compute + heads * (accurate if plan.spec.norm == "rmsnorm" else 2 * compute))


def attends(layer: LayerSpec) -> bool:
    """Does this column layer give q, k and v?"""
    return any(parameter.heads for parameter in layer.parameters)


def follows_attention(layer: LayerSpec, block: BlockSpec) -> bool:
    """Is the column layer in front of this row layer the one that gives q, k and v?"""
    before = [x for x in block.layers[: block.layers.index(layer)] if x.layer_role == "column_parallel"]
    return bool(before) and attends(before[-1])


def attention_bytes(num_rows: int, heads: int, outputs: int, block: BlockSpec, plan: Plan) -> int:
    """q, k, v and one statistic per row and head; written out, with dropout: probabilities, mask, product.

    num_rows: positions; heads: of queries; outputs: features of q, k and v together; all of this rank.
    """
    spec, compute, accurate = plan.spec, BYTES[plan.precision.compute], BYTES[plan.precision.accurate]
    width = spec.qk_features // spec.heads  # of a head
    num_positions = num_rows if spec.packed else spec.seq  # samples of packed documents have positions of their own
    angles = (
        0
        if spec.learns_positions
        else 4 * num_positions * ((spec.latent.rope if spec.latent else width) // 2) * compute
    )
    own = heads * width  # features of q, and of what attention gives
    attention, window = block.attention, block.attention.window or spec.seq
    if not spec.attention_dropout or attention.own_scores:
        # torch's kernel for grouped heads on CPU lays its result out head by head: the row layer reads a copy.
        # Latent attention cuts zeros off its result, which is a copy too.
        by_head = plan.device == "cpu" and outputs != 3 * own and not spec.packed and not attention.own_scores
        limited = window < spec.seq and not (plan.context or attention.own_scores)
        copied = own if (by_head or spec.latent) and not limited else 0
        joined = num_rows * own * compute + _mask_numel(window, spec) * compute if limited else 0
        return num_rows * ((outputs + copied) * compute + heads * accurate) + angles + joined
    probabilities = num_rows * heads * spec.seq
    saved = probabilities * (accurate + MASK + compute) + spec.seq**2 * MASK
    return num_rows * 3 * own * compute + saved + angles  # k and v are repeated for every query head


def _mask_numel(window: int, spec: ModelSpec) -> int:
    """Elements of the masks of parts of the queries that attend in a window, as `functions.attend` cuts them."""
    size = min(spec.seq, max(window, WINDOW_PART))
    parts, rest = divmod(spec.seq, size)
    return size**2 + (parts > 1) * size * (size + window - 1) + rest * (rest + window - 1) * (rest > 0)


def activates_again(block: BlockSpec, plan: Plan) -> bool:
    """Is the result of the MLP's middle computed again in backward? Not of relu, which keeps it for itself."""
    return recomputed(block, plan) and plan.spec.activation != "relu"


def activation_bytes(num_rows: int, outputs: int, plan: Plan) -> int:
    """Return the bytes that the MLP's activation saves, for a column layer of `outputs` outputs on this rank."""
    if plan.spec.activation == "relu":
        return 0  # it keeps what it gives, which the layer behind it keeps too
    return num_rows * outputs * BYTES[plan.precision.compute]


def activation_scratch(num_bytes: int, plan: Plan) -> int:
    """Return the bytes of what the backward of an activation that gives so many computes besides."""
    return {"geglu": 2, "swiglu_clamped": 5}.get(plan.spec.activation, 0) * num_bytes


def scratch_behind(layer: LayerSpec, block: BlockSpec, mixed: int, plan: Plan) -> int:
    """Return the bytes of what the backward of a column layer's attention or activation computes besides. mixed: of the
    gradient of its result."""
    if not attends(layer):
        return activation_scratch(mixed, plan)
    passing = plan.context.passing_bytes(plan, block.attention) if plan.context else 0
    return own_bytes(plan, block.attention) + passing


def float8_bytes(layer: LayerSpec, block: BlockSpec, sizes: tuple[int, int, int], plan: Plan) -> int:
    """Bytes that the backward of products in fp8 needs besides: the gradients of all results in 8 bits, and of one
    product both operands as they are multiplied, widened on CPU and copied across on a GPU. The gradients of weights
    are in the compute dtype until all are there. sizes: of the results' gradients, the input's and the weights'."""
    if not plan.precision.others or plan.stack.fp8_copies or block.kind != "transformer" or layer.layer_role == "head":
        return 0
    (reads, gives, own), compute = sizes, BYTES[plan.precision.compute]
    copied = compute if plan.device == "cpu" else 1
    weights = [local_numel(parameter, plan) for parameter in layer.parameters if len(parameter.shape) > 1]
    largest = reads * max(weights) // sum(weights)
    at_once = (copied * largest + (1 + copied) * max(gives, compute * max(weights))) // compute
    wider = own - compute * sum(weights) + max(rounded_bytes([parameter], plan) for parameter in layer.parameters)
    return reads // compute + max(0, at_once - max(0, wider))
