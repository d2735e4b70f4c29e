"""Resolve a config and a world into a frozen Plan, or report every violation at once."""

from __future__ import annotations

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import one_of
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed, narrowed
from parallelrun.planner.contract.classes import data_strategy
from parallelrun.planner.contract.degrees import LARGEST, Degrees
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.pieces import batch as batches
from parallelrun.planner.pieces import cluster_spec, expert_axes, partition
from parallelrun.planner.pieces import router_settings as routing
from parallelrun.planner.pieces.cluster_spec import ClusterSpec
from parallelrun.planner.pieces.packing import packed_spec
from parallelrun.planner.resolve import filling, rules, shorthands
from parallelrun.planner.resolve.default_precision import with_precision
from parallelrun.planner.resolve.draft import PlanDraft
from parallelrun.planner.resolve.suggest import keep_helpful


def resolve(
    config: Config,
    *,
    given: frozenset[str] = frozenset(),
    world: int | None = None,
    gpus: int | None = None,
    sweep: bool = False,
) -> Plan:
    """Return the Plan of a run. Raises ConfigError with every violation.

    given: the dotted keys that the user has set; all others come from a preset or a default. world: the number of ranks
    that a launcher has started, None if we start them. gpus: GPUs of this host. sweep: keys that the chosen strategies
    do not read are noted in `plan.warnings` instead of refused.
    """
    config = completed(config)
    solved = solve(config, given, world, gpus, sweep)
    if isinstance(solved, Plan):
        return solved
    if rules.too_large(config):  # a trial would plan with the largest number that is allowed
        raise ConfigError(*solved)

    def violations(changed: Config, key: str) -> list[Problem]:
        outcome = solve(changed, given | {key}, world, gpus, sweep)
        return [] if isinstance(outcome, Plan) else outcome

    raise ConfigError(*keep_helpful(solved, config, violations))


def solve(
    config: Config,
    given: frozenset[str],
    world: int | None,
    gpus: int | None,
    sweep: bool,
    spec: ModelSpec | None = None,
) -> Plan | list[Problem]:
    """Return the plan, or every violation. config: with the keys of all strategies. spec: of its model on its dataset,
    if another plan has it: that of a large model takes longer than the rest."""
    config, of_precision = with_precision(config, gpus)
    if rules.too_large(config):
        return value_violations(config, given)
    notes = routing.own_router_notes(config)
    folded, problems = shorthands.fold(config, given)
    problems += rules.check(folded)
    config = narrowed(folded)
    known_strategies = not any(problem.where.startswith(shorthands.OF_STRATEGIES) for problem in problems)
    cluster = cluster_spec.read(config, problems)
    of_spec: list[Problem] = []
    spec = spec or spec_of(config, of_spec)
    experts = spec.experts if spec is not None else config.model.experts
    servers = _servers(config, cluster, problems)
    problems += rules.check_devices(config, given, servers)

    def num_problems(trial: Degrees) -> int:
        return _num_trial_problems(config, spec, trial) if spec is not None and known_strategies else 0

    degrees = filling.fill(config, world, gpus, problems, servers, cluster, experts, num_problems)
    degrees.filled += of_precision
    problems += of_spec + routing.check_model(config, experts) + rules.check_tokens(config, spec)
    if spec is not None:
        degrees.shorten(partition.num_cuttable(spec), config)
    problems += rules.check_min_world(config, degrees.world) if degrees.sound else []
    unread = shorthands.unread(folded, given, degrees.pp, degrees.cp) + routing.unread(
        config, given, experts, degrees.ep
    )
    if not sweep:
        problems += unread
    unsplit = rules.check_products(spec, config, degrees.tp) if spec is not None else []
    problems += unsplit
    if spec is None or unsplit or not degrees.sound or not known_strategies:
        if degrees.sound:
            batches.fill(config, degrees.dp, degrees.pp, batches.BatchRules(), degrees.filled, problems)
        else:
            problems += batches.check(config)
        return list(dict.fromkeys(problems))
    said = (*(problem.what for problem in unread), *notes)
    solved = PlanDraft.of(config, spec, degrees).solve(problems, said)
    return solved if isinstance(solved, Plan) else list(dict.fromkeys(solved))


def value_violations(config: Config, user_keys: frozenset[str]) -> list[Problem]:
    """The violations that need no plan: of each value by itself, and of a few combinations of keys.

    Numbers that are too large to plan with come first. config: with the keys of all strategies.
    """
    problems = rules.too_large(config)
    folded, violations = shorthands.fold(config, user_keys)
    problems += violations + rules.check(folded)
    filling.read(config, problems)
    return list(dict.fromkeys(problems + batches.check(config)))


def _num_trial_problems(config: Config, spec: ModelSpec, trial: Degrees) -> int:
    """The number of violations of a plan with these degrees; a large one if simple arithmetic rules them out."""
    size = config.global_batch
    most_tp = spec.heads**2 or max(spec.hidden, 1)  # a grid of heads x heads
    if trial.pp > partition.num_cuttable(spec) or trial.tp > most_tp or (type(size) is int and size % trial.dp):
        return LARGEST
    solved = solve_degrees(config, spec, trial)
    return 0 if isinstance(solved, Plan) else len(solved)


def solve_degrees(config: Config, spec: ModelSpec, degrees: Degrees) -> Plan | list[Problem]:
    """Return the plan of these degrees, of which ep is filled in, or the violations. config: narrowed."""
    problems = rules.check_products(spec, config, degrees.tp)
    if problems:
        return problems
    degrees.ep = expert_axes.degree(config, config.ep, degrees, spec.experts, problems)
    return PlanDraft.of(config, spec, degrees).solve(problems)


def _servers(config: Config, cluster: ClusterSpec | None, problems: list[Problem]) -> int:
    """The number of servers: from the cluster spec or `servers`; 0 for a data strategy without servers."""
    kind = config.strategy.data.kind
    if not registry.has("strategies", f"data.{kind}"):
        return 0
    strategy = data_strategy(kind)
    requested = strategy.asked_servers(config)
    if cluster is not None:
        problems += cluster.disagreement(requested, f"strategy={config.strategy.name}", strategy.has_servers)
        requested = len(cluster.ps)
    return strategy.num_servers(requested)


def spec_of(config: Config, problems: list[Problem]) -> ModelSpec | None:
    """The model's spec, or None with its violations appended."""
    for kind, name in (("models", config.model.name), ("datasets", config.dataset.name)):
        if not registry.has(kind, name):
            problems += one_of(kind[:-1], name, registry.names(kind), f"parallelrun ls {kind}")
            return None
    if rules.out_of_bounds(config, "model."):
        return None
    try:
        vocab = definitions.dataset(config).vocab_size(config)
        if config.model.vocab is not None:
            if vocab is not None and vocab > config.model.vocab:
                message = f"model.vocab={config.model.vocab}, but dataset {config.dataset.name} has {vocab} token ids"
                problems.append(Problem(message, "model.vocab", f"model.vocab={vocab}", kind="arithmetic"))
            vocab = config.model.vocab
        spec = packed_spec(config, definitions.model(config).make(config, vocab or 0), problems)
        problems += definitions.check_samples(config, spec)
        return spec
    except ConfigError as error:
        problems += error.problems
        return None
