"""The pipeline schedules: the order in which each computes, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors, nearest
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request

from . import orders
from .orders import Orders
from .schedule import Schedule

# Where backward computes activations again: a rank would keep them between an I and a late W.
DRAINING_WHOLE = partial(orders.dualpipev, drains_split=False)
MOST_CHOSEN = 8  # stages per rank that a search tries


@dataclass(frozen=True)
class NoPipeline(Schedule):
    """One stage: microbatches are gradient accumulation, and nothing is sent."""

    kind = "none"
    rank_order = staticmethod(orders.accumulation)
    explained = ("One stage: nothing is sent.", "")

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        problems = super().check(request)
        if request.pp == 1:
            return problems
        message = f"pp={request.pp}: without a schedule there is one stage"
        return [*problems, Problem(message, "schedule", "schedule=1f1b, or pp=1", kind="undefined")]


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards: bubble (pp - 1) / (m + pp - 1), all m microbatches in flight."""

    kind = "gpipe"
    rank_order = staticmethod(orders.gpipe)
    explained = (
        "All microbatches go forward through the stages, then all go backward. Every microbatch's activations "
        "are kept.",
        "Huang et al. 2019",
    )

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        return microbatches


@dataclass(frozen=True)
class NaiveModelParallel(GPipe):
    """GPipe with one microbatch: one rank works at a time, so utilisation is 1 / pp."""

    kind = "naive"
    explained = (
        "The whole batch goes through the stages once, forward and backward: one rank works at a time.",
        "the model parallelism that pipelines improve on",
    )
    takes_microbatches = False

    @classmethod
    def choices(cls, pp: int, num_layers: int) -> list[int]:
        """Gpipe with one microbatch stands for it."""
        return []

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        if request.batch is None or request.batch.microbatches == 1:
            return []
        message = f"microbatches={request.batch.microbatches}: naive model parallelism has one; with more it is gpipe"
        return [Problem(message, "microbatches", "microbatches=1, or schedule=gpipe", kind="undefined")]


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """1F1B with flush (PipeDream-Flush): GPipe's bubble with at most pp microbatches in flight."""

    kind = "1f1b"
    repeats = True
    rank_order = staticmethod(orders.one_f_one_b)
    explained = (
        "After a warm-up, each rank alternates one forward and one backward, so that at most as many "
        "microbatches are kept as there are stages.",
        "Narayanan et al. 2019, 2021 (PipeDream-Flush)",
    )

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        """1F1B needs as many microbatches as stages."""
        if request.batch is None or request.batch.microbatches >= request.pp:
            return []
        samples = request.batch.replica_batch
        enough = [m for m in divisors(samples) if m >= request.pp]
        smallest = f"microbatches={enough[0]}" if enough else f"global_batch={request.pp * request.dp}"
        message = f"microbatches={request.batch.microbatches} are fewer than the pp={request.pp} stages of 1f1b"
        return [Problem(message, "microbatches", f"{smallest}, or schedule=gpipe", kind="undefined")]

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        return min(pp - rank, microbatches)


@dataclass(frozen=True)
class Interleaved(Schedule):
    """Interleaved 1F1B, as torch's ScheduleInterleaved1F1B: equal rounds of about pp microbatches."""

    kind = "interleaved"
    repeats = True
    rank_order = staticmethod(orders.interleaved)
    explained = (
        "As 1F1B, but each rank has several stages, so a microbatch passes every rank several times: more "
        "messages, and a bubble smaller by that factor.",
        "Narayanan et al. 2021",
    )
    takes_virtual_stages = True

    @classmethod
    def choices(cls, pp: int, num_layers: int) -> list[int]:
        """Return the numbers that give every stage equally many layers, else those that do if the first and the last
        have one less (Llama 3), else the default. More than MOST_CHOSEN hardly shrink the bubble, and send more."""
        for layers in (num_layers, num_layers + 2):
            per_rank = layers // pp if layers % pp == 0 else 1
            if even := [number for number in divisors(per_rank) if 1 < number <= MOST_CHOSEN]:
                return even
        return [number for number in [2] if 2 * pp <= num_layers]

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        return orders.num_warmup(pp, virtual_stages, microbatches, 2 * (pp - 1 - rank))

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        if request.pp > 1:
            return super().check(request)
        message = f"pp=1: {cls.kind} orders the stages of several ranks, and there is one"
        return [Problem(message, "pp", "pp=2, or schedule=gpipe", kind="undefined"), *super().check(request)]

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        """Microbatches must form equal rounds."""
        if request.batch is None or request.pp == 1:
            return []
        samples, m = request.batch.replica_batch, request.batch.microbatches
        rounds = orders.num_rounds(request.pp, m)
        if m % rounds == 0:
            return []
        (legal,) = nearest(m, [n for n in divisors(samples) if n % orders.num_rounds(request.pp, n) == 0], count=1)
        message = (
            f"microbatches={m} do not make {rounds} equal rounds of about pp={request.pp}, in which "
            f"{cls.kind} goes through a rank's virtual stages"
        )
        return [Problem(message, "microbatches", f"microbatches={legal}", kind="arithmetic")]


@dataclass(frozen=True)
class ZeroBubble(Interleaved):
    """ZB1P, as torch's ScheduleInterleavedZeroBubble: weight gradients fill what would be bubble."""

    kind = "zero_bubble"
    rank_order = staticmethod(orders.zero_bubble)
    explained = (
        "Backward is split: the input gradient is sent on at once, and the weight gradient is computed when "
        "the rank would be idle.",
        "Qi et al. 2023",
    )
    splits_backward = True

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        return orders.num_warmup(pp, virtual_stages, microbatches, pp - 1 - rank)

    @classmethod
    def choices(cls, pp: int, num_layers: int) -> list[int]:
        return [1, *super().choices(pp, num_layers)]

    @classmethod
    def default_virtual_stages(cls, pp: int, num_layers: int) -> int:
        """Two, or one where the model has too few layers for two."""
        return 1 if num_layers < 2 * pp else 2


@dataclass(frozen=True)
class ZBV(Interleaved):
    """ZB-V, as torch's ScheduleZBVZeroBubble: first and last stage share pp rank 0; the turn of the V sends nothing."""

    kind = "zbv"
    rank_order = staticmethod(orders.zbv)
    explained = (
        "Each rank has two stages laid out in a V, so the first and the last stage share a rank. Backward is "
        "split: the input gradient is sent on at once, weight gradients fill the idle time.",
        "Qi et al. 2023",
    )
    splits_backward = True

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        return min(2 * pp - 1 - rank, microbatches) + min(rank + 1, microbatches)

    @classmethod
    def choices(cls, pp: int, num_layers: int) -> list[int]:
        return [2] if 2 * pp <= num_layers else []

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        if request.virtual_stages == 2:
            return super().check(request)
        message = (
            f"virtual_stages={request.virtual_stages}: the V of {cls.kind} has two stages per rank, down and back up"
        )
        return [*super().check(request), Problem(message, "virtual_stages", "virtual_stages=2", kind="undefined")]

    @classmethod
    def check_microbatches(cls, request: Request) -> list[Problem]:
        return []

    @classmethod
    def pp_rank(cls, stage: int, pp: int) -> int:
        """Stages go down the ranks and back up."""
        return stage if stage < pp else 2 * pp - 1 - stage

    @classmethod
    def forward_only(cls, pp: int, virtual_stages: int, num_microbatches: int) -> Orders:
        """All microbatches go down the V before the first comes back up."""
        return orders.forward_only(cls.stages_of_ranks(pp, virtual_stages), num_microbatches, num_microbatches)


@dataclass(frozen=True)
class DualPipeV(ZBV):
    """DualPipeV, as torch's ScheduleDualPipeV: the V of ZB-V, whose steady phase pairs a forward with a backward. With
    fewer than 2 pp microbatches, which torch refuses, there is none: the order is that of ZB-V."""

    kind = "dualpipev"
    repeats = True
    rank_order = staticmethod(orders.dualpipev)
    explained = (
        "Two stages per rank in a V, as zbv. The forward pass of one microbatch and the backward pass of another take "
        "turns: one computes while the other waits for its experts' all-to-all.",
        "DeepSeek-AI 2024 (DeepSeek-V3, section 3.2.1)",
    )
    overlaps_passes = True

    def order_of_ranks(self, plan: Plan) -> orders.RankOrder:
        return DRAINING_WHOLE if plan.runs_again else orders.dualpipev

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        if microbatches < 2 * pp:
            return super().least_in_flight(pp, virtual_stages, microbatches, rank)
        return 2 * pp
