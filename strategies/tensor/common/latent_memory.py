"""Bytes that latent attention's layers save for backward, and bytes of gradients that wait meanwhile.

Forward runs the latents, then the queries, then keys and values, then the product; backward the other way round. r and
l: rows of the whole sequence and of a rank's slice; H: heads of a rank; f: features of a query or key of a head.

    latents      x, l h, once for all that read it; a norm keeps its input, with the shared key beside it
    q_b, kv_b    their latent, r wide
    product      q, k and v, r H f each, v with zeros behind it; so is its result, of which the row layer reads a copy
"""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec


def latent_layers(block: BlockSpec, plan: Plan) -> tuple[LayerSpec, ...]:
    """Those of `ModelSpec.latent_layers` that are in a block."""
    named = plan.spec.latent_layers
    return next((named[layer.name] for layer in block.layers if layer.name in named), ())


def shares_input(layer: LayerSpec, block: BlockSpec, plan: Plan) -> bool:
    """Whether a layer reads what an earlier one of them has kept already."""
    readers = [x for x in latent_layers(block, plan) if x.parameters and x.in_features == plan.spec.hidden]
    return layer in readers[1:]


def beside_norm(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
    """Features that a norm's input keeps alive because it is a part of a larger result."""
    layers = latent_layers(block, plan)
    before = layers[layers.index(layer) - 1] if layer in layers else layer
    return before.out_features - layer.in_features if before.layer_role == "linear" else 0


def waiting_features(layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[int, int]:
    """Features, by rows of the slice and by rows of the whole sequence, of gradients that wait during a layer's
    backward: of x or of the queries' latent beside the path of the keys, and of the queries beside that of the latent
    of keys and values."""
    sizes, layers = plan.spec.latent, latent_layers(block, plan)
    if sizes is None or layer not in layers:
        return 0, 0
    queries, values = layers[-2:]
    if layer is values:
        return 0, plan.spec.qk_features // plan.token_ranks
    if layer is queries:
        return 0, sizes.kv_rank + sizes.rope
    if sizes.q_rank is not None and layer in layers[:2]:
        return plan.spec.hidden, 0
    return (sizes.q_rank or plan.spec.hidden), 0


def product_gradients(layer: LayerSpec, block: BlockSpec, plan: Plan) -> int | None:
    """Bytes of the gradients of q, k and v on a rank, if the product of latent attention follows this layer; 0 if it is
    one of its other layers, None if it is none of them."""
    layers = latent_layers(block, plan)
    if layer not in layers:
        return None
    heads, rows = plan.spec.qk_features // plan.token_ranks, plan.num_rows // plan.sample_parts
    return 3 * rows * heads * BYTES[plan.precision.compute] if layer is layers[-1] else 0
