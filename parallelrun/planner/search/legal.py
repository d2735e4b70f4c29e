"""The legal candidates of a space, in groups whose members differ in micro-batch, recomputation and data strategy.

The strategies' own checks decide, as in `resolve`; each is asked once for all candidates on which its answer depends
alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import (
    Config,
    DataStrategyConfig,
    ExpertConfig,
    PipelineConfig,
    TensorStrategyConfig,
)
from parallelrun.config.schema.strategy_keys import narrowed
from parallelrun.planner.contract.caching import once_for
from parallelrun.planner.contract.classes import (
    StrategyClasses,
    context_strategy,
    data_strategy,
    pipeline_schedule,
    tensor_strategy,
)
from parallelrun.planner.contract.degrees import Degrees
from parallelrun.planner.contract.pipeline_schedule import PipelineSchedule
from parallelrun.planner.contract.plan import BatchSizes, Plan, Stage, once
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE, ModelSpec
from parallelrun.planner.pieces import context_axes, expert_axes, partition, sample_sets
from parallelrun.planner.pieces import router_settings as routing
from parallelrun.planner.resolve import rules
from parallelrun.planner.resolve.draft import PlanDraft, check_depth, check_length
from parallelrun.planner.search.space import Choice, Space

LAYOUT, STAGES, SCHEDULE, DATA, EXPERTS, SAMPLES = (
    "tensor layout", "stages", "pipeline schedule", "data strategy", "experts", "sample sets",
)  # fmt: skip


class LegalGroup(NamedTuple):
    """Legal candidates: every combination of `members`. number: of the tensor strategy among those of tp."""

    pp: int
    dp: int
    tp: int
    ep: int
    number: int
    tensor: TensorStrategyConfig
    expert: ExpertConfig
    pipeline: PipelineConfig
    schedule: type[PipelineSchedule]
    virtual_stages: int
    micro_batches: tuple[int, ...]
    datas: tuple[DataStrategyConfig, ...]
    cp: int = 1

    @property
    def has_pipeline(self) -> bool:
        return self.pp > 1

    def choice(self, micro_batch: int, recompute: str, data: DataStrategyConfig) -> Choice:
        shape = self.tensor, self.pipeline, self.expert, self.cp
        return Choice(self.pp, self.dp, self.tp, self.ep, micro_batch, recompute, data, *shape)


def tensor_of(group: LegalGroup) -> object:
    """Return, as a cache key, the settings on which a block's costs depend, beside micro-batch and recomputation."""
    return group.tp, group.number, group.ep, group.expert.tp, group.cp, group.schedule.splits_backward


OF_STAGES = ("pp", "virtual_stages", "pipeline.kind")  # they decide which rank has which blocks
OF_TENSOR = ("tp", "number", "schedule.splits_backward", "cp")
Checked = tuple[list[Any], list[tuple[str, int, Problem]]]  # the legal ones; rule, number and violation of others


class Legal:
    """The legal candidates of a space. removed: by rule, the candidates that it removed; examples: one violation."""

    def __init__(self, space: Space, spec: ModelSpec, device: str):
        self.space, self.spec, self._device = space, spec, device
        self.base = narrowed(space.base)
        self.small = _distinct(spec)
        self.removed: Counter[str] = Counter()
        self.examples: dict[str, Problem] = {}
        self._cache: dict[object, Any] = {}
        self._tensors, self._pipelines = cache(space.tensors), cache(self._schedules)
        self._cut = cache(partial(partition.cut, spec, space.base))
        self._sections: dict[str, DataStrategyConfig] = {}  # one of all equal ones: its id stands for it
        self._has_sets = any(layer.layer_role == SAMPLE_SET_ROLE for layer in spec.layers())
        self._recomputes = len(space.recomputes())

    def groups(self) -> Iterator[LegalGroup]:
        for pp, dp, cp, tp in self.space.degrees(self.spec):
            sizes = tuple(self.space.micro_batches(dp, self.spec))
            datas = tuple(self._sections.setdefault(repr(data), data) for data in self.space.datas(dp * cp, pp, tp))
            for ep, expert in self.space.experts(dp, cp, tp, self.spec):
                for (number, tensor), pipeline in product(enumerate(self._tensors(tp)), self._pipelines(pp)):
                    legal = self._legal(LegalGroup(pp, dp, tp, ep, number, tensor, expert, *pipeline, sizes, datas, cp))
                    if legal is not None:
                        yield legal

    def _schedules(self, pp: int) -> list[tuple[PipelineConfig, type[PipelineSchedule], int]]:
        """Schedules with their numbers of stages per rank."""
        cuttable, schedules = partition.num_cuttable(self.spec), []
        for section in self.space.pipelines(pp, self.spec):
            schedule = pipeline_schedule(section.kind if pp > 1 else "none")
            stages = section.virtual_stages or schedule.default_virtual_stages(pp, cuttable)
            schedules.append((section, schedule, stages if schedule.takes_virtual_stages else 1))
        return schedules

    def plan(self, group: LegalGroup, micro_batch: int, recompute: str, data: DataStrategyConfig) -> Plan:
        """The plan of one candidate of a group. Those that differ in recomputation alone share all but that."""
        degrees = group.pp, group.dp, group.cp, group.tp, group.ep, group.expert.tp
        key = "plans", *degrees, group.number, group.pipeline.kind, group.virtual_stages, micro_batch, id(data)
        plans: dict[str, Plan] = once(self._cache, key, dict)
        if recompute not in plans:
            some = next(iter(plans.values()), None) or self._plan(group, micro_batch, data)
            plans[recompute] = some if some.recompute == recompute else some.sharing(recompute=recompute)
        return plans[recompute]

    def clear(self) -> None:
        """Free the caches of all plans. They refer to plans, so that else only a garbage collection would."""
        for values in [values for values in self._cache.values() if isinstance(values, dict)]:
            values.clear()

    def _plan(self, group: LegalGroup, micro_batch: int, data: DataStrategyConfig) -> Plan:
        """Return the plan of a candidate, with the recomputation of the configuration."""
        degrees = Degrees(group.pp, group.dp, group.tp, group.ep, group.cp, device=self._device)
        draft = PlanDraft(self._config(group, data), self.spec, degrees, self._classes(group, data.kind))
        request = replace(self.request(group, draft.config, self.spec), batch=self._batch(group, micro_batch))
        sets = draft.sample_sets(request)[0] if self._has_sets else None
        of_block = tensor_of(group), micro_batch
        tensor = once(self._cache, ("tensor", *of_block), partial(draft.strategies.tensor.resolve, request))
        plan = draft.plan(request, self.stages(group)[0], sets, tensor=tensor)
        key = "weights", tensor, plan.data, plan.mesh, group.virtual_stages, group.pipeline.kind
        caches = {"weights_cache": key, "blocks_cache": ("blocks", *of_block)}
        vars(plan).update({name: once(self._cache, key, dict) for name, key in caches.items()})
        return plan

    def _legal(self, group: LegalGroup) -> LegalGroup | None:
        """The group's legal candidates; None where there are none."""
        rules_of_all = (LAYOUT, self._of_tensor), (STAGES, self._of_stages), (EXPERTS, self._of_experts)
        for rule, check in rules_of_all:
            if problems := check(group):
                self._count(rule, len(group.micro_batches) * len(group.datas), problems)
                return None
        sizes = self._legal_ones(self._sizes(group, self._parts(group)), len(group.datas))
        datas = self._legal_ones(self._datas(group), len(sizes))
        if self._has_sets:
            sizes = self._legal_ones(self._sized_sets(group, sizes, datas), len(datas))
        return group._replace(micro_batches=tuple(sizes), datas=tuple(datas)) if sizes and datas else None

    def _legal_ones(self, checked: Checked, others: int) -> list[Any]:
        """The legal ones of several; others: the candidates that each of them stands for, without recomputation."""
        legal, removed = checked
        for rule, number, problem in removed:
            self._count(rule, number * others, [problem])
        return legal

    def _count(self, rule: str, number: int, problems: list[Problem]) -> None:
        if number:
            self.removed[rule] += number * self._recomputes
            self.examples.setdefault(rule, problems[0])

    @once_for(*OF_TENSOR)
    def _of_tensor(self, group: LegalGroup) -> list[Problem]:
        """The violations of the tensor layout. One layout stands for all in an example."""
        request, strategy = self.request(group, self._config(group, group.datas[0]), self.small), group.tensor.kind
        images = rules.check_products(self.spec, request.config, group.tp)
        context = self._classes(group, group.datas[0].kind).context
        problems = images or (context.check(request) if context else [])
        if not problems and tensor_strategy(strategy).is_legal(request):
            return []
        return problems or (
            [self.examples[LAYOUT]] if LAYOUT in self.examples else tensor_strategy(strategy).check(request)
        )

    @once_for(*OF_STAGES)
    def _of_stages(self, group: LegalGroup) -> list[Problem]:
        request = self.request(group, self._config(group, group.datas[0]), self.spec)
        return check_depth(request) + self.stages(group)[1]

    @once_for("dp", "cp", "tp", "ep", "expert.tp")
    def _of_experts(self, group: LegalGroup) -> list[Problem]:
        """The violations of the expert dispatcher by the degrees, and keys that it would have to read."""
        request = self.request(group, self._config(group, group.datas[0]), self.small)
        expert = self._classes(group, group.datas[0].kind).expert
        if group.ep > 1:  # the user's own ep holds for all degrees
            problems: list[Problem] = []
            degrees = Degrees(group.pp, group.dp, group.tp, cp=group.cp)
            expert_axes.degree(request.config, group.ep, degrees, self.spec.experts, problems)
            if problems:
                return problems
        problems = routing.unread(self.space.folded, self.space.given, self.spec.experts, group.ep)
        return problems + routing.check(request, 1) + (expert.check(request) if expert else [])

    @once_for(*OF_TENSOR)
    def _parts(self, group: LegalGroup) -> int:
        """Return the number that must divide every micro-batch."""
        request = self.request(group, self._config(group, group.datas[0]), self.small)
        parts: int = tensor_strategy(group.tensor.kind).micro_batch_divisor(request)
        return parts * (self.spec.router.group_samples if self.spec.router else 1)

    @once_for(*OF_STAGES, "dp", "cp", "ep", "expert.tp")
    def _sizes(self, group: LegalGroup, parts: int) -> Checked:
        """The micro-batches without violations."""
        legal, removed = [], []
        for size in group.micro_batches:
            count = self.space.global_batch // group.dp // size
            key = "batch", group.pp, group.virtual_stages, group.pipeline.kind, count
            of_experts = (size, group.ep) if group.ep > 1 else ()
            if size % parts:
                message = f"micro_batch={size} does not divide into {parts} parts"
                removed.append((LAYOUT, 1, Problem(message, "micro_batch", f"micro_batch={parts}")))
            elif problems := once(self._cache, (*key, of_experts), partial(self._of_batch, group, size)):
                removed.append((SCHEDULE, 1, problems[0]))
            else:
                legal.append(size)
        return legal, removed

    def _of_batch(self, group: LegalGroup, size: int) -> list[Problem]:
        request = self.request(group, self._config(group, group.datas[0]), self.small)
        classes, filled = self._classes(group, group.datas[0].kind), replace(request, batch=self._batch(group, size))
        problems = classes.pipeline.check(filled) + check_length(filled)
        return problems + (classes.expert.check(filled) if classes.expert else [])

    @once_for(*OF_TENSOR, "dp", "ep", "expert.tp", "has_pipeline")
    def _datas(self, group: LegalGroup) -> Checked:
        """The data strategies without violations."""
        legal, removed = [], []
        for data in group.datas:
            request, strategy = self.request(group, self._config(group, data), self.small), data_strategy(data.kind)
            problems = strategy.check(request)
            problems += expert_axes.check(request, strategy) if group.ep > 1 and not problems else []
            if (context := self._classes(group, data.kind).context) and not problems:
                problems += context_axes.check(request, strategy, context.mesh_dims(request))
            legal += [] if problems else [data]
            removed += [(DATA, 1, problems[0])] if problems else []
        return legal, removed

    def _sized_sets(self, group: LegalGroup, sizes: list[int], datas: list[DataStrategyConfig]) -> Checked:
        """The micro-batches of which sets of samples for statistics can be made."""
        legal, removed = [], []
        for size in sizes:
            problems_of_size: list[Problem] = []
            for data in datas:
                request = self.request(group, self._config(group, data), self.spec)
                request = replace(request, batch=self._batch(group, size))
                problems_of_size += sample_sets.resolve(request, data_strategy(data.kind).resolve(request))[1]
            legal += [] if problems_of_size else [size]
            removed += [(SAMPLES, 1, problems_of_size[0])] if problems_of_size else []
        return legal, removed

    @once_for("pp", "virtual_stages", "schedule")
    def stages(self, group: LegalGroup) -> tuple[tuple[Stage, ...], list[Problem]]:
        """(the stages, violations)."""
        cuts, problems = self._cut(group.pp * group.virtual_stages)
        rank_of = group.schedule.pp_rank
        return tuple(Stage(i, rank_of(i, group.pp), names) for i, names in enumerate(cuts)), problems

    def _config(self, group: LegalGroup, data: DataStrategyConfig) -> Config:
        key = "config", group.tp, group.expert.tp, group.number, group.pipeline.kind, group.virtual_stages, id(data)
        if key not in self._cache:
            strategy = replace(self.base.strategy, tensor=group.tensor, pipeline=group.pipeline, data=data)
            self._cache[key] = replace(self.base, strategy=replace(strategy, expert=group.expert))
        config: Config = self._cache[key]
        return config

    def request(self, group: LegalGroup, config: Config, spec: ModelSpec) -> Request:
        return Request(config, spec, group.pp, group.dp, group.tp, group.virtual_stages, None, 0, group.ep, group.cp)

    def request_of(self, group: LegalGroup, data: DataStrategyConfig) -> Request:
        return self.request(group, self._config(group, data), self.spec)

    def _batch(self, group: LegalGroup, micro_batch: int) -> BatchSizes:
        size = self.space.global_batch
        return BatchSizes(size, micro_batch, size // group.dp // micro_batch)

    def _classes(self, group: LegalGroup, data: str) -> StrategyClasses:
        expert = routing.dispatcher(self._config(group, group.datas[0]), self.spec) if group.ep > 1 else None
        kinds = tensor_strategy(group.tensor.kind), group.schedule
        context = context_strategy(self.base.strategy.context.kind) if group.cp > 1 else None
        return StrategyClasses(data_strategy(data), *kinds, expert, context)


def _distinct(spec: ModelSpec) -> ModelSpec:
    """A language model with one of all equal blocks: checks give the same answers, sooner."""
    if spec.kind != "tokens":
        return spec
    last = spec.blocks[-1].name
    return replace(spec, blocks=tuple(b for b in spec.blocks if b.name in (spec.first_alike[b.name], last)))
