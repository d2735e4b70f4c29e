"""Traffic of a tensor strategy's layers in closed form; each layer multiplies as its `Product` says.

Per microbatch, all that the products of a block move (`parallelrun.planner.model.product.transfers`):
operands and their gradients in the compute dtype, gradients of weights in the dtype in which gradients are reduced. In
addition, over each axis that splits features, r being the rows of a rank:

    layernorm      all-gather of 2 numbers per row (mean, sum of squares about it); backward all-reduce of 2 r
    rmsnorm        all-reduce of r; backward all-reduce of r
    loss           all-reduce (max) of r, all-reduce of 2 r, both in the accurate dtype, by `loss_chunks`; backward
                   nothing

Partial gradients (of biases, norms, positions, and of weights over 2.5D's depth) are summed once per step: the data
strategy predicts that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.messages import ExplainedRound, Explanation, calls_of, explanation_by_block
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import (
    BACKWARD,
    FORWARD,
    RECOMPUTATION,
    TensorCollective,
    TensorStrategy,
)
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec
from parallelrun.planner.model.product import Product, Transfer, transfers

from . import step_memory
from .activation_memory import as_computed, rounded_bytes

AXIS = "tp"
PURPOSES, OTHER = {"w": "weights", "dw": "weight_gradients"}, "activations"  # purposes by operand; of all others


def overlaps(plan: Plan) -> bool:
    """Return whether one autograd node moves operands and multiplies. Never under a split backward, which would run
    such a node twice. Only such a node can gather again in backward: save_gathered=false always takes it."""
    return (plan.tensor.overlap or not plan.tensor.save_gathered) and not plan.pipeline.splits_backward


@dataclass(frozen=True)
class ProductTraffic(TensorStrategy):
    """A tensor strategy whose traffic follows from the product of each layer.

    explanation, source: for `explain`. skips_frozen: backward omits gradients that only frozen weights would need.
    """

    explanation: ClassVar[str]
    source: ClassVar[str]
    skips_frozen: ClassVar[bool] = True

    def saves_gathered(self, layer: LayerSpec, plan: Plan) -> bool:
        """Return whether backward reuses what forward gathered, instead of gathering it again."""
        return self.save_gathered

    def fuses(self, plan: Plan) -> bool:
        """Return whether one node moves and multiplies: it keeps weights as they are stored, and writes partial sums
        where they are sent from. Others round weights before it, and copy sums into a buffer."""
        return False

    def norm_axes(self, layer: LayerSpec, plan: Plan) -> tuple[str, ...]:
        """Return the axes over which the statistics of a norm are summed."""
        return self.activation_layout(layer, plan).features

    def recomputes_last_call(self, block: BlockSpec, forward: list[Collective], plan: Plan) -> bool:
        """Return whether full recomputation of a block also repeats the last collective of its forward pass."""
        return True

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """Blocks that are alike are looked at once."""
        if plan.mesh.size(AXIS) == 1:
            return []
        counts: Counter[tuple[str, str, str]] = Counter()
        payload: Counter[tuple[str, str, str]] = Counter()
        rows_by_class: dict[object, list[Collective]] = {}
        for block in blocks:
            is_last, reached = block.name == plan.spec.blocks[-1].name, self.has_input_gradient(block.layers[0], plan)
            alike = plan.spec.first_alike[block.name], is_last, reached
            if alike not in rows_by_class:
                rows_by_class[alike] = [call.row for call in self.traffic(block, plan)]
            for call in rows_by_class[alike]:
                counts[call.key] += plan.batch.microbatches * call.calls
                payload[call.key] += plan.batch.microbatches * call.payload_bytes
        return [Collective(*key, calls=counts[key], payload_bytes=payload[key]) for key in sorted(counts)]

    def traffic(self, block: BlockSpec, plan: Plan) -> list[TensorCollective]:
        both = [(x.name.removeprefix(f"{block.name}."), *self._of_layer(x, plan)) for x in as_computed(block.layers)]
        forward = [row for _, rows, _ in both for row in rows]
        again = forward if plan.runs_again and block.is_recomputed and self._trains(block, plan) else []
        if again and not self.recomputes_last_call(block, forward, plan):
            again = again[:-1]
        loss = self._of_loss(plan) if block.name == plan.spec.blocks[-1].name else []
        return [
            *(TensorCollective(FORWARD, layer, row) for layer, rows, _ in both for row in rows),
            *(TensorCollective(FORWARD, "", row) for row in loss),
            *(TensorCollective(RECOMPUTATION, "", row) for row in again),
            *(TensorCollective(BACKWARD, layer, row) for layer, _, rows in reversed(both) for row in rows),
        ]

    def explain(self, plan: Plan) -> Explanation:
        """The collectives of the blocks of rank 0."""

        def rounds_of(block: BlockSpec, ranks: tuple[int, ...]) -> list[ExplainedRound]:
            return [
                ExplainedRound(message.title, calls=calls_of([message.row], plan, ranks)[0])
                for message in self.traffic(block, plan)
            ]

        about = self.explanation, self.source
        return explanation_by_block("tensor", self.kind, about, plan, AXIS, rounds_of, plan.batch.microbatches)

    def rounded_again_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Only of weights that a product reads as they are stored: gathered ones are counted as operands."""
        if block.backward is not None:
            return step_memory.rounded_again_bytes(block, plan)
        if self.fuses(plan):
            return 0
        size = 0
        for layer in block.layers:
            product = self.product_of(layer, plan)
            if product and all(plan.mesh.size(axis) == 1 for axis in product.gather_w):
                size += rounded_bytes((parameter for parameter in layer.parameters if len(parameter.shape) == 2), plan)
        return size

    def recomputed_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Where the last product's partial sums are scattered again: the gradient of its result and its gathered copy,
        which its backward has before it asks for what was saved; the sums, what arrives of them, the result; the
        norm's output, which the functions that run still hold, and the residual, unless it is saved."""
        if block.backward is not None:
            return step_memory.recomputed_bytes(block.backward, plan)
        last = next((layer for layer in reversed(block.layers) if layer.layer_role == "row_parallel"), None)
        product = self.product_of(last, plan) if last else None
        parts = plan.mesh.size(product.scatter_y.axis) if product and product.scatter_y else 1
        if last is None or product is None or parts == 1 or not self.recomputes_last_call(block, [], plan):
            return 0
        own = prod(product.y.local(plan.num_rows, last.out_features, plan.mesh.sizes))
        arriving = parts if plan.device == "cpu" else 0  # gloo's reduce-scatter receives as much as it sends
        gathered = 0 if block.reads_sum(0.0) else parts  # a norm of the sums is the first to ask
        residual = not self.saves_input(block, plan)
        behind = self.layer_backwards(block, plan)[block.layers.index(last) - len(block.layers) + 1 :]
        later = sum(layer.kept for layer in behind) if last is not block.layers[-1] else 0
        return (1 + gathered + parts + arriving + 2 + residual) * own * BYTES[plan.precision.compute] - later

    def transfers_of(self, layer: LayerSpec, plan: Plan) -> list[Transfer]:
        """Return what one microbatch of a layer with a product moves; without backward where nothing before trains."""
        product = self.product_of(layer, plan)
        if product is None:
            return []
        weights = (*layer.parameters, *((plan.spec.parameters[layer.tied],) if layer.tied else ()))
        wants_input = self.has_input_gradient(layer, plan)
        wants_weight = any(not parameter.frozen for parameter in weights if len(parameter.shape) > 1)
        pixels = layer.areas[layer.layer_role == "row_parallel"] if layer.areas else 1  # of what is summed
        messages = transfers(
            product, plan.num_rows * pixels, layer.in_features, layer.out_features, plan.mesh.sizes,
            save_gathered=self.saves_gathered(layer, plan), input_gradient=wants_input, weight_gradient=wants_weight,
        )  # fmt: skip
        runs_backward = wants_weight or (wants_input and not product.lookup)
        return messages if runs_backward else [transfer for transfer in messages if transfer.phase == "forward"]

    def _of_layer(self, layer: LayerSpec, plan: Plan) -> tuple[list[Collective], list[Collective]]:
        """(what is sent in forward, in backward)."""
        if layer.layer_role == "norm":
            forward, backward = self._of_norm(layer, plan)
            return forward, backward if self.has_input_gradient(layer, plan) else []
        phases: tuple[list[Collective], list[Collective]] = [], []
        for transfer in self.transfers_of(layer, plan):
            dtype = plan.precision.reduce if transfer.operand == "dw" else plan.precision.compute
            size = transfer.calls * transfer.elements * BYTES[dtype]
            purpose = PURPOSES.get(transfer.operand, OTHER)
            row = Collective(transfer.axis, transfer.operation, purpose, transfer.calls, size)
            phases[transfer.phase == "backward"].append(row)
        return phases

    def _of_norm(self, layer: LayerSpec, plan: Plan) -> tuple[list[Collective], list[Collective]]:
        """Statistics of rows whose features are split."""
        size = (
            self.activation_layout(layer, plan).local(plan.num_rows, layer.in_features, plan.mesh.sizes)[0]
            * BYTES[plan.precision.accurate]
        )
        split = [axis for axis in self.norm_axes(layer, plan) if plan.mesh.size(axis) > 1]
        if plan.spec.norm == "rmsnorm":
            both = [Collective(axis, "all_reduce", "norm", 1, size) for axis in split]
            return both, both
        return (
            [Collective(axis, "all_gather", "norm", 1, plan.mesh.size(axis) * 2 * size) for axis in split],
            [Collective(axis, "all_reduce", "norm", 1, 2 * size) for axis in split],
        )

    def _of_loss(self, plan: Plan) -> list[Collective]:
        """The largest logit, then both sums at once, over the axes that split the vocabulary."""
        product = self.head_product(plan)
        if product is None:
            return []
        targets = plan.batch.micro_batch * plan.spec.targets_per_sample // plan.mesh.size("cp")
        size = product.y.local(targets, plan.spec.vocab, plan.mesh.sizes)[0] * BYTES[plan.precision.accurate]
        split = [axis for axis in product.y.features if plan.mesh.size(axis) > 1]
        losses = 1 + plan.spec.mtp_depth
        both = [(losses * plan.loss_chunks, losses * factor * size) for factor in (1, 2)]
        return [Collective(axis, "all_reduce", "loss", *sent) for axis in split for sent in both]

    def has_input_gradient(self, layer: LayerSpec, plan: Plan) -> bool:
        """Return whether backward computes the gradient of a layer's input. The model's own input has none."""
        if not self.skips_frozen:
            return layer.name != plan.spec.blocks[0].layers[0].name
        for before in plan.spec.layers():
            if before.name == layer.name:
                return False
            if any(not parameter.frozen for parameter in before.parameters):
                return True
        return False

    def _trains(self, block: BlockSpec, plan: Plan) -> bool:
        """Return whether backward goes through the block at all."""
        trained = any(not p.frozen for p in block.parameters)
        return not self.skips_frozen or trained or self.has_input_gradient(block.layers[0], plan)

    def head_product(self, plan: Plan) -> Product | None:
        """Return the product that gives the logits; None for a model without a head."""
        head = next((layer for layer in plan.spec.blocks[-1].layers if layer.layer_role == "head"), None)
        return self.product_of(head, plan) if head else None
