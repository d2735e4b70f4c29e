"""Sample sets for BatchNorm statistics, defined by global sample index, so that no plan changes the model.

`model.norm_samples` = G: sets of G consecutive samples; null: the global batch; `local`: the micro-batch of this plan,
stored as a number, so that the single-device reference has the same sets.
"""

from __future__ import annotations

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.precision import BYTES
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.parameters import module_layout
from parallelrun.planner.contract.plan import Plan, SampleSets
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE, BlockSpec

KEY = "model.norm_samples"
LOCAL = "local"
PURPOSE = "statistics"


def resolve(request: Request, data: DataStrategy) -> tuple[SampleSets | None, list[Problem]]:
    """(the sets of the plan, None for a model without BatchNorm; violations). The request has no other violations."""
    if not any(layer.layer_role == SAMPLE_SET_ROLE for layer in request.spec.layers()):
        return None, []
    assert request.batch is not None
    batch, requested = request.batch, request.config.model.norm_samples
    size, text = batch.global_batch if requested is None else batch.micro_batch, str(requested)
    if requested is not None and text != LOCAL:
        size = int(text) if text.isdecimal() else 0
        if not size or batch.global_batch % size:
            close = nearest(size or batch.micro_batch, divisors(batch.global_batch))
            around = [n for n in close if n > 1 or batch.global_batch == 1]
            message = f"{KEY}={requested} does not divide global_batch={batch.global_batch} into equal sets"
            return None, [Problem(message, KEY, f"{either(KEY, around)}, {LOCAL} or null", kind="arithmetic")]
    sets = SampleSets(size, spread=batch.micro_batch % size != 0, exchanged=data.shares_statistics and request.dp > 1)
    said = f"{KEY}={size}" if requested is not None else f"{KEY} (unset: the global batch)"
    fix = f"{either(KEY, nearest(min(size, batch.micro_batch), divisors(batch.micro_batch)))} or {KEY}={LOCAL}"
    if sets.spread and batch.microbatches > 1:
        message = (
            f"{said}: a set of {size} samples needs several of the {batch.microbatches} microbatches of "
            f"{batch.micro_batch}, and each is normalised before the next is read"
        )
        first = "microbatches=1 or " if request.pp == 1 else ""
        return sets, [Problem(message, KEY, first + fix, kind="undefined")]
    if sets.spread and not data.in_step:
        message = (
            f"{said}: a set of {size} samples is split over data replicas, which do not step together under {data.kind}"
        )
        return sets, [Problem(message, KEY, fix, kind="undefined")]
    return sets, []


def check_replay(plan: Plan) -> None:
    """Raise ConfigError if a set spans several replicas of a plan whose replay trains them one after the other."""
    sets, in_turn = plan.sample_sets, plan.equivalence.kind == "replay" and not plan.data.has_servers
    if in_turn and sets is not None and sets.spread and plan.mesh.size("dp") > 1:
        message = (
            f"verify runs the replicas of {plan.data.kind} in turn, so no sample set of BatchNorm may span several"
        )
        raise ConfigError(Problem(message, KEY, f"{KEY}={LOCAL}"))


def filled(config_value: str | None, sets: SampleSets | None) -> tuple[str, ...]:
    """The sentence on a size that was filled in; empty otherwise."""
    if sets is None or config_value not in (None, LOCAL):
        return ()
    return (f"{KEY}={sets.size} (filled: {'the global batch' if config_value is None else 'the micro-batch'})",)


def collectives(blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
    """One rank's traffic for the BatchNorms of `blocks` in a steady step.

    Sets that are split over replicas: the sums of every set, one call per layer and pass (forward in fp64, repeated by
    recompute=full). Other sets: the replicas' means for the running statistics, in one call.
    """
    sets = plan.sample_sets
    if sets is None or not sets.exchanged:
        return []
    norms = [
        (block, module_layout(weight, plan).local_numel(weight.shape, plan.mesh.sizes, {}))
        for block in blocks
        for layer in block.layers
        if layer.layer_role == SAMPLE_SET_ROLE
        for weight in layer.parameters[:1]
    ]
    wide, accurate = BYTES["float64"], BYTES[plan.precision.accurate]
    if not sets.spread:
        payload = 2 * wide * sum(channels for _, channels in norms)
        return [Collective("dp", "all_reduce", PURPOSE, 1, payload)] if norms else []
    num_sets = plan.batch.global_batch // sets.size
    calls = payload = 0
    for block, channels in norms:
        forwards = 2 if plan.runs_again and block.is_recomputed else 1
        calls += forwards + 1
        payload += 2 * channels * num_sets * (forwards * wide + accurate)
    return [Collective("dp", "all_reduce", PURPOSE, calls, payload)] if norms else []


def number(plan: Plan) -> str | None:
    """The resolved `model.norm_samples` for the frozen config and the reference; None without BatchNorm."""
    return str(plan.sample_sets.size) if plan.sample_sets is not None else None
