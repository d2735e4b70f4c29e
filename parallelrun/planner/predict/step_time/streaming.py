"""Seconds of the kernels of a transformer's blocks that move bytes and compute next to nothing.

Bytes are counted from what torch's kernels read and write, each tensor once per kernel, for 16-bit activations; a test
counts them in this program's own blocks.
"""

from __future__ import annotations

from math import prod

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec, ModelSpec
from parallelrun.planner.predict.step_time.kernels import streaming_s
from parallelrun.planner.predict.step_time.rates import Rates

Both = tuple[float, float]  # forward, backward

# Per element of the residual stream: two sums; backward adds two gradients and joins those of query, key and value.
SUMS: Both = (12, 24)
# Rotation of queries and keys, per element of both together: by a kernel each way, or as torch computes a formula.
ROTATION, ROTATION_BY_FORMULA = (4, 4), (19, 32)
JOINING: Both = (3.5, 6.7)  # per element of the query, the key and the value with zeros of latent attention
ACTIVATION: dict[str, Both] = {"gelu": (4, 6), "relu": (4, 6), "swiglu": (10, 24),
                               "geglu": (10, 24), "swiglu_clamped": (32, 60)}  # fmt: skip  # per element that it gives
SINKS: Both = (8, 12)  # per element of attention's result
FUSED_SWIGLU: Both = (6, 10)
BIAS = 2  # per output of a layer with a bias, in backward: it is read to be summed
KERNELS = 8
EMBEDDING = 8
# On a CPU, whose caches hold small tensors: per element of the residual stream, and of what the activation reads.
RESIDUAL_ON_CPU, ACTIVATION_ON_CPU, BACKWARD_ON_CPU = 22, 5, 1.5
LOGIT_ON_CPU: Both = (14, 8)


def of_block(block: BlockSpec, plan: Plan, rates: Rates) -> Both:
    """Seconds (forward, backward) of one microbatch of a transformer block, embedding or head."""
    tp, spec = plan.mesh.size("tp"), plan.spec
    rows, features = plan.tensor.activation_layout(None, plan).local(plan.num_rows, spec.hidden, plan.mesh.sizes)
    if block.kind == "transformer":
        return _of_transformer(block, rows * features, plan, rates)
    if block.kind == "head":
        logits = (1 + spec.mtp_depth) * plan.num_rows * spec.vocab / tp
        moved = LOGIT_ON_CPU if rates.synchronous else plan.stack.logit_bytes
        return streaming_s(moved[0] * logits, 6, rates), streaming_s(moved[1] * logits, 3, rates)
    both = streaming_s(EMBEDDING * rows * features, 4, rates)
    return both, both


def _of_transformer(block: BlockSpec, residual: float, plan: Plan, rates: Rates) -> Both:
    tp, spec, width = plan.mesh.size("tp"), plan.spec, BYTES[plan.precision.compute] / 2
    inside = plan.num_rows * spec.ffn / tp
    if rates.synchronous:
        moved = (RESIDUAL_ON_CPU * residual + ACTIVATION_ON_CPU * inside) * width
        forward = streaming_s(moved, KERNELS, rates)
        return forward, BACKWARD_ON_CPU * forward
    rotated, joined = _turned_elements(plan)
    fused, norm = plan.stack.fused_elementwise, plan.stack.norm_bytes
    rotation = ROTATION if fused else ROTATION_BY_FORMULA
    activation = FUSED_SWIGLU if fused and spec.activation == "swiglu" else ACTIVATION[spec.activation]
    biased = sum(
        plan.num_rows * layer.out_features / tp
        for layer in block.layers
        if any(len(parameter.shape) == 1 for parameter in layer.parameters)
        and layer.layer_role not in ("norm", "per_head", "attention")
    )
    norms = sum(_is_of_x(x, spec) for x in block.layers) or 2
    scaled = block.attention.sinks * plan.num_rows * spec.qk_features / tp
    moved_forward, moved_backward = (
        width
        * (
            (SUMS[i] + norms * norm[i]) * residual
            + SINKS[i] * scaled
            + rotation[i] * rotated
            + JOINING[i] * joined
            + norm[i] * (_latent_elements(plan) + _head_elements(block, plan))
            + activation[i] * inside
        )
        for i in (0, 1)
    )
    return (
        streaming_s(moved_forward, KERNELS, rates),
        streaming_s(moved_backward + width * BIAS * biased, 2 * KERNELS, rates),
    )


def _is_of_x(layer: LayerSpec, spec: ModelSpec) -> bool:
    return layer.layer_role == "norm" and layer.in_features == spec.hidden and not layer.spans_heads


def _turned_elements(plan: Plan) -> tuple[float, float]:
    """Elements of queries and keys that are turned by their positions, and of the queries, keys and values that latent
    attention puts together from parts."""
    spec, tp = plan.spec, plan.mesh.size("tp")
    if spec.latent is not None:
        turned = plan.num_rows * spec.latent.rope * (spec.heads / tp + 1)
        return turned, 3.0 * plan.num_rows * spec.qk_features / tp
    kv = spec.kv_heads / spec.heads if spec.heads and spec.kv_heads else 1.0
    return (plan.num_rows * spec.qk_features * (1 + kv) / tp if not plan.spec.learns_positions else 0.0), 0.0


def _latent_elements(plan: Plan) -> float:
    """Elements of latents, which have norms of their own."""
    latent = plan.spec.latent
    features = (latent.q_rank or 0) + latent.kv_rank if latent else 0
    return prod(plan.tensor.activation_layout(None, plan).local(plan.num_rows, features, plan.mesh.sizes))


def _head_elements(block: BlockSpec, plan: Plan) -> float:
    """Elements of queries and keys that have norms of their own."""
    features = sum(x.in_features for x in block.layers if x.layer_role == "per_head" or x.spans_heads)
    return plan.num_rows * features / plan.mesh.size("tp")


def recomputed(plan: Plan, forward: float) -> float:
    """Seconds of the norms and activation functions of a forward pass that selective recomputation repeats."""
    norms = 2 * plan.stack.norm_bytes[0]
    residual, inside = SUMS[0] + norms, ACTIVATION[plan.spec.activation][0] * plan.spec.ffn / plan.spec.hidden
    return forward * (norms + inside) / (residual + inside)


def of_weights(elements: float, plan: Plan, rates: Rates) -> Both:
    """Seconds (forward, backward) that a microbatch spends on a rank's weights beside the products that read them.

    Forward rounds the stored weights to the compute dtype; backward widens their gradients, and adds them up where a
    step has several microbatches. FSDP rounds and widens only a rank's shard. Weights that ZeRO keeps in the compute
    dtype are not rounded; their gradients are widened where they are added up.
    """
    if rates.synchronous or plan.data.shards_weights:
        return 0.0, 0.0
    compute = BYTES[plan.precision.compute]
    stored, reduced = (BYTES[dtype] for dtype in (plan.precision.stored, plan.precision.reduce))
    keeps_rounded = plan.data.exchange_form(plan).gathers_rounded
    rounds = stored != compute and not keeps_rounded
    forward = backward = (stored + compute) * rounds
    if plan.batch.microbatches == 1:
        backward += (compute + reduced) * keeps_rounded
    else:
        backward += reduced if plan.stack.fused_accumulation else 2 * reduced + (reduced if rounds else compute)
    return elements * forward / rates.memory_bytes_s, elements * backward / rates.memory_bytes_s
