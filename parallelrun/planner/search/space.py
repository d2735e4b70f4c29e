"""The candidates of a search: every combination of degrees and settings that the user has left open.

What a strategy has to choose from is said by its class (`layout_choices`, `choices`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from parallelrun.base.wording import divisors
from parallelrun.config.schema.run_schema import (
    DEFAULT_GLOBAL_BATCH,
    Config,
    DataStrategyConfig,
    ExpertConfig,
    PipelineConfig,
    TensorStrategyConfig,
)
from parallelrun.config.schema.strategy_keys import completed, kinds, narrowed, own_keys
from parallelrun.planner.contract.classes import data_strategy, pipeline_schedule, tensor_strategy
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.pieces import partition
from parallelrun.planner.pieces import router_settings as routing
from parallelrun.planner.pieces.batch import EFFICIENT_TOKENS
from parallelrun.planner.pieces.hosts import ranks_per_node
from parallelrun.planner.resolve import shorthands

RECOMPUTE = ("none", "selective", "full")
AXES = ("pp", "dp", "cp", "tp")
SEARCHED = ("tensor", "pipeline", "data", "expert")  # sections of the strategy
# What a search chooses unless the user sets it, by root keys; and recomputation.
OPEN_KEYS = ("micro_batch", "microbatches", "layout", "schedule", "virtual_stages", "tp", "pp", "dp", "cp", "ep")
# Not tried unless the user gives it: tensor parallel groups over more hosts (their communication in every
# layer leaves the host) and microbatches of more tokens (kernels get no faster: `batch.EFFICIENT_TOKENS`).
MOST_HOSTS, MOST_TOKENS = 8, 4 * EFFICIENT_TOKENS
LEAST_SEQ = 4096  # tokens of a sequence that a cp rank holds, at least, where the user gives no cp
# Short names of keys of the strategy section that a candidate sets: they are said in its overrides.
SHORT = {"strategy.pipeline.kind": "schedule", "strategy.pipeline.virtual_stages": "virtual_stages"}


@dataclass(frozen=True)
class Choice:
    """A candidate: one choice of everything that a search chooses."""

    pp: int
    dp: int
    tp: int
    ep: int
    micro_batch: int
    recompute: str
    data: DataStrategyConfig
    tensor: TensorStrategyConfig
    pipeline: PipelineConfig
    expert: ExpertConfig
    cp: int = 1


class Space:
    """The candidates of one configuration on `world` ranks.

    config: as composed. given: the dotted keys that the user has set, whose values all candidates share. A degree,
    micro_batch or microbatches with a value is given too.
    """

    def __init__(self, config: Config, user_keys: frozenset[str], world: int):
        self.world = world
        folded, _ = shorthands.fold(completed(config), user_keys)
        self.given = user_keys | {f"strategy.{axis}.{key}" for key, axis in shorthands.short_keys().items()
                              if getattr(config, key) is not None}  # fmt: skip
        for short, key in (("layout", "strategy.tensor.kind"), ("schedule", "strategy.pipeline.kind"),
                           ("virtual_stages", "strategy.pipeline.virtual_stages")):  # fmt: skip
            self.given |= {key} if getattr(config, short) is not None else set()
        shared: dict[str, Any] = {
            key: None for key in (*shorthands.short_keys(), "layout", "schedule", "virtual_stages")
        }
        self.folded = replace(folded, **shared, world=world)
        self.base = replace(self.folded, global_batch=self.global_batch, local_batch=None)

    @property
    def global_batch(self) -> int:
        """As given (local_batch: of dp=world), or the fewest samples from the default on that every degree divides."""
        if self.folded.global_batch is not None:
            return self.folded.global_batch
        each = self.folded.local_batch or -(-DEFAULT_GLOBAL_BATCH // self.world)
        return self.world * each

    def is_small(self, spec: ModelSpec, most: int) -> bool:
        """Whether there are at most so many candidates, legal or not."""
        number, tensors, pipelines = 0, cache(self.tensors), cache(lambda pp: self.pipelines(pp, spec))
        for pp, dp, cp, tp in self.degrees(spec):
            of_data = len(self.micro_batches(dp, spec)) * len(self.datas(dp * cp, pp, tp))
            shapes = len(self.experts(dp, cp, tp, spec)) * len(tensors(tp)) * len(pipelines(pp))
            number += of_data * shapes * len(self.recomputes())
            if number > most:
                return False
        return True

    def degrees(self, spec: ModelSpec) -> Iterator[tuple[int, int, int, int]]:
        """(pp, dp, cp, tp) whose product is the world, with as many stages as the model can be cut into."""
        for cp in self.context_degrees(spec):
            for pp, dp, tp in self._degrees(spec, self.world // cp):
                yield pp, dp, cp, tp

    def context_degrees(self, spec: ModelSpec) -> list[int]:
        """As given; else those that leave a rank LEAST_SEQ tokens of a sequence."""
        if self.folded.cp is not None:
            return [self.folded.cp] if self.world % self.folded.cp == 0 else []
        is_unsplit = spec.kind != "tokens" or not spec.heads
        return [1] + [n for n in divisors(self.world)[1:] if not is_unsplit and spec.seq // n >= LEAST_SEQ]

    def _degrees(self, spec: ModelSpec, ranks: int) -> Iterator[tuple[int, int, int]]:
        folded = self.folded
        for tp in divisors(ranks):
            for pp in divisors(ranks // tp):
                dp = ranks // tp // pp
                far = folded.tp is None and tp > MOST_HOSTS * ranks_per_node(folded.cluster, self.world)
                fits = not far and all(
                    want in (None, degree) for want, degree in ((folded.pp, pp), (folded.dp, dp), (folded.tp, tp))
                )
                if fits and pp <= partition.num_cuttable(spec) and not (pp == 1 and self._needs_pipeline):
                    yield pp, dp, tp

    @property
    def _needs_pipeline(self) -> bool:
        """Whether the user has set what only a pipeline reads."""
        return any(key.startswith("strategy.pipeline.") for key in self.given)

    def experts(self, dp: int, cp: int, tp: int, spec: ModelSpec) -> list[tuple[int, ExpertConfig]]:
        """(ep, how experts are split): ep over dp x cp, and, unless the user has said it, over dp x cp x tp.

        Of two with equal parts of experts on a rank, only the latter is tried if no empty slots are sent: the ranks of
        tp divide the tokens, which else each of them sends to its part of every expert.
        """
        ep, base, router = self.folded.ep, self.folded.strategy.expert, spec.router
        if not spec.experts or router is None:
            return [(ep or 1, base)]
        whole = replace(base, tp=1)
        dispatcher = routing.dispatcher(
            replace(self.folded, strategy=replace(self.folded.strategy, expert=whole)), spec
        )
        over_dp, over_tp = ([ep] if ep else dispatcher.choices(n, spec.experts) for n in (dp * cp, dp * cp * tp))
        spans = tp > 1 and base.tp in (None, 1) and not router.is_own and spec.seq % (cp * tp) == 0
        over_tp = [n for n in over_tp if spans and n % tp == 0]
        if not (ep or dispatcher.needs_capacity):
            over_dp = [n for n in over_dp if n == 1 or n * tp not in over_tp]
        return [*((n, base) for n in over_dp if base.tp != 1 or tp == 1), *((n, whole) for n in over_tp)]

    def tensors(self, tp: int) -> list[TensorStrategyConfig]:
        """The tensor layouts of tp ranks. A single rank has the preset's own."""
        base: TensorStrategyConfig = narrowed(self.base).strategy.tensor
        if tp == 1:
            return [base]
        choices = [choice for kind in kinds("tensor") for choice in tensor_strategy(kind).layout_choices(tp)]
        sections = [choice.config for choice in choices if choice.searched]
        return self._restricted("tensor", sections)

    def datas(self, dp: int, pp: int, tp: int) -> list[DataStrategyConfig]:
        """The data strategies of dp replicas. A single one has the preset's own."""
        base: DataStrategyConfig = narrowed(self.base).strategy.data
        if dp == 1:
            return [base]
        in_node = max(1, ranks_per_node(self.base.cluster, self.world) // tp)
        sections = [c for kind in kinds("data") for c in data_strategy(kind).choices(dp, pp, in_node)]
        return self._restricted("data", sections) or [base]

    def pipelines(self, pp: int, spec: ModelSpec) -> list[PipelineConfig]:
        base = self.base.strategy.pipeline
        if pp == 1:
            return [replace(base, virtual_stages=None)]
        sections = [
            replace(base, kind=kind, virtual_stages=number if pipeline_schedule(kind).takes_virtual_stages else None)
            for kind in kinds("pipeline")
            if spec.experts or not pipeline_schedule(kind).overlaps_passes
            for number in pipeline_schedule(kind).choices(pp, partition.num_cuttable(spec))
        ]
        if "strategy.pipeline.virtual_stages" in self.given and base.virtual_stages is not None:
            sections = [section for section in sections if pipeline_schedule(section.kind).takes_virtual_stages]
        return self._restricted("pipeline", sections) or [base]

    def micro_batches(self, dp: int, spec: ModelSpec) -> list[int]:
        """The divisors of a replica's samples, up to MOST_TOKENS."""
        replica, indivisible = divmod(self.global_batch, dp)
        if indivisible:
            return []
        sizes, folded = divisors(replica), self.folded
        if folded.micro_batch is None and folded.microbatches is None:
            return [size for size in sizes if size == 1 or size * spec.seq <= MOST_TOKENS]
        if folded.micro_batch is not None:
            sizes = [size for size in sizes if size == folded.micro_batch]
        if folded.microbatches is not None:
            sizes = [size for size in sizes if replica // size == folded.microbatches]
        return sizes

    def recomputes(self) -> tuple[str, ...]:
        return (self.folded.recompute,) if "recompute" in self.given else RECOMPUTE

    def _restricted(self, axis: str, sections: list[Any]) -> list[Any]:
        """Sections of a strategy with the user's keys; none of strategies that do not read these."""
        base, prefix = getattr(self.base.strategy, axis), f"strategy.{axis}."
        keys = {key.removeprefix(prefix) for key in self.given if key.startswith(prefix)}
        same = {key: getattr(base, key) for key in keys}
        legal: list[Any] = []
        for section in sections:
            if keys <= own_keys(axis, section.kind) and same.get("kind", section.kind) == section.kind:
                changed = replace(section, **same)
                legal += [changed] if changed not in legal else []
        return legal

    def config(self, choice: Choice) -> Config:
        """The configuration of a candidate."""
        axes: dict[str, Any] = {axis: getattr(choice, axis) for axis in SEARCHED}
        strategy = replace(self.base.strategy, **axes)
        degrees: dict[str, Any] = {axis: getattr(choice, axis) for axis in AXES}
        degrees["cp"] = self.folded.cp if choice.cp == 1 else choice.cp
        if self.folded.ep is not None or choice.ep > 1 or strategy.expert.fills:
            degrees["ep"] = choice.ep
        changed = replace(self.base, strategy=strategy, micro_batch=choice.micro_batch, microbatches=None, **degrees)
        return completed(replace(changed, recompute=choice.recompute))

    def overrides(self, choice: Choice) -> tuple[str, ...]:
        """Return the overrides that turn the user's command line into this candidate: every value that differs."""
        config, names = self.config(choice), {kind: name for name, kind in shorthands.layouts().items()}
        overrides = [f"world={self.world}"] if self.folded.world != self.world else []
        for key in (*AXES, "ep", "global_batch", "micro_batch", "recompute"):
            value = getattr(config, key)
            is_given = key == "micro_batch" and self.folded.microbatches is not None
            if value != getattr(self.folded, key) and value is not None and not is_given:
                overrides.append(f"{key}={value}")
        for axis in SEARCHED:
            section, base = getattr(choice, axis), getattr(self.folded.strategy, axis)
            for item in fields(section):
                value, key = getattr(section, item.name), f"strategy.{axis}.{item.name}"
                if value == getattr(base, item.name):
                    continue
                if key == "strategy.tensor.kind":
                    overrides.append(f"layout={names[value]}")
                else:
                    overrides.append(f"{SHORT.get(key, key)}={_rendered(value)}")
        return tuple(overrides)


def _rendered(value: object) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
