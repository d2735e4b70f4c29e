"""Base of the expert dispatchers' plans: checks, mesh dims, traffic and memory in closed form.

Per microbatch and layer with experts, a row is `hidden` numbers of the compute dtype. One level of the all-to-all (two
on two levels) brings rows from source to destination. Rows cross it four times, as many as there are on that side:

    dispatch  forward   rows before the level        its gradient, backward   rows after the level
    combine   forward   rows after the level         its gradient, backward   rows before the level

Full recomputation sends both forward messages again: the weighted sum over what comes back is the last operation and
needs it for the gradients of the weights. Chunks make more calls of the same bytes. Evaluation is not counted.

Where ep spans tp, the ranks of tp with the same tokens divide them. The scores of routing groups are gathered over
these ranks in forward. Unless the tensor strategy gives slices of sequences, results of all tokens are gathered in
forward, and their gradients in backward.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.models.moe.memory import num_kept, num_own, num_routed, num_sharing, num_slots, router_of
from parallelrun.models.moe.spec import has_own_router
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import FlattenedDims, MeshDims
from parallelrun.planner.contract.expert_dispatcher import ExpertDispatcher
from parallelrun.planner.contract.messages import ExplainedRound, Explanation, calls_of, explanation_by_block
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.pieces.expert_axes import EP, EP_DATA, EP_DP, TP

AXIS, OUTER, INNER = EP, "ep_outer", "ep_inner"
KEY = "strategy.expert"
ROWS, COUNTS = "experts", "routing"  # purposes: rows of tokens, and how many rows will come, or scores
OPERATION, GATHER = "all_to_all", "all_gather"
CONTENTS = {
    (OPERATION, ROWS): "rows of tokens to their experts and back, then their gradients, of all microbatches",
    (OPERATION, COUNTS): "how many rows will come",
    (GATHER, ROWS): "results of all tokens, which tp divides, and in backward gradients of these tokens",
    (GATHER, COUNTS): "scores of all tokens, which tp divides",
}
EXPLAINED = (
    "The router of every rank chooses experts for its own tokens. An all-to-all brings each token's row to the rank of "
    "its expert, the experts compute, and a second all-to-all brings the rows back, where they are weighted and added. "
    "Backward sends the gradients along the same paths."
)
INDEX_BYTES, FLAG_BYTES = 8, 1  # of a row number, and of "kept or dropped"


class Rows(NamedTuple):
    """Rows of one microbatch and layer on a rank. even: under an even load without drops. most: the upper bound; None
    where the number never differs from `even`."""

    even: int
    most: int | None = None

    @property
    def bound(self) -> int:
        """The largest number of rows possible."""
        return self.even if self.most is None else self.most

    def busiest(self, plan: Plan) -> int:
        """Return the rows of the rank of ep that has most under the declared imbalance; every expert has as many where
        it chooses its tokens."""
        imbalance = 1.0 if router_of(plan).kind == "expert_choice" else plan.stack.expert_imbalance
        return min(self.bound, round(self.even * imbalance))


@dataclass(frozen=True)
class AllToAllDispatcher(ExpertDispatcher):
    """A dispatcher that sends rows by all-to-all; the kinds differ in how many rows they send.

    explained: how the dispatcher sizes its messages, and the paper, for `parallelrun explain`.
    """

    explained: ClassVar[tuple[str, str]]

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """Chunks are whole routing groups of a microbatch; inner groups are equal parts of ep.

        `planner/pieces/expert_axes.py` checks that ep divides the experts and dp.
        """
        return [*_check_chunks(request), *_check_group_size(request), *_check_tensor(request)]

    @classmethod
    def mesh_dims(cls, request: Request) -> tuple[MeshDims, FlattenedDims]:
        """One axis, or inner groups and the axis between them; where ep spans tp, their parts in dp x cp."""
        size, spanned = request.config.strategy.expert.group_size, request.ep // request.ep_data_ranks
        outer, both = (((OUTER, request.ep // size),), ((AXIS, (OUTER, INNER)),)) if size else ((), ())
        axis, size = INNER if size else AXIS, size or request.ep
        if spanned == 1:
            return (*outer, (axis, size)), both
        in_data = ((EP_DATA, (OUTER, EP_DP)),) if outer else ()
        return (*outer, (EP_DP, size // spanned)), ((axis, (EP_DP, TP)), *both, *in_data)

    @abstractmethod
    def rows(self, plan: Plan) -> tuple[Rows, ...]:
        """Return the rows of a microbatch on a rank before the first level and after each level."""

    @abstractmethod
    def index_bytes(self, plan: Plan) -> int:
        """Return the bytes of one layer's indices by which rows are reordered."""

    def num_computed(self, plan: Plan) -> int:
        return self.rows(plan)[-1].busiest(plan)

    def counts_bytes(self, plan: Plan) -> int:
        """Return the bytes that announce the number of rows per microbatch and level; 0 where none are sent."""
        return 0

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        layers = [block for block in blocks for layer in block.layers if layer.layer_role == "expert"]
        forwards = [1 + (plan.runs_again and block.is_recomputed) for block in layers]
        microbatches, rows, counts_bytes = plan.batch.microbatches, self.rows(plan), self.counts_bytes(plan)
        passes = microbatches * sum(forward + 1 for forward in forwards)  # of each side: forward, again, backward
        row_bytes = plan.spec.hidden * BYTES[plan.precision.compute]
        sent = []
        for axis, before, after in zip(levels(plan), rows, rows[1:]):
            even, most = before.even + after.even, before.bound + after.bound
            bound = None if before.most is None and after.most is None else passes * row_bytes * most
            sent.append(Collective(axis, OPERATION, ROWS, 2 * passes * self.chunks, passes * row_bytes * even, bound))
            if counts_bytes:
                calls = microbatches * sum(forwards)
                sent.append(Collective(axis, OPERATION, COUNTS, calls, calls * counts_bytes))
        if self.spans_tp and plan.token_ranks > 1:
            sent += _over_tp(layers, plan)
        return [row for row in sent if row.calls]

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Count the indices by which rows are put into slots or sorted on arrival.

        The tensor strategy counts all else that a layer keeps, for `num_computed` rows.
        """
        if plan.runs_again and block.is_recomputed:
            return 0
        return sum(layer.layer_role == "expert" for layer in block.layers) * self.index_bytes(plan)

    def exchange_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """The rows as they arrived, the experts' results, these in the order of the ranks to which they go, and the
        results that come back; where a slice of the tokens was taken, what it was taken of; of a grid, whose norms keep
        their results, the norm's input and what its weights gave."""
        has_experts = any(layer.layer_role == "expert" for layer in block.layers)
        back, arrived = self.rows(plan)[0].even, self.num_computed(plan)
        whole = plan.num_rows * (self.spans_tp and not plan.tensor.slices_tokens)
        whole += 0 if plan.tensor.is_one_dimensional else 2 * plan.num_rows // plan.mesh.size(TP)
        return (3 * arrived + back + whole) * plan.spec.hidden * BYTES[plan.precision.compute] * has_experts

    def explain(self, plan: Plan) -> Explanation:
        """Return the all-to-alls of the layers with experts of rank 0's stages."""

        def rounds_of(block: BlockSpec, ranks: tuple[int, ...]) -> list[ExplainedRound]:
            by_row = calls_of(self.collectives((block,), plan), plan, ranks)
            return [ExplainedRound(CONTENTS[calls[0].operation, calls[0].purpose], calls=calls) for calls in by_row]

        sizes, source = self.explained
        return explanation_by_block("expert", self.kind, (f"{EXPLAINED} {sizes}", source), plan, AXIS, rounds_of)


def levels(plan: Plan) -> tuple[str, ...]:
    """Return the axes over which rows are dispatched, in order; they are combined in reverse order."""
    assert plan.expert is not None
    return (INNER, OUTER) if plan.expert.group_size > 1 else (AXIS,)


def kept_rows(plan: Plan) -> tuple[Rows, ...]:
    """Return the rows of `AllToAllDispatcher.rows` where only kept assignments are sent."""
    experts, ep = plan.spec.experts, plan.mesh.size("ep")
    rows = [_kept(1, experts, plan)]
    if len(levels(plan)) > 1:
        inner = plan.mesh.size(INNER)
        rows.append(_kept(inner, experts // inner, plan))  # of an inner group, to the ranks of one inner index
    return (*rows, _kept(ep, experts // ep, plan))


def _kept(num_ranks: int, num_experts: int, plan: Plan) -> Rows:
    """Return the kept rows of so many ranks for so many experts. A token never goes twice to the same expert."""
    router, slots = router_of(plan), num_slots(plan, num_experts)
    if router.kind == "expert_choice":  # every expert takes its fixed number of every group
        sharing = num_sharing(plan)
        own = None if sharing == 1 else num_ranks * min(slots, num_own(plan) * num_experts)
        return Rows(num_ranks * slots // sharing, own)
    return Rows(num_kept(plan), num_ranks * min(num_own(plan) * min(router.top_k, num_experts), slots))


def _over_tp(layers: list[BlockSpec], plan: Plan) -> list[Collective]:
    """What the ranks of tp gather that divide the tokens of these layers. layers: the block of each."""
    repeated = [block for block in layers if plan.runs_again and block.is_recomputed]
    calls = plan.batch.microbatches * (len(layers) + len(repeated))
    axis, scores = plan.tensor.token_axis(plan), num_routed(plan) * plan.spec.experts * BYTES[plan.precision.accurate]
    sent = [Collective(axis, GATHER, COUNTS, calls, calls * scores)]
    if not plan.tensor.slices_tokens:
        again = sum(block.reads_sum(plan.dropout) for block in repeated)
        calls = plan.batch.microbatches * (2 * len(layers) + again)
        rows = plan.num_rows * plan.spec.hidden * BYTES[plan.precision.compute]
        sent.append(Collective(axis, GATHER, ROWS, calls, calls * rows))
    return sent


def _check_tensor(request: Request) -> list[Problem]:
    """An expert is split by all of tp or by none of it, whose ranks then divide the tokens of every sequence.

    With parts of tp, a rank would hold as many weights as with ep over tp, and sum activations besides. Somebody else's
    router has chosen for all tokens before ranks could divide them."""
    key, tp, seq = f"{KEY}.tp", _token_ranks(request), request.spec.seq
    said, fix, parts = f"{key}={request.config.strategy.expert.tp}", f"leave {key} out", tp * request.cp
    same = "" if tp == request.tp else f" (the ranks of tp={request.tp} with the same tokens)"
    spans = request.ep_data_ranks < request.ep
    if request.config.strategy.expert.tp not in (None, 1, tp):
        message = f"{said}: an expert is split over all of tp={tp}{same} or over none of its ranks"
        return [Problem(message, key, f"{key}=1 or {fix}", kind="not_built")]
    if spans and has_own_router(request.spec):
        message = f"{said}: the tokens of experts of somebody else's module are not divided over tp={tp}"
        return [Problem(message, key, fix, kind="not_built")]
    if spans and seq % parts:
        of = f"tp={tp}{same}" + f" x cp={request.cp}" * (request.cp > 1)
        message = f"model.seq={seq} is not divisible by {of}, over which {said} divides the tokens of a sequence"
        return [Problem(message, key, f"model.seq={-(-seq // parts) * parts} or {fix}", kind="arithmetic")]
    return []


def _token_ranks(request: Request) -> int:
    return tensor_strategy(request.config.strategy.tensor.kind).token_ranks(request)


def _check_chunks(request: Request) -> list[Problem]:
    chunks, batch, router = request.config.strategy.expert.chunks, request.batch, request.spec.router
    assert router is not None, "a dispatcher for a model without experts"
    parts = request.tp // _token_ranks(request) * router.group_samples
    if batch is None or batch.micro_batch % parts:
        return []  # another violation
    groups = batch.micro_batch // parts
    if groups % chunks == 0:
        return []
    of = f"micro_batch={batch.micro_batch} in routing groups of {router.group_samples}"
    message = f"{KEY}.chunks={chunks} does not divide the {groups} routing groups of a microbatch ({of})"
    fixes = [either(f"{KEY}.chunks", nearest(chunks, divisors(groups)))]
    legal = [n for n in divisors(batch.replica_batch) if n % (chunks * parts) == 0]
    if legal:
        fixes.append(either("micro_batch", nearest(batch.micro_batch, legal)))
    return [Problem(message, f"{KEY}.chunks", " or ".join(fixes), kind="arithmetic")]


def _check_group_size(request: Request) -> list[Problem]:
    size, ep = request.config.strategy.expert.group_size, request.ep
    spanned = ep // request.ep_data_ranks
    legal = [n for n in divisors(ep)[1:-1] if n % spanned == 0]
    if size is None or size in legal:
        return []
    fixes = [either(f"{KEY}.group_size", nearest(size, legal))] if legal else []
    if ep % size:
        message = f"{KEY}.group_size={size} does not divide ep={ep}, which the inner groups partition"
    elif size % spanned and size > 1:
        message = f"{KEY}.group_size={size} divides a group of tp={spanned}, which ep spans ({KEY}.tp=1)"
    else:
        which = "one rank" if size == 1 else f"all of ep={ep}"
        message = f"{KEY}.group_size={size}: inner groups of {which} leave no second level"
    fix = " or ".join([*fixes, f"leave {KEY}.group_size out"])
    return [Problem(message, f"{KEY}.group_size", fix, kind="arithmetic")]
