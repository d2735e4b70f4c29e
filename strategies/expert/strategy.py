"""What the expert dispatchers share before a run: checks, the axes that make up ep, what is kept for backward.
Torch-free."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.model_spec import BlockSpec
from parallelrun.plan.messages import Exchange, Explanation, Round, calls_of, ranks_over
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import Collective, Equivalence, ExpertWay, Plan
from parallelrun.strategies.expert import memory, traffic
from parallelrun.strategies.expert.axes import AXIS, INNER, OUTER
from parallelrun.wording import divisors, either, nearest

KEY = "strategy.expert"
WHAT = {
    traffic.ROWS: "rows of tokens to their experts and back, then their gradients, of all microbatches",
    traffic.COUNTS: "how many rows will come",
}


class Way:
    """An ExpertWayPlan; the kinds differ in how many rows travel."""

    kind = ""
    explained = "", ""  # how this dispatcher sizes its messages, and the paper: for `explain`

    def check(self, request: Request) -> list[Problem]:
        """Chunks are whole routing groups of a microbatch; inner groups are equal parts of ep. That ep divides the
        experts and dp is `plan/expert_axes`'s."""
        return [*_chunks(request), *_group_size(request)]

    def resolve(self, request: Request) -> ExpertWay:
        """As asked."""
        asked = request.config.strategy.expert
        return ExpertWay(self.kind, asked.chunks, asked.group_size or 1, asked.overlap)

    def mesh_dims(
        self, request: Request
    ) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """One axis, or the inner groups and what is between them."""
        inner = request.config.strategy.expert.group_size
        if inner is None:
            return ((AXIS, request.ep),), ()
        return ((OUTER, request.ep // inner), (INNER, inner)), ((AXIS, (OUTER, INNER)),)

    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """See `traffic`."""
        return traffic.collectives(blocks, plan, self.loads(plan), self.counts_bytes(plan))

    def loads(self, plan: Plan) -> tuple[traffic.Rows, ...]:
        """Rows of a microbatch on a rank before the first leg and after each."""
        raise AssertionError(f"{type(self)} sends nothing")

    def counts_bytes(self, plan: Plan) -> int:
        """Of what tells the ranks how many rows there will be, once a microbatch and leg; 0: nothing does."""
        return 0

    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """What is kept beyond what the tensor strategy counts for experts that are all at home. See `memory`."""
        return memory.saved_bytes(block, plan, self.loads(plan), self.index_bytes(plan))

    def index_bytes(self, plan: Plan) -> int:
        """Of one layer's numbers by which rows are arranged."""
        raise AssertionError(f"{type(self)} arranges nothing")

    def explain(self, plan: Plan) -> Explanation:
        """The all-to-alls of the layers with experts of rank 0's stages, for `parallelrun explain`."""
        ranks, exchanges = ranks_over(plan, AXIS), []
        for stage in plan.stages_of(plan.mesh.coordinate(0)["pp"]):
            for name in stage.blocks:
                found = calls_of(self.collectives((plan.spec.block(name),), plan), plan, ranks)
                rounds = tuple(Round(WHAT[calls[0].purpose], calls=calls) for calls in found)
                exchanges += [Exchange(name, rounds)] if rounds else []
        groups = plan.mesh.num_ranks // len(ranks)
        text = (
            "The router of every rank chooses experts for its own tokens. An all-to-all brings each token's row to the "
            "rank of its expert, the experts compute, and a second all-to-all brings the rows back, where they are "
            "weighted and added. Backward sends the gradients the same ways. " + self.explained[0]
        )
        kind = plan.expert.kind
        return Explanation("expert", kind, text, self.explained[1], ranks, groups, AXIS, tuple(exchanges))

    def equivalence(self, plan: Plan) -> Equivalence:
        """Who goes where is the model's: the same function and the same gradients as on one device."""
        return Equivalence("exact")


def _chunks(request: Request) -> list[Problem]:
    chunks, batch, router = request.config.strategy.expert.chunks, request.batch, request.spec.router
    assert router is not None, "an expert dispatcher for a model without experts"
    if batch is None or batch.micro_batch % router.group_samples:
        return []  # another violation
    groups = batch.micro_batch // router.group_samples
    if groups % chunks == 0:
        return []
    of = f"micro_batch={batch.micro_batch} in routing groups of {router.group_samples}"
    what = f"{KEY}.chunks={chunks} does not divide the {groups} routing groups of a microbatch ({of})"
    fixes = [either(f"{KEY}.chunks", nearest(chunks, divisors(groups)))]
    legal = [n for n in divisors(batch.replica_batch) if n % (chunks * router.group_samples) == 0]
    if legal:
        fixes.append(either("micro_batch", nearest(batch.micro_batch, legal)))
    return [Problem(what, f"{KEY}.chunks", " or ".join(fixes), kind="arithmetic")]


def _group_size(request: Request) -> list[Problem]:
    size, ep = request.config.strategy.expert.group_size, request.ep
    legal = divisors(ep)[1:-1]
    if size is None or size in legal:
        return []
    fixes = [either(f"{KEY}.group_size", nearest(size, legal))] if legal else []
    if ep % size:
        what = f"{KEY}.group_size={size} does not divide ep={ep}, whose ranks its groups are"
    else:
        which = "one rank" if size == 1 else f"all of ep={ep}"
        what = f"{KEY}.group_size={size}: inner groups of {which} leave no second level"
    fix = " or ".join([*fixes, f"leave {KEY}.group_size out"])
    return [Problem(what, f"{KEY}.group_size", fix, kind="arithmetic")]
