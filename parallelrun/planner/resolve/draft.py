"""The steps from chosen degrees and strategies to a Plan: request, batch, stages and mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.errors import Problem
from parallelrun.base.precision import TABLE
from parallelrun.base.wording import counted, either
from parallelrun.config.schema.run_schema import Config, PipelineConfig
from parallelrun.config.schema.stack_schema import OWN
from parallelrun.planner.contract.classes import (
    StrategyClasses,
    context_strategy,
    data_strategy,
    pipeline_schedule,
    tensor_strategy,
)
from parallelrun.planner.contract.degrees import Degrees
from parallelrun.planner.contract.optimizers import OPTIMIZERS, filled_lr_scale
from parallelrun.planner.contract.plan import BatchSizes, Equivalence, Plan, SampleSets, Stage
from parallelrun.planner.contract.request import Request
from parallelrun.planner.contract.tensor_strategy import TensorStrategy
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import MEASURED, ModelSpec
from parallelrun.planner.pieces import batch as batches
from parallelrun.planner.pieces import context_axes, expert_axes, partition, sample_sets
from parallelrun.planner.pieces import router_settings as routing
from parallelrun.planner.predict import cluster_cost, prediction

REFERENCE_SCHEDULE = PipelineConfig().kind  # its memory determines the number of microbatches that is filled in
LARGEST_SCHEDULE = 2**19  # forward passes of all stages together


@dataclass(frozen=True)
class PlanDraft:
    """A configuration with the model and degrees to plan it with."""

    config: Config
    spec: ModelSpec
    degrees: Degrees
    strategies: StrategyClasses

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, degrees: Degrees) -> PlanDraft:
        """The draft with the strategies that the config names; without a pipeline, dispatcher or context strategy if
        pp, ep or cp is 1."""
        strategies = StrategyClasses(
            data_strategy(config.strategy.data.kind),
            tensor_strategy(config.strategy.tensor.kind),
            pipeline_schedule(config.strategy.pipeline.kind if degrees.pp > 1 else "none"),
            routing.dispatcher(config, spec) if degrees.ep > 1 else None,
            context_strategy(config.strategy.context.kind) if degrees.cp > 1 else None,
        )
        return cls(config, spec, degrees, strategies)

    def solve(self, problems: list[Problem], notes: tuple[str, ...] = ()) -> Plan | list[Problem]:
        """The plan, or `problems` and the violations of the request; without any, those of its stages and sample sets.

        notes: warnings of the plan.
        """
        request = self.request(problems)
        if problems:
            return problems
        stages, of_stages = self.stages(request)
        sets, of_sets = self.sample_sets(request)
        return of_stages + of_sets or self.plan(request, stages, sets, notes)

    def request(self, problems: list[Problem]) -> Request:
        """The request with its batch filled in; appends the violations that the strategies find."""
        config, degrees, strategies = self.config, self.degrees, self.strategies
        request = Request(
            config, self.spec, degrees.pp, degrees.dp, degrees.tp, self._virtual_stages(), None, degrees.servers,
            degrees.ep, degrees.cp,
        )  # fmt: skip
        of_any_batch = strategies.pipeline.check(request)
        problems += strategies.tensor.check(request) + strategies.data.check(request) + of_any_batch
        problems += check_depth(request)
        if strategies.expert:
            problems += strategies.expert.check(request) + expert_axes.check(request, strategies.data)
        if strategies.context and not (found := strategies.context.check(request)):
            problems += context_axes.check(request, strategies.data, strategies.context.mesh_dims(request))
        elif strategies.context:
            problems += found

        def violations(batch: BatchSizes) -> list[Problem]:
            problems_of_batch = strategies.pipeline.check(replace(request, batch=batch))
            return [problem for problem in problems_of_batch if problem not in of_any_batch]

        group = self.spec.router.group_samples if self.spec.router else 1
        parts = strategies.tensor.micro_batch_divisor(request) * group
        rules = batches.BatchRules(
            parts * (config.strategy.expert.chunks if strategies.expert else 1),
            violations,
            lambda batch: bool(problems) or not self.sample_sets(replace(request, batch=batch))[1],
            lambda batch: bool(problems) or self._fits(replace(request, batch=batch)),
            (self.spec.seq or 0) if self.spec.kind == "tokens" else 0,
        )
        batch = batches.fill(config, degrees.dp, degrees.pp, rules, degrees.filled, problems)
        if batch is None:
            return request
        request = replace(request, batch=batch)
        problems += violations(batch) + check_length(request) + check_loss_chunks(request, strategies)
        problems += check_offload(request, strategies) or check_rounding(request, strategies)
        problems += strategies.tensor.check(request) + strategies.data.check(request)
        problems += strategies.expert.check(request) if strategies.expert else []
        problems += routing.check(request, parts)
        return request

    def sample_sets(self, request: Request) -> tuple[SampleSets | None, list[Problem]]:
        """(the sets of samples that share BatchNorm statistics, violations)."""
        return sample_sets.resolve(request, self.strategies.data.resolve(request))

    def stages(self, request: Request) -> tuple[tuple[Stage, ...], list[Problem]]:
        """(the stages, violations)."""
        cuts, problems = partition.cut(self.spec, self.config, request.pp * request.virtual_stages)
        pp_rank = self.strategies.pipeline.pp_rank
        return tuple(Stage(i, pp_rank(i, request.pp), names) for i, names in enumerate(cuts)), problems

    def plan(
        self, request: Request, stages: tuple[Stage, ...], sets: SampleSets | None = None,
        notes: tuple[str, ...] = (), tensor: TensorStrategy | None = None,
    ) -> Plan:  # fmt: skip
        """The plan of a request without violations. tensor: its resolved tensor strategy, if known."""
        config, degrees, strategies = self.config, self.degrees, self.strategies
        ep_axes = strategies.expert.mesh_dims(request) if strategies.expert else ((), ())
        data = strategies.data.resolve(request)
        data_axes, tensor_axes = data.mesh_dims(request.num_data_ranks), strategies.tensor.mesh_dims(request)
        context = strategies.context.mesh_dims(request) if strategies.context else None
        assert request.batch is not None
        plan = Plan(
            preset=config.strategy.name,
            world=degrees.world,
            mesh=context_axes.mesh_shape(request.pp, data_axes, context, ep_axes, tensor_axes),
            batch=request.batch,
            data=data,
            tensor=tensor or strategies.tensor.resolve(request),
            pipeline=strategies.pipeline.resolve(request),
            stages=stages,
            spec=request.spec,
            precision=config.stack.precision(TABLE[config.precision.name]).rounded(config.optimizer.rounding),
            recompute=config.recompute,
            dropout=config.dropout,
            loss_chunks=config.loss_chunks,
            device=degrees.device,
            optimizer=config.optimizer.name,
            optimizer_states=OPTIMIZERS[config.optimizer.name].num_states(config.optimizer)
            + config.stack.keeps_copy(TABLE[config.precision.name]),
            offloads_optimizer=config.optimizer.offload,
            equivalence=Equivalence("exact"),
            servers=degrees.servers,
            filled=(
                *degrees.filled,
                *strategies.tensor.filled(request),
                *strategies.data.filled(request),
                *(strategies.context.filled(request) if strategies.context else ()),
                *filled_lr_scale(config, request.dp),
                *sample_sets.filled(config.model.norm_samples, sets),
            ),
            warnings=(*degrees.warnings, *notes, *routing.warnings(request.spec)),
            sample_sets=sets,
            expert=strategies.expert.resolve(request) if strategies.expert else None,
            context=strategies.context.resolve(request) if strategies.context else None,
            stack=config.stack,
        )
        promises = [strategy.equivalence(plan) for strategy in (plan.data, plan.tensor, plan.expert) if strategy]
        promise = next((p for p in promises if p.kind != "exact"), promises[0])
        return plan if promise == plan.equivalence else replace(plan, equivalence=promise)

    def _virtual_stages(self) -> int:
        """Stages per rank: as the user set it, else the schedule's default."""
        requested, schedule = self.config.strategy.pipeline.virtual_stages, self.strategies.pipeline
        if self.degrees.pp == 1 or not schedule.takes_virtual_stages:
            return 1
        if requested is not None:
            return requested
        number = schedule.default_virtual_stages(self.degrees.pp, partition.num_cuttable(self.spec))
        self.degrees.filled.append(f"virtual_stages={number} (filled: stages per rank under {schedule.kind})")
        return number

    def _fits(self, request: Request) -> bool:
        """Return whether a batch fits a device; True if the cluster gives no memory size.

        Memory is that of REFERENCE_SCHEDULE, so that a sweep over schedules compares equal batches.
        """
        draft = self
        if not self.config.cluster.memory_gb:
            return True
        if request.pp > 1:
            pipeline = replace(self.config.strategy.pipeline, kind=REFERENCE_SCHEDULE, split=[])
            config = replace(self.config, strategy=replace(self.config.strategy, pipeline=pipeline))
            strategies = replace(self.strategies, pipeline=pipeline_schedule(REFERENCE_SCHEDULE))
            draft = replace(self, config=config, strategies=strategies)
            request = replace(request, config=config, virtual_stages=1)
        stages, problems = draft.stages(request)
        if problems:
            return True
        cluster = self.config.cluster
        return cluster_cost.fits(prediction.heaviest(draft.plan(request, stages), cluster), cluster) == "yes"


def check_depth(request: Request) -> list[Problem]:
    """Check that every stage has a block of the model."""
    most, num_stages = partition.num_cuttable(request.spec), request.pp * request.virtual_stages
    if num_stages <= partition.most_stages(request.spec):
        return []
    shown = f"pp {request.pp}" + (f" x virtual_stages {request.virtual_stages}" if request.virtual_stages > 1 else "")
    message = f"{shown} = {num_stages} stages, and the model has {most} layer{'s' * (most > 1)} to cut between"
    fixes = [either("pp", [most // request.virtual_stages])] if most >= request.virtual_stages else []
    if request.virtual_stages > 1 and most // request.pp > 1:
        fixes.append(f"virtual_stages={most // request.pp}")
    if "layers" in (definitions.model(request.config).own_keys or ()):
        fixes.append(f"model.layers={num_stages}")
    return [Problem(message, "pp", " or ".join(fixes), kind="arithmetic")]


def check_length(request: Request) -> list[Problem]:
    """Limit the length of the schedule, because every action is simulated (`simulate.of_plan`)."""
    assert request.batch is not None
    num_stages, count = request.pp * request.virtual_stages, request.batch.microbatches
    if request.pp == 1 or num_stages * min(count, 16 * request.pp) <= LARGEST_SCHEDULE:
        return []
    message = f"{num_stages} stages x {count} microbatches are more than can be planned: at most {LARGEST_SCHEDULE}"
    most = LARGEST_SCHEDULE // num_stages
    return [Problem(message, "pp", f"microbatches={most}" if most else "pp=64", kind="arithmetic")]


def check_loss_chunks(request: Request, strategies: StrategyClasses) -> list[Problem]:
    """Check that the loss reads the product of a head of ours, which can be cut by tokens."""
    assert request.batch is not None
    chunks, spec = request.config.loss_chunks, request.spec
    tokens = request.batch.micro_batch * spec.targets_per_sample // request.cp
    shown, fix = f"loss_chunks={chunks}", "loss_chunks=1"
    if chunks == 1:
        return []
    if spec.blocks[-1].kind == MEASURED or [x.layer_role for x in spec.blocks[-1].layers[-1:]] != ["head"]:
        message = f"{shown}: model={spec.name} does not end in a vocabulary head of parallelrun's own"
        return [Problem(message, "loss_chunks", fix, kind="not_built" if spec.kind == "tokens" else "undefined")]
    if request.tp > 1 and not strategies.tensor.is_one_dimensional:
        message = f"{shown}: layout={strategies.tensor.layout_name} computes all logits at once"
        return [Problem(message, "loss_chunks", f"layout=1d or {fix}", kind="not_built")]
    if chunks > tokens:
        message = f"{shown} is more than the {counted(tokens, 'token')} of a microbatch on a rank"
        return [Problem(message, "loss_chunks", f"loss_chunks={tokens}", kind="arithmetic")]
    return []


def check_offload(request: Request, strategies: StrategyClasses) -> list[Problem]:
    """Check that nothing but the optimizer reads its state, which is on the host."""
    config, key = request.config, "optimizer.offload"
    if not config.optimizer.offload:
        return []
    if strategies.data.has_servers:
        return [Problem(f"{key}=true: servers have the optimizer's state", key, f"{key}=false", kind="unread")]
    if config.sdc.every:
        message = f"{key}=true: sdc.every compares the optimizer's state on the devices"
        return [Problem(message, "sdc.every", f"sdc.every=0 or {key}=false", kind="not_built")]
    return []


def check_rounding(request: Request, strategies: StrategyClasses) -> list[Problem]:
    """Check that weights in bf16 alone are changed by one update a step, an element at a time, which counts steps."""
    config, router, kind = request.config, request.spec.router, OPTIMIZERS.get(request.config.optimizer.name)
    if config.optimizer.rounding == "none" or kind is None:
        return []
    is_built = kind.elementwise and "step" in kind.state_names and not config.optimizer.offload
    is_built &= config.precision.name in ("bf16", "fp8") and config.stack.name == OWN
    is_built &= not (strategies.data.has_servers or strategies.data.resolve(request).independent)
    is_built &= not (router and router.bias_rate) and request.spec.kind == "tokens"  # statistics need more bits
    message = "optimizer.rounding needs bf16, AdamW or Adagrad on devices, equal replicas, no BatchNorm nor bias_rate"
    return [] if is_built else [Problem(message, "optimizer.rounding", "optimizer.rounding=none", kind="not_built")]
