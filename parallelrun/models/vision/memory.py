"""Bytes that an image classifier's operations save for backward, and bytes of their gradients.

    convolution, norm, pooling, linear    their input
    max-pooling                           also an index of every output
    relu                                  its output

Of a block with a shortcut, backward runs through the shortcut first: until it is over, the gradient of the sum waits
for the other branch; then what it gives waits for the sum of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from parallelrun.models.vision import operations as ops
from parallelrun.planner.model.model_spec.backward import BackwardStep, BlockBackward


def backward_of(
    block: ops.OperationBlock, shape: ops.Shape, input_is_kept: bool, is_first: bool, is_split: bool
) -> tuple[BlockBackward, bool]:
    """(the backward pass of a block, whether its output is kept). Each saved tensor counts once.

    shape: of the block's input. input_is_kept: the block before keeps it already. is_first: nobody needs its gradient.
    is_split: tensor parallelism splits the channels of a block without a shortcut.
    """
    saves_input = not input_is_kept and block.operations[0].saves_input
    gives = 0 if is_first else prod(shape)
    if block.shortcut is None:
        steps, is_kept = _branch(block, block.operations, shape, input_is_kept, gives, is_split=is_split)
        return BlockBackward(saves_input, steps), is_kept
    of_sum = prod(block.out(shape))
    waits = prod(shape) if block.shortcut else of_sum  # without operations, the gradient of the sum is that of x
    main, _ = _branch(block, block.operations, shape, input_is_kept, gives, waits, not block.shortcut)
    beside, _ = _branch(block, block.shortcut, shape, input_is_kept or saves_input, gives, of_sum, True)
    relu = BackwardStep("", of_sum, of_sum, of_sum)  # keeps its output
    return BlockBackward(saves_input, (*main, *beside, relu), len(main)), True


def _branch(
    block: ops.OperationBlock,
    operations: Sequence[ops.Operation],
    shape: ops.Shape,
    is_kept: bool,
    gives: int,
    waiting: int = 0,
    last_waits_itself: bool = False,
    is_split: bool = False,
) -> tuple[tuple[BackwardStep, ...], bool]:
    """(the steps of one branch, whether its output is kept). gives: elements of the gradient of its input. waiting: of
    gradients that wait meanwhile; last_waits_itself: they are the gradient that arrives at the last operation."""
    parts, shapes, splits = [], ops.flow(operations, shape), ops.splits(operations, is_split)
    for number, (operation, before, after) in enumerate(zip(operations, shapes, shapes[1:])):
        pools, passes = isinstance(operation, ops.MaxPoolOp), isinstance(operation, ops.FlattenOp | ops.DropoutOp)
        saved = prod(before) if operation.saves_input and not is_kept else 0
        saved += prod(after) if operation.saves_output else 0
        is_kept = operation.saves_output or (is_kept and passes)
        if isinstance(operation, ops.FlattenOp):
            continue  # a view
        layer = operation.layer(block.name, before)
        parts.append(
            BackwardStep(
                layer=layer.name if layer else "",
                kept=saved,
                arriving=prod(after),
                giving=prod(before) if number else gives,
                indices=prod(after) if pools else 0,
                waiting=waiting,
                waits_itself=last_waits_itself and number == len(operations) - 1,
                normalises=isinstance(operation, ops.BatchNormOp),
                sums=not number and waiting > 0 and not last_waits_itself,
                reads_split=splits[number],
                gives_split=splits[number + 1],
            )
        )
    return tuple(parts), is_kept
