"""The requests that fsdp refuses."""

from __future__ import annotations

from dataclasses import replace

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.planner.contract.classes import splits_backward, tensor_strategy
from parallelrun.planner.contract.request import Request

from ..common.keys import FSDPConfig


def check(request: Request) -> list[Problem]:
    """Return what is wrong with the sizes of shards, and with settings under a split backward."""
    return [*_check_shard(request), *_check_split_backward(request), *_check_empty_vocabulary_shard(request)]


def _check_shard(request: Request) -> list[Problem]:
    shard, dp = FSDPConfig.of(request.config).shard, request.num_data_ranks
    if shard is None or dp == 1:
        return []
    legal = [n for n in range(2, dp + 1) if dp % n == 0]
    if shard in legal:
        return []
    where, nearest = "strategy.data.shard", min(legal, key=lambda n: (abs(n - shard), n))
    if shard == 1:
        message = "strategy.data.shard=1 splits nothing: that is ddp"
        return [Problem(message, where, f"strategy.data.kind=ddp, or strategy.data.shard={nearest}", kind="undefined")]
    message = f"strategy.data.shard={shard} does not divide dp={dp}"
    return [Problem(message, where, f"strategy.data.shard={nearest}", kind="arithmetic")]


def _check_empty_vocabulary_shard(request: Request) -> list[Problem]:
    """torch's FSDP2 cannot reduce a gradient without elements: every tensor rank needs a row of the vocabulary, which
    is smaller than tp only in examples."""
    rows, tp = request.spec.vocab, request.tp
    if request.num_data_ranks == 1 or tp == 1 or _smallest_part(request):
        return []
    fits = max(degree for degree in range(1, tp) if _smallest_part(replace(request, tp=degree)))
    message = f"vocab {rows} over tp={tp} leaves a rank without rows, which torch's FSDP2 cannot reduce"
    return [Problem(message, "tp", f"tp={fits} or strategy.data.kind=zero1", kind="not_built")]


def _smallest_part(request: Request) -> int:
    """Rows of the vocabulary on the tensor rank that holds fewest."""
    parts = tensor_strategy(request.config.strategy.tensor.kind).vocab_degrees(request)
    sizes = {str(axis): degree for axis, degree in enumerate(parts)}
    last = {axis: degree - 1 for axis, degree in sizes.items()}
    return Layout((tuple(sizes),)).local_shape((request.spec.vocab,), sizes, last)[0]


def _check_split_backward(request: Request) -> list[Problem]:
    """Where backward is split, both of its passes go through the complete stage at once: each would gather all of its
    weights again, three times a microbatch, and no less would be held than without freeing them."""
    if not splits_backward(request) or not FSDPConfig.of(request.config).reshard_after_forward:
        return []
    where, kind = "strategy.data.reshard_after_forward", request.config.strategy.pipeline.kind
    message = (
        f"{where}=true under schedule={kind}: its weight gradients come after the backward that would free the weights"
    )
    return [Problem(message, where, f"{where}=false, or schedule=1f1b", kind="undefined")]
