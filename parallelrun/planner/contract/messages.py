"""The messages of each strategy's algorithm as plain data, for `parallelrun explain`.

A strategy's `explain(plan)` returns an Explanation for the group of rank 0; other groups do the same with their own
tensors. A test checks that the sums of all messages equal the predicted calls and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec

WORDS = {  # contents of collectives whose purpose is not self-explanatory
    "tied": "gradients of the tied weight",
    "partial": "gradients that are partial sums",
    "parameters": "updated weights",
    "engine": "weights or gradients, by FSDP2",
}
MESH_AXES = {"data": "dp", "tensor": "tp", "pipeline": "pp", "expert": "ep", "context": "cp"}


@dataclass(frozen=True)
class ExplainedMessage:
    """A message from one rank to another. calls: number of transfers; the runtime splits long messages."""

    source: int
    target: int
    what: str
    payload_bytes: int
    purpose: str
    calls: int = 1


@dataclass(frozen=True)
class Call:
    """`calls` equal collectives over `ranks`, of `payload_bytes` in total. The backend chooses their messages."""

    operation: str
    ranks: tuple[int, ...]
    what: str
    payload_bytes: int
    axis: str
    purpose: str
    calls: int = 1


@dataclass(frozen=True)
class ExplainedRound:
    """Messages and collectives that run at the same time, before the next round."""

    title: str
    messages: tuple[ExplainedMessage, ...] = ()
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class ExplainedExchange:
    """Consecutive rounds. repeats: their number of repetitions in a step, such as one per microbatch."""

    title: str
    rounds: tuple[ExplainedRound, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Explanation:
    """The explanation of one strategy of a plan.

    axis: data | tensor | pipeline | expert | context. text: a description in sentences. source: the paper. ranks: the
    group whose messages are listed, one of `num_groups` equal groups. message_axis: the axis of its messages in the
    prediction.
    """

    axis: str
    kind: str
    text: str
    source: str
    ranks: tuple[int, ...]
    num_groups: int
    message_axis: str
    exchanges: tuple[ExplainedExchange, ...]


def explain(plan: Plan) -> tuple[Explanation, ...]:
    """The messages of the strategy of each axis with several ranks. Raises ConfigError for a plan of one rank."""
    if plan.world == 1:
        message = "one rank sends nothing, so there is nothing to explain"
        raise ConfigError(Problem(message, "world", "world=4", "parallelrun explain strategy=ring world=4"))
    axes = [
        (plan.tensor, plan.mesh.size("tp") > 1),
        (plan.context, plan.context is not None),
        (plan.expert, plan.expert is not None),
        (plan.pipeline, plan.mesh.size("pp") > 1),
        (plan.data, plan.num_data_ranks > 1 or plan.servers > 0),
    ]
    return tuple(strategy.explain(plan) for strategy, has_ranks in axes if has_ranks and strategy is not None)


def rows(explanation: Explanation, rank: int) -> list[Collective]:
    """The messages and collectives of `rank` in a step, as rows that can be compared with the prediction."""
    lines = []
    rounds = [(exchange.repeats, step) for exchange in explanation.exchanges for step in exchange.rounds]
    for repeats, step in rounds:
        for message in step.messages:
            calls, payload = repeats * message.calls, repeats * message.payload_bytes
            for operation, end, sent in (("send", message.source, payload), ("recv", message.target, 0)):
                if end == rank:
                    lines.append(Collective(explanation.message_axis, operation, message.purpose, calls, sent))
        for call in step.calls:
            if rank in call.ranks:
                calls, payload = repeats * call.calls, repeats * call.payload_bytes
                lines.append(Collective(call.axis, call.operation, call.purpose, calls, payload))
    return lines


def ranks_over(plan: Plan, axis: str, rank: int = 0) -> tuple[int, ...]:
    """The group of `rank` over a mesh axis (or several, joined by `+`), `embedding`, `world`, or an axis of the data
    strategy."""
    coordinate = plan.mesh.coordinate(rank) if rank < plan.num_workers else {}
    if (own := plan.data.members(axis, coordinate.get(plan.data_axis, 0))) is not None:
        everyone = plan.mesh.group_of(rank, plan.data_axis)
        return tuple(everyone[worker] for worker in own)
    if axis == "world":
        return tuple(range(plan.world))
    if axis == "embedding":
        coordinate = {mesh_dim: plan.mesh.coordinate(rank)[mesh_dim] for mesh_dim in plan.mesh.mesh_dim_names}
        ends = (plan.stages[0].pp_rank, plan.last_stage_pp_rank)
        return tuple(plan.mesh.rank(**{**coordinate, "pp": pp_rank}) for pp_rank in ends)
    return plan.mesh.group_of(rank, *axis.split("+"))


def calls_of(collectives: Iterable[Collective], plan: Plan, ranks: Sequence[int]) -> list[tuple[Call, ...]]:
    """Predicted collectives, which are equal on all of `ranks`, as calls: for each row, one per group of these ranks.

    Not for point-to-point rows, which do not contain the peers.
    """

    found_calls = []
    for row in collectives:
        message = WORDS.get(row.purpose, row.purpose.replace("_", " "))
        groups = dict.fromkeys(ranks_over(plan, row.axis, rank) for rank in ranks)
        call = Call(row.operation, (), message, row.payload_bytes, row.axis, row.purpose, row.calls)
        found_calls.append(tuple(replace(call, ranks=members) for members in groups))
    return found_calls


def explanation_of_calls(
    axis: str, kind: str, text: str, source: str, plan: Plan, collectives: Sequence[Collective]
) -> Explanation:
    """Explain a strategy that only uses collectives: one round for each predicted row of rank 0."""
    mesh_axis = MESH_AXES[axis]
    ranks = ranks_over(plan, mesh_axis)
    rounds = tuple(ExplainedRound(calls[0].what, calls=calls) for calls in calls_of(collectives, plan, ranks))
    exchange = ExplainedExchange("the collectives of one step", rounds)
    return Explanation(axis, kind, text, source, ranks, plan.mesh.num_ranks // len(ranks), mesh_axis, (exchange,))


def explanation_by_block(
    axis: str,
    kind: str,
    text_and_source: tuple[str, str],
    plan: Plan,
    message_axis: str,
    rounds_of: Callable[[BlockSpec, tuple[int, ...]], list[ExplainedRound]],
    repeats: int = 1,
) -> Explanation:
    """Explain a strategy that sends within blocks: `rounds_of` each block of rank 0's stages, over the ranks listed."""
    ranks, exchanges = ranks_over(plan, MESH_AXES[axis]), []
    for stage in plan.stages_of(plan.mesh.coordinate(0)["pp"]):
        for name in stage.blocks:
            if rounds := rounds_of(plan.spec.block(name), ranks):
                exchanges.append(ExplainedExchange(name, tuple(rounds), repeats))
    num_groups = plan.mesh.num_ranks // len(ranks)
    return Explanation(axis, kind, *text_and_source, ranks, num_groups, message_axis, tuple(exchanges))
