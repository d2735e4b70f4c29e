"""resolve: config and world -> frozen Plan, or every violation at once. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from parallelrun import definitions, registry
from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.plan import batch as batches
from parallelrun.plan import (
    cluster_cost,
    cluster_spec,
    expert_axes,
    partition,
    prediction,
    routing,
    rules,
    sample_sets,
    shorthands,
)
from parallelrun.plan import degrees as degree_rules
from parallelrun.plan.cluster_spec import ClusterSpec
from parallelrun.plan.degrees import Degrees
from parallelrun.plan.load import (
    StrategyClasses,
    data_strategy,
    expert_dispatcher,
    pipeline_schedule,
    tensor_strategy,
)
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.plan.optimizers import OPTIMIZERS, filled_lr_scale
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Batch, Equivalence, Plan, Stage
from parallelrun.plan.suggest import keep_helpful
from parallelrun.precision import TABLE
from parallelrun.wording import did_you_mean, either

REFERENCE_SCHEDULE = "1f1b"  # its memory decides how many microbatches are filled in
LARGEST_SCHEDULE = 2**19  # forward passes of all stages together


def resolve(
    config: Config,
    *,
    given: frozenset[str] = frozenset(),
    world: int | None = None,
    gpus: int | None = None,
    sweep: bool = False,
) -> Plan:
    """The Plan of a run.

    given: the keys set by the user (dotted), as against the preset or a default. world: the ranks that a launcher has
    started, None when we start them. gpus: GPUs of this host. sweep: keys that the chosen strategies do not read are
    noted
    in `plan.warnings` instead of refused. Raises ConfigError with every violation.
    """
    solved = solve(config, given, world, gpus, sweep)
    if isinstance(solved, Plan):
        return solved

    def violations(changed: Config, key: str) -> list[Problem]:
        outcome = solve(changed, given | {key}, world, gpus, sweep)
        return [] if isinstance(outcome, Plan) else outcome

    raise ConfigError(*keep_helpful(solved, config, violations))


def solve(
    config: Config, given: frozenset[str], world: int | None, gpus: int | None, sweep: bool
) -> Plan | list[Problem]:
    """The plan, or every violation."""
    problems = rules.too_large(config)
    if problems:
        return problems
    notes = routing.kept(config)
    config, problems = shorthands.fold(config, given)
    problems += rules.check(config)
    known_strategies = not any(problem.where.startswith(shorthands.OF_STRATEGIES) for problem in problems)
    cluster = cluster_spec.read(config, problems)
    of_spec: list[Problem] = []
    spec = _spec(config, of_spec)
    experts = spec.experts if spec is not None else config.model.experts
    servers = _servers(config, cluster, problems)

    def num_problems(trial: Degrees) -> int:
        return _num_trial_problems(config, spec, trial) if spec is not None and known_strategies else 0

    degrees = degree_rules.fill(config, world, gpus, problems, servers, cluster, experts, num_problems)
    problems += of_spec + routing.check_model(config, experts) + rules.check_tokens(config, spec)
    if spec is not None:
        degrees.shorten(partition.num_cuttable(spec), config)
    unread = shorthands.unread(config, given, degrees.pp) + routing.unread(config, given, experts, degrees.ep)
    if not sweep:
        problems += unread
    unsplit = rules.check_images(spec, config, degrees.tp) if spec is not None else []
    problems += unsplit
    if spec is None or unsplit or not degrees.sound or not known_strategies:
        if degrees.sound:
            batches.fill(config, degrees.dp, degrees.pp, batches.Rules(), degrees.filled, problems)
        return _distinct(problems)
    strategies = _ways(config, spec, degrees)
    request = _request(config, spec, degrees, strategies, problems)
    if problems:
        return _distinct(problems)
    assert request.batch is not None
    stages, problems = _stages(config, spec, request, strategies)
    if problems:
        return problems
    sets, problems = sample_sets.resolve(request, strategies.data.resolve(request))
    if problems:
        return problems
    plan = _plan(config, request, strategies, degrees, stages, (*(problem.what for problem in unread), *notes))
    said = sample_sets.filled(config.model.norm_samples, sets)
    return replace(plan, sample_sets=sets, filled=(*plan.filled, *said))


def _num_trial_problems(config: Config, spec: ModelSpec, trial: Degrees) -> int:
    """The number of violations of a plan of these degrees; a large one where plain arithmetic refuses them."""
    size = config.global_batch
    most_tp = spec.heads**2 or max(spec.hidden, 1)  # a grid of heads x heads
    if trial.pp > partition.num_cuttable(spec) or trial.tp > most_tp or (type(size) is int and size % trial.dp):
        return degree_rules.LARGEST
    problems = rules.check_images(spec, config, trial.tp)
    if not problems:
        trial.ep = expert_axes.degree(config, config.ep, trial.dp, spec.experts, trial.filled, problems)
        strategies = _ways(config, spec, trial)
        request = _request(config, spec, trial, strategies, problems)
        problems += (
            [] if problems else _stages(config, spec, request, strategies)[1] + _set_problems(request, strategies)
        )
    return len(problems)


def _ways(config: Config, spec: ModelSpec, degrees: Degrees) -> StrategyClasses:
    return StrategyClasses(
        data_strategy(config.strategy.data.kind),
        tensor_strategy(config.strategy.tensor.kind),
        pipeline_schedule(_pipeline_kind(config, degrees)),
        expert_dispatcher(routing.dispatcher_kind(config, spec)) if degrees.ep > 1 else None,
    )


def _servers(config: Config, cluster: ClusterSpec | None, problems: list[Problem]) -> int:
    """Ranks that are no workers: as many as the data strategy, if it has any, is asked for or the cluster spec
    names."""
    kind = config.strategy.data.kind
    if not registry.has("strategies", f"data.{kind}"):
        return 0
    strategy, asked = data_strategy(kind), config.strategy.data.servers
    if cluster is not None:
        problems += cluster.disagreement(asked, f"strategy={config.strategy.name}", strategy.has_servers)
        asked = len(cluster.ps)
    return strategy.num_servers(asked)


def _pipeline_kind(config: Config, degrees: Degrees) -> str:
    return config.strategy.pipeline.kind if degrees.pp > 1 else "none"


def _spec(config: Config, problems: list[Problem]) -> ModelSpec | None:
    """The model's spec, or None with its violations appended."""
    for kind, name in (("models", config.model.name), ("datasets", config.dataset.name)):
        if not registry.has(kind, name):
            key, known = kind[:-1], registry.names(kind)
            what = f"{key}={name} is unknown; it is one of {', '.join(known)}"
            problems.append(Problem(what, key, did_you_mean(name, known, f"{key}="), f"parallelrun ls {kind}"))
            return None
    if rules.out_of_bounds(config, "model."):
        return None
    try:
        vocab = definitions.dataset(config).vocab_size(config)
        if config.model.vocab is not None:
            if vocab is not None and vocab > config.model.vocab:
                what = f"model.vocab={config.model.vocab}, but dataset {config.dataset.name} has {vocab} token ids"
                problems.append(Problem(what, "model.vocab", f"model.vocab={vocab}", kind="arithmetic"))
            vocab = config.model.vocab
        return definitions.model(config).make(config, vocab or 0)
    except ConfigError as error:
        problems += error.problems
        return None


def _request(
    config: Config, spec: ModelSpec, degrees: Degrees, strategies: StrategyClasses, problems: list[Problem]
) -> Request:
    """The filled request, with the strategies' violations appended."""
    number = _virtual_stages(config, spec, degrees)
    request = Request(config, spec, degrees.pp, degrees.dp, degrees.tp, number, None, degrees.servers, degrees.ep)
    standing = strategies.pipeline.check(request)
    problems += strategies.tensor.check(request) + strategies.data.check(request) + standing
    problems += _depth(request)
    if strategies.expert:
        problems += strategies.expert.check(request) + expert_axes.check(request, strategies.data)

    def violations(batch: Batch) -> list[Problem]:
        return [
            problem for problem in strategies.pipeline.check(replace(request, batch=batch)) if problem not in standing
        ]

    def suits(batch: Batch) -> bool:
        return bool(problems) or not _set_problems(replace(request, batch=batch), strategies)

    parts = routing.sample_parts(spec, strategies.tensor.micro_batch_divisor(request))
    rules = batches.Rules(
        parts * (config.strategy.expert.chunks if strategies.expert else 1), violations, suits,
        lambda batch: bool(problems) or _fits(replace(request, batch=batch), strategies, degrees),
        (spec.seq or 0) if spec.kind == "tokens" else 0,
    )  # fmt: skip
    batch = batches.fill(config, degrees.dp, degrees.pp, rules, degrees.filled, problems)
    if batch is not None:
        request = replace(request, batch=batch)
        problems += violations(batch) + _actions(request)
        for strategy in (strategies.tensor, strategies.data):
            problems += strategy.check(request)
        problems += strategies.expert.check(request) if strategies.expert else []
        problems += routing.check(request, parts)
    return request


def _set_problems(request: Request, strategies: StrategyClasses) -> list[Problem]:
    return sample_sets.resolve(request, strategies.data.resolve(request))[1]


def _fits(request: Request, strategies: StrategyClasses, degrees: Degrees) -> bool:
    """Does this batch fit a device, as far as the cluster says?

    Under REFERENCE_SCHEDULE, whatever the schedule: else the points of a sweep would differ in their batches too.
    """
    config = request.config
    if not config.cluster.memory_gb:
        return True
    if request.pp > 1:
        pipeline = replace(config.strategy.pipeline, kind=REFERENCE_SCHEDULE, split=[])
        config = replace(config, strategy=replace(config.strategy, pipeline=pipeline))
        strategies = replace(strategies, pipeline=pipeline_schedule(REFERENCE_SCHEDULE))
        request = replace(request, config=config, virtual_stages=1)
    stages, problems = _stages(config, request.spec, request, strategies)
    if problems:
        return True
    memories = prediction.memories(_plan(config, request, strategies, degrees, stages, ()))
    return all(cluster_cost.fits(memory, config.cluster) == "yes" for memory in memories.values())


def _virtual_stages(config: Config, spec: ModelSpec, degrees: Degrees) -> int:
    """Stages per rank: as given, else the schedule's default."""
    asked, schedule = config.strategy.pipeline.virtual_stages, pipeline_schedule(config.strategy.pipeline.kind)
    if degrees.pp == 1 or not schedule.takes_virtual_stages:
        return 1
    if asked is not None:
        return asked
    number = schedule.default_virtual_stages(degrees.pp, partition.num_cuttable(spec))
    degrees.filled.append(f"virtual_stages={number} (filled: stages per rank under {schedule.kind})")
    return number


def _depth(request: Request) -> list[Problem]:
    """Every stage needs a layer of its own."""
    most, num_stages = partition.num_cuttable(request.spec), request.pp * request.virtual_stages
    if num_stages <= most:
        return []
    shown = f"pp {request.pp}" + (f" x virtual_stages {request.virtual_stages}" if request.virtual_stages > 1 else "")
    what = f"{shown} = {num_stages} stages, and the model has {most} layer{'s' * (most > 1)} to cut between"
    fixes = [either("pp", [most // request.virtual_stages])] if most >= request.virtual_stages else []
    if request.virtual_stages > 1 and most // request.pp > 1:
        fixes.append(f"virtual_stages={most // request.pp}")
    if "layers" in definitions.model(request.config).sizes:
        fixes.append(f"model.layers={num_stages}")
    return [Problem(what, "pp", " or ".join(fixes), kind="arithmetic")]


def _actions(request: Request) -> list[Problem]:
    """What the schedule does is simulated action by action (`simulate.of_plan`), so there is a limit to it."""
    assert request.batch is not None
    num_stages, count = request.pp * request.virtual_stages, request.batch.microbatches
    if request.pp == 1 or num_stages * min(count, 16 * request.pp) <= LARGEST_SCHEDULE:
        return []
    what = f"{num_stages} stages x {count} microbatches are more than can be planned: at most {LARGEST_SCHEDULE}"
    most = LARGEST_SCHEDULE // num_stages
    return [Problem(what, "pp", f"microbatches={most}" if most else "pp=64", kind="arithmetic")]


def _stages(
    config: Config, spec: ModelSpec, request: Request, strategies: StrategyClasses
) -> tuple[tuple[Stage, ...], list[Problem]]:
    num_stages = request.pp * request.virtual_stages
    cuts, problems = partition.cut(spec, config, num_stages)
    pp_rank = strategies.pipeline.pp_rank
    return tuple(Stage(i, pp_rank(i, request.pp), names) for i, names in enumerate(cuts)), problems


def _plan(
    config: Config,
    request: Request,
    strategies: StrategyClasses,
    degrees: Degrees,
    stages: tuple[Stage, ...],
    notes: tuple[str, ...],
) -> Plan:
    ep_axes = strategies.expert.mesh_dims(request) if strategies.expert else ((), ())
    data = strategies.data.resolve(request)
    data_dims, data_flattened = expert_axes.split(*data.mesh_dims(request.dp), *ep_axes)
    tensor_dims, tensor_flattened = strategies.tensor.mesh_dims(request)
    assert request.batch is not None
    plan = Plan(
        preset=config.strategy.name,
        world=degrees.world,
        mesh=MeshShape((("pp", request.pp), *data_dims, *tensor_dims), (*data_flattened, *tensor_flattened)),
        batch=request.batch,
        data=data,
        tensor=strategies.tensor.resolve(request),
        pipeline=strategies.pipeline.resolve(request),
        stages=stages,
        spec=request.spec,
        precision=TABLE[config.precision.name],
        recompute=config.recompute,
        dropout=config.dropout,
        device=degrees.device,
        optimizer=config.optimizer.name,
        optimizer_states=OPTIMIZERS[config.optimizer.name].num_states(config.optimizer),
        equivalence=Equivalence("exact"),
        servers=degrees.servers,
        filled=(
            *degrees.filled,
            *strategies.tensor.filled(request),
            *strategies.data.filled(request),
            *filled_lr_scale(config, request.dp),
        ),
        warnings=(*degrees.warnings, *notes, *routing.warnings(request.spec)),
        expert=strategies.expert.resolve(request) if strategies.expert else None,
    )
    promises = [strategy.equivalence(plan) for strategy in (plan.data, plan.tensor, plan.expert) if strategy]
    return replace(plan, equivalence=next((p for p in promises if p.kind != "exact"), promises[0]))


def _distinct(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
