"""The base class of the built-in tensor strategies, with what layers save for backward and need in it.

One formula for every way of multiplying: a `Product` says how operands are split, gathered and scattered. Saved tensors
are counted per storage, as autograd keeps them: once, however many nodes save them. r and f are a rank's rows and
features of the activation that a layer reads.

    layer          saved by forward                               in backward: gradients read and given, scratch
    norm           its input r f and its statistics               r f, r f
    column, head   its input r f, or what was gathered of it;     Y, X; what backward gathers and scatters
                   W where it was gathered
    attention      q, k, v and one statistic per row and head     attention's result, then q, k and v's gradients
    activation     what it reads                                  its result, what it reads
    row            its input, or what was gathered of it, and W   Y, X; what backward gathers and scatters
    linear         its input and what the activation reads        as a head
    dropout        a byte per element
    embedding      ids, or the rows of the table that are read; a byte per token where other ranks' rows are masked
    loss           the logits and two numbers per row             see `loss_memory`

Beside a branch waits the gradient that goes past it. Weights rounded to the compute dtype are rounded again in backward
rather than kept. Recompute `selective` leaves out what norms and activations give; backward brings it back. A norm
whose features are split sends something, so it is not computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.parameters import block_dtypes
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.model.model_spec import GATED, MEASURED, BlockSpec, LayerSpec
from parallelrun.planner.model.product import ActivationLayout, Product, degree, num_panels, transfers

from . import expert_memory, latent_memory, loss_memory, module_memory, step_memory
from .activation_memory import (
    INDEX,
    MASK,
    activates_again,
    activation_bytes,
    adds_to_head,
    as_computed,
    attends,
    attention_bytes,
    float8_bytes,
    follows_attention,
    head_norm_bytes,
    norm_bytes,
    recomputes_norms,
    rounded_bytes,
    scratch_behind,
    weight_gradients,
)
from .traffic import AXIS, ProductTraffic, overlaps

MULTIPLY = ("column_parallel", "row_parallel", "linear", "head")
RESIDUAL_KINDS = ("transformer", "mlp")


@dataclass(frozen=True)
class ProductStrategy(ProductTraffic):
    """A tensor strategy whose traffic and memory follow from the product of each layer."""

    def local_outputs(self, layer: LayerSpec, product: Product, plan: Plan) -> int:
        """Return the features of all outputs of a layer together, on one rank."""
        return product.y.local(1, layer.out_features, plan.mesh.sizes)[1]

    def shared_bytes(self, layer: LayerSpec, product: Product, plan: Plan) -> int:
        """Return what attention keeps alive beyond q, k and v because they are views of one buffer."""
        return 0

    def moved_bytes(self, layer: LayerSpec, product: Product, plan: Plan) -> tuple[int, int]:
        """Return the bytes that a product's backward gathers and scatters: (for the input's gradient, the weights').

        Over gloo our reduce-scatter receives as much as it sends. All-reduces are in place. Panels go two at a time:
        while one is multiplied, the next arrives, and while its product is summed over ranks, so still is the last
        one. A rank has a panel of its own, which it need not receive.
        """
        sizes, total = plan.mesh.sizes, [0, 0]
        shape = plan.num_rows, layer.in_features, layer.out_features
        parts = num_panels(product, sizes) if product.panels else 1
        saved, copies = self.saves_gathered(layer, plan), product.panels
        for move in transfers(product, *shape, sizes, save_gathered=saved, within_rank=copies):
            if move.phase == "backward" and move.operation != "all_reduce":
                dtype = plan.precision.reduce if move.operand == "dw" else plan.precision.compute
                times = 1 + (move.operation == "reduce_scatter") * ((plan.device == "cpu") + (not self.fuses(plan)))
                at_once = min(2, parts - (move.operation == "broadcast")) if product.panels else 1
                total[move.operand == "dw"] += times * at_once * BYTES[dtype] * move.elements
        return total[0], total[1]

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Return the bytes on the rank that saves most. Full recomputation saves a block's input: of the first block
        of images or of a user's module the batch, which is counted anyway."""
        if not plan.runs_again or not block.is_recomputed:
            return sum(backward.kept for backward in self.layer_backwards(block, plan))
        loss = sum(backward.kept for backward in self._measured_loss(block, plan))
        if (plan.spec.kind == "images" or block.kind == MEASURED) and block.name == plan.spec.blocks[0].name:
            return loss
        if block.input_shape:
            return prod(plan.input_shape(block)) * BYTES[plan.precision.compute]
        return loss + _bytes(self.activation_layout(None, plan), plan.spec.hidden, plan)

    def saves_input(self, block: BlockSpec, plan: Plan) -> bool:
        """No norm of split features does, and no product that gathers it."""
        if block.backward is not None:
            return block.backward.saves_input
        first, sizes = block.layers[0], plan.mesh.sizes
        product = self.product_of(first, plan)
        if first.layer_role == "norm":
            return degree(self.activation_layout(first, plan).features, sizes) == 1
        return product is None or "x" not in self._gathered(first, product, plan)

    def layer_backwards(self, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """The loss comes behind the last layer of the model."""
        # full recomputation saves other tensors, but runs the same backward pass over them
        key = "layer backwards", block.name, plan.recompute == "selective", block_dtypes(block.name, plan)
        return once(plan.blocks_cache, key, lambda: self._layer_backwards(block, plan))

    def _layer_backwards(self, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        if block.backward is not None:
            layers = {layer.name: layer for layer in block.layers}
            weights = {name: weight_gradients(x, plan) for name, x in layers.items()}
            return tuple(
                step_memory.step_backward(step, layers.get(step.layer), weights.get(step.layer, 0), plan)
                for step in block.backward.steps
            )
        if module_memory.says_itself(block, plan):
            return (module_memory.stated_backward(block, plan), *self._measured_loss(block, plan))
        in_order, of_loss = as_computed(block.layers), self._loss_backwards(block, plan)
        losses = 1 + plan.spec.mtp_depth
        if of_loss and plan.loss_chunks > 1:
            in_order, head = in_order[:-losses], in_order[-losses]
            product = self.product_of(head, plan)
            assert product is not None, "the last layer gives the logits"
            sizes = weight_gradients(head, plan), sum(self.moved_bytes(head, product, plan))
            of_loss = losses * loss_memory.chunked_backwards(head, product, *sizes, plan)
        backwards = [backward for layer in in_order for backward in self._layer_backward(layer, block, plan)]
        if of_loss and losses > 1 and plan.loss_chunks == 1:
            heads = backwards[-losses:]
            return (*backwards[:-losses], *loss_memory.of_depths(heads, of_loss[0], self.head_product(plan), plan))
        return (*backwards, *of_loss)

    def _loss_backwards(self, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """Of the model's last block, the loss."""
        is_last = block.name == plan.spec.blocks[-1].name
        return (loss_memory.loss_backward(self.head_product(plan), plan),) if is_last else ()

    def _measured_loss(self, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """The loss after a user's module, whose measurement does not contain it."""
        return self._loss_backwards(block, plan) if block.kind == MEASURED else ()

    def _layer_backward(self, layer: LayerSpec, block: BlockSpec, plan: Plan) -> tuple[LayerBackward, ...]:
        """A column layer's second part is what reads its outputs: attention or an activation."""
        product, saved = self.product_of(layer, plan), self._saved(layer, block, plan)
        between = _bytes(self.activation_layout(None, plan), plan.spec.hidden, plan)
        waiting = between if block.kind in RESIDUAL_KINDS else 0
        waiting += self._beside(layer, block, plan)
        if layer.layer_role == "expert":
            return expert_memory.backwards(layer, block, waiting, plan)
        if layer.is_adapter:
            weights = weight_gradients(layer, plan)
            return (module_memory.factor_backward(layer, waiting, weights, plan),)
        if product is None or layer.layer_role not in MULTIPLY:
            norm = 0
            if layer.layer_role == "norm":
                norm = between = _bytes(self.activation_layout(layer, plan), layer.in_features, plan)
            own = weight_gradients(layer, plan)
            scratch = own if adds_to_head(layer, plan) else 0
            if product is not None and product.lookup:
                scratch = max(scratch, sum(self.moved_bytes(layer, product, plan)))
            return (LayerBackward(saved, waiting + between, norm, scratch, own, norm),)
        gives, own = _bytes(product.x, layer.in_features, plan), weight_gradients(layer, plan)
        scratch, of_weights = self.moved_bytes(layer, product, plan)
        again = gives if self._recomputes_input(layer, product, block, plan) else 0
        scratch += again + (layer.input_gradients - 1) * gives
        widened = max((rounded_bytes([parameter], plan) for parameter in layer.parameters), default=0)
        if self.fuses(plan):  # a node frees nothing before it ends
            of_weights, widened = of_weights + widened, 0
        rows, compute = product.y.local(plan.num_rows, 1, plan.mesh.sizes)[0], BYTES[plan.precision.compute]
        reads = rows * self.local_outputs(layer, product, plan) * compute
        scratch += float8_bytes(layer, block, (reads, gives, own), plan)
        parts = plan.mesh.size(product.scatter_y.axis) if product.scatter_y else 1
        gathered = reads * (parts + (parts > 1 and any(len(p.shape) == 1 for p in layer.parameters)))  # a bias: its own
        arriving = waiting if layer.layer_role == "row_parallel" else waiting + reads
        first = LayerBackward(saved, arriving, gives, scratch, own, gathered, 0, of_weights, max(0, widened - again))
        of_product = latent_memory.product_gradients(layer, block, plan) if layer.layer_role == "column_parallel" else 0
        if of_product == 0:
            return (first,)
        mixed = _read_behind(layer, product, reads, plan)
        behind = self._behind(layer, block, product, plan)
        if of_product is not None:
            waiting -= self._beside(layer, block, plan)
        passing = scratch_behind(layer, block, mixed, plan)
        return replace(first, kept=saved - behind), LayerBackward(behind, waiting + mixed, of_product or reads, passing)

    def _beside(self, layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
        """Bytes of the gradients of latent attention that wait while a layer of it runs backward."""
        of_slice, of_whole = latent_memory.waiting_features(layer, block, plan)
        sliced = _bytes(self.activation_layout(None, plan), of_slice, plan) if of_slice else 0
        return sliced + plan.num_rows // plan.sample_parts * of_whole * BYTES[plan.precision.compute]

    def _saved(self, layer: LayerSpec, block: BlockSpec, plan: Plan) -> int:
        role, product = layer.layer_role, self.product_of(layer, plan)
        if role == "norm":
            rows, features = self.activation_layout(layer, plan).local(
                plan.num_rows, layer.in_features, plan.mesh.sizes
            )
            if features == layer.in_features:
                beside = rows * latent_memory.beside_norm(layer, block, plan) * BYTES[plan.precision.compute]
                return norm_bytes(rows, layer, plan) + beside
            return rows * (features * BYTES[plan.precision.compute] + BYTES[plan.precision.accurate])
        if role == "dropout":
            elements = prod(
                self.activation_layout(layer, plan).local(plan.num_rows, layer.out_features, plan.mesh.sizes)
            )
            return elements * MASK if plan.dropout > 0 else 0
        if role == "router":
            return expert_memory.input_bytes(block, plan) + expert_memory.routing_bytes(plan)
        if product is not None and product.lookup:  # a gathered table is read by index
            masked = plan.mesh.size(AXIS) > 1 and not product.gather_w
            rows = product.x.local(plan.num_rows, 1, plan.mesh.sizes)[0]
            return rows * (INDEX + (MASK if masked else 0))
        if product is None or role not in MULTIPLY:
            return 0
        saved = self._operands(layer, product, block, plan) + self._behind(layer, block, product, plan)
        if not plan.spec.normalises_heads or not attends(layer):
            return saved
        rows, outputs = product.y.local(plan.num_rows, 1, plan.mesh.sizes)[0], self.local_outputs(layer, product, plan)
        return saved + head_norm_bytes(rows, outputs, layer, plan)

    def _gathered(self, layer: LayerSpec, product: Product, plan: Plan) -> dict[str, int]:
        """Elements of the operands that forward gathers and backward reads; of several gathers the last is largest."""
        if not self.saves_gathered(layer, plan):
            return {}
        moved = transfers(product, plan.num_rows, layer.in_features, layer.out_features, plan.mesh.sizes)
        return {m.operand: m.elements for m in moved if m.phase == "forward" and m.operation == "all_gather"}

    def _recomputes_input(self, layer: LayerSpec, product: Product, block: BlockSpec, plan: Plan) -> bool:
        """Whether backward computes X again: the result of a norm of whole rows or of an activation, not gathered."""
        if "x" in self._gathered(layer, product, plan):
            return False
        if layer.layer_role == "linear" and layer not in latent_memory.latent_layers(block, plan):
            return False
        if layer.layer_role == "row_parallel":
            return not follows_attention(layer, block) and activates_again(block, plan)
        return recomputes_norms(block, plan) and degree(product.x.features, plan.mesh.sizes) == 1

    def _operands(self, layer: LayerSpec, product: Product, block: BlockSpec, plan: Plan) -> int:
        """X, as the layer before gave it, or a gathered copy; W where it was gathered (nodes of their own save it
        without padding). torch's attention keeps its result for itself, unless the row layer has read a copy; relu
        always does."""
        compute, gathered = BYTES[plan.precision.compute], self._gathered(layer, product, plan)
        weight = gathered.get("w", 0)
        if weight and not overlaps(plan):
            weight = product.gathered_weight.local_numel((layer.out_features, layer.in_features), plan.mesh.sizes, {})
        own = _bytes(product.x, layer.in_features, plan)
        if self._recomputes_input(layer, product, block, plan) or latent_memory.shares_input(layer, block, plan):
            own = 0
        if "x" in gathered:
            if layer.layer_role != "row_parallel":
                saves_input = False
            elif follows_attention(layer, block):
                copied = plan.spec.kv_heads != plan.spec.heads or plan.spec.latent is not None
                saves_input = (not plan.spec.attention_dropout and not copied) or block.attention.own_scores
            else:
                saves_input = plan.spec.activation == "relu"
            own = gathered["x"] * compute + (own if saves_input else 0)
        return own + weight * compute

    def _behind(self, layer: LayerSpec, block: BlockSpec, product: Product, plan: Plan) -> int:
        """Return the gradient bytes of the operation behind a layer (an activation or attention)."""
        rows, outputs = product.y.local(plan.num_rows, 1, plan.mesh.sizes)[0], self.local_outputs(layer, product, plan)
        of_product = latent_memory.product_gradients(layer, block, plan)
        if of_product == 0:
            return 0  # norms and the product keep what they read
        if layer.layer_role == "linear":  # in a head, an activation follows
            return rows * outputs * BYTES[plan.precision.compute] if block.kind == "head" else 0
        if layer.layer_role != "column_parallel":
            return 0
        if not attends(layer):
            return activation_bytes(rows, outputs, plan)
        parts = degree(product.y.features, plan.mesh.sizes)
        outputs = 3 * plan.spec.qk_features // parts if of_product else outputs
        shared = 0 if block.attention.own_scores else self.shared_bytes(layer, product, plan)
        return attention_bytes(rows, plan.spec.heads // parts, outputs, block, plan) + shared


def _bytes(layout: ActivationLayout, features: int, plan: Plan) -> int:
    """Bytes of a rank's part of an activation in the compute dtype."""
    return prod(layout.local(plan.num_rows, features, plan.mesh.sizes)) * BYTES[plan.precision.compute]


def _read_behind(layer: LayerSpec, product: Product, outputs: int, plan: Plan) -> int:
    """Bytes of the gradient of the result that attention or an activation computes from a column layer's outputs."""
    if attends(layer):
        heads = product.y.local(plan.num_rows, plan.spec.qk_features, plan.mesh.sizes)
        return prod(heads) * BYTES[plan.precision.compute]
    return outputs // 2 if plan.spec.activation in GATED and len(layer.parameters) > 1 else outputs
