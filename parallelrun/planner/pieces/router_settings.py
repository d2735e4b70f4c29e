"""Router settings: values from presets, checks, and the traffic of routing statistics.

Routing is part of the model (`model.router`): a routing group is a fixed number of consecutive samples of the global
batch, so every microbatch must contain complete groups. The expert dispatcher moves the tokens.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from math import lcm
from operator import attrgetter

from parallelrun.base import registry
from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES
from parallelrun.base.wording import counted, did_you_mean, divisors, either, nearest
from parallelrun.config.keys import known_keys
from parallelrun.config.schema.model_schema import ModelConfig, RouterConfig
from parallelrun.config.schema.run_schema import Config, ExpertConfig
from parallelrun.planner.contract.classes import expert_dispatcher
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.expert_dispatcher import ExpertDispatcher
from parallelrun.planner.contract.plan import WORLD, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.router import RouterSpec
from parallelrun.planner.pieces import routing_statistics as statistics

PURPOSE = "routing"
KEY, DISPATCHER = "model.router.", "strategy.expert."
MODEL = "model=moe_gpt"  # a preset with experts
# Keys of `model`.
OF_EXPERTS = ("expert_bias", "expert_ffn", "expert_period", "dense_layers", "shared_experts", "shared_gate")
CHOICES_OF = {"gshard": 2, "switch": 1}  # experts per token of the kinds that fix it
OURS = tuple(name.partition(".")[2] for name in registry.STRATEGIES if name.startswith("expert."))  # dispatchers


def fold(config: Config, user_keys: frozenset[str]) -> tuple[ModelConfig, list[Problem]]:
    """(the model with the router of the `strategy` preset and the user's keys, violations).

    The user's keys override the preset's, and a model with its own router keeps it. A kind that fixes the number of
    experts per token sets top_k, unless it is given.
    """
    names = [field.name for field in fields(RouterConfig)]
    problems, preset = [], {}
    for key, value in config.strategy.router.items():
        where = f"strategy.router.{key}"
        if key not in names:
            message = f"{where} is not a router setting; they are {', '.join(names)}"
            problems.append(Problem(message, where, did_you_mean(key, names, "strategy.router.")))
        elif value is None and not known_keys()[KEY + key].optional:
            problems.append(Problem(f"{where} must not be null", where, f"leave {where} out"))
        elif KEY + key not in user_keys and not config.model.own_router:
            preset[key] = value
    router = replace(config.model.router, **preset)
    if "top_k" not in preset and KEY + "top_k" not in user_keys:
        router = replace(router, top_k=CHOICES_OF.get(str(router.kind), router.top_k))
    return replace(config.model, router=router), problems


def own_router_notes(config: Config) -> list[str]:
    """A note if the model keeps its own router although the `strategy` preset has a different one."""
    differing = [
        key for key, value in config.strategy.router.items() if getattr(config.model.router, key, value) != value
    ]
    said = f"model={config.model.preset} keeps its own router; strategy={config.strategy.name} has another"
    if differing and _model_routes(config):
        return [f"{said} ({', '.join(differing)}), which is not read"]
    if not config.model.own_router or not config.model.experts or not differing:
        return []
    return [f"{said} ({', '.join(differing)}), which model.own_router=false takes"]


def _model_routes(config: Config) -> bool:
    """Return whether the experts, if there are any, belong to somebody else's module, which has its own router."""
    own = definitions.model(config).own_keys if registry.has("models", config.model.name) else None
    return own is not None and "roles" in own


def check_model(config: Config, experts: int) -> list[Problem]:
    """Return the router's violations that hold under every plan, except bounds. experts: number in a layer, or 0."""
    router = config.model.router
    kind, top_k = router.kind, router.top_k
    if experts < 1 or type(top_k) is not int or _model_routes(config):
        return []
    problems = []
    fixed = CHOICES_OF.get(kind, top_k)
    if top_k != fixed:
        message = f"{KEY}kind={kind} sends a token to {counted(fixed, 'expert')}, and {KEY}top_k={top_k}"
        problems.append(Problem(message, f"{KEY}top_k", f"{KEY}top_k={fixed} or {KEY}kind=top_k", kind="contradiction"))
    elif top_k > experts:
        message = f"{KEY}top_k={top_k}, and a layer has {counted(experts, 'expert')} to choose from"
        fix = f"model.experts={top_k}" + (f" or {KEY}top_k={experts}" if kind not in CHOICES_OF else "")
        problems.append(Problem(message, f"{KEY}top_k", fix, kind="arithmetic"))
    problems += _groups(router, experts)
    if router.eval_capacity_factor is not None and not RouterSpec(**vars(router)).limited:
        message = (
            f"{KEY}eval_capacity_factor={router.eval_capacity_factor}: without {KEY}capacity_factor an expert takes "
            "all that come, in evaluation too"
        )
        fix = f"{KEY}capacity_factor=1.25 or leave {KEY}eval_capacity_factor out"
        problems.append(Problem(message, f"{KEY}eval_capacity_factor", fix, kind="contradiction"))
    return problems


def _groups(router: RouterConfig, experts: int) -> list[Problem]:
    """Groups of experts must be equal, and those of a token hold its experts."""
    count, used, key = router.n_group, router.topk_group, f"{KEY}n_group"
    if count == 1 == used:
        return []
    if router.kind == "expert_choice":
        message = f"{key}={count} with {KEY}kind=expert_choice: its experts choose tokens, not tokens experts"
        return [Problem(message, key, f"{key}=1 {KEY}topk_group=1", kind="undefined")]
    if experts % count:
        message = f"{key}={count} does not divide a layer's {counted(experts, 'expert')}"
        return [Problem(message, key, either(key, nearest(count, divisors(experts))), kind="arithmetic")]
    size = experts // count
    if used > count:
        message = f"{KEY}topk_group={used} of {key}={count} groups"
        return [Problem(message, f"{KEY}topk_group", f"{KEY}topk_group={count}", kind="arithmetic")]
    if used * size < router.top_k:
        message = f"{KEY}topk_group={used} groups of {counted(size, 'expert')} are fewer than {KEY}top_k={router.top_k}"
        fix = f"{KEY}topk_group={-(-router.top_k // size)}"
        return [Problem(message, f"{KEY}topk_group", fix, kind="arithmetic")]
    return []


def dispatcher(config: Config, spec: ModelSpec) -> type[ExpertDispatcher]:
    """The expert dispatcher of a plan with ep > 1: as given, else ours that needs a capacity, or none: not where ep
    spans tp, because each of its ranks would send all capacity slots, of which it fills some."""
    if config.strategy.expert.kind:
        return expert_dispatcher(config.strategy.expert.kind)
    assert spec.router is not None
    needs_capacity = spec.router.limited and config.strategy.expert.tp != 1
    return next(cls for cls in map(expert_dispatcher, OURS) if cls.needs_capacity == needs_capacity)


def check(request: Request, parts: int) -> list[Problem]:
    """Return the router's violations by a plan. parts: divides micro_batch, so that each of the tensor strategy's parts
    consists of complete routing groups."""
    router, batch = request.spec.router, request.batch
    if router is None:
        return []
    problems = []
    kind = request.config.strategy.expert.kind
    if (
        kind
        and registry.has("strategies", f"expert.{kind}")
        and expert_dispatcher(kind).needs_capacity
        and not router.limited
    ):
        fix = "strategy.expert.kind=dropless"
        said = "the model's own router"
        if not router.is_own:
            said = f"model.router.kind={router.kind} and no model.router.capacity_factor"
            fix += f" or {KEY}capacity_factor=1.25"
        rows = f"strategy.expert.kind={kind} sends equally many rows to every expert"
        message = f"{rows}, and with {said} an expert takes all that come"
        problems.append(Problem(message, "strategy.expert.kind", fix, kind="undefined"))
    if batch is not None and batch.micro_batch % parts:
        problems.append(_cut_groups(request, parts))
    return problems


def _cut_groups(request: Request, parts: int) -> Problem:
    """The problem of a microbatch with incomplete routing groups."""
    batch, router = request.batch, request.spec.router
    assert batch is not None and router is not None
    group = router.group_samples
    num_parts = parts // group
    equal = f", in {num_parts} equal parts" if num_parts > 1 else ""
    of_groups = f"routing groups of {KEY}group_samples={group} samples{equal}"
    message = f"micro_batch={batch.micro_batch} does not hold whole {of_groups}"
    fixes = []
    if batch.replica_batch % parts == 0:
        legal = [n for n in divisors(batch.replica_batch) if n % parts == 0]
        fixes.append(either("micro_batch", nearest(batch.micro_batch, legal)))
    else:
        message += f"; a data replica has {batch.replica_batch} samples"
        step = lcm(request.dp * parts, request.dp * parts * (batch.microbatches if num_parts > 1 else 1))
        least = -(-batch.global_batch // step) * step
        fixes.append(f"global_batch={least}")
    if batch.micro_batch % num_parts == 0:
        fixes.append(either(f"{KEY}group_samples", nearest(group, divisors(batch.micro_batch // num_parts))))
    return Problem(message, f"{KEY}group_samples", " or ".join(fixes), kind="arithmetic")


def unread(config: Config, user_keys: frozenset[str], experts: int, ep: int) -> list[Problem]:
    """Return a problem for each given key of experts and routers that nothing reads. config: after `fold`."""
    if experts < 1:
        without = f"model={config.model.preset} has no experts"
        keys = [f"model.{key}" for key in OF_EXPERTS]
        keys += ["model.experts"] if config.model.experts else []  # set by the preset of a model without experts
        keys += [key for key in user_keys if key.startswith(KEY) or _is_dispatcher_key(key)]
        return [_unread(key, config, without, MODEL) for key in sorted(user_keys & set(keys))]
    problems = []
    if ep == 1 and (config.ep or 1) == 1:
        without = "every rank has all experts (ep is 1)"
        problems += [_unread(key, config, without, "ep=2") for key in sorted(user_keys) if _is_dispatcher_key(key)]
    router = config.model.router
    chosen = f"{KEY}kind={router.kind}"
    unlimited = "experts have no capacity" if not RouterSpec(**vars(router)).limited else ""
    by_experts = f"with {chosen} every expert takes equally many" if router.kind == "expert_choice" else ""
    one_choice = f"a token goes to one expert ({KEY}top_k=1)" if router.top_k == 1 and not by_experts else ""
    ignored = {
        "second_expert": (f"{chosen} has no such rule" if router.kind != "gshard" else "", f"{KEY}kind=gshard"),
        "renormalise": (one_choice, f"{KEY}top_k=2"),
        "drop_policy": (unlimited or by_experts, f"{KEY}capacity_factor=1.25"),
        "min_capacity": (unlimited, f"{KEY}capacity_factor=1.25"),
        "aux_coefficient": (by_experts, f"{KEY}kind=top_k"),
        "bias_rate": (by_experts, f"{KEY}kind=top_k"),
    }
    problems += [
        _unread(KEY + key, config, why, fix) for key, (why, fix) in ignored.items() if why and KEY + key in user_keys
    ]
    return problems


def _is_dispatcher_key(key: str) -> bool:
    return key.startswith(DISPATCHER) and key != f"{DISPATCHER}fills"


def _unread(key: str, config: Config, why: str, fix: str) -> Problem:
    return Problem(
        f"{key}={attrgetter(key)(config)} is not read: {why}", key, f"{fix} or leave {key} out", kind="unread"
    )


def warnings(spec: ModelSpec) -> tuple[str, ...]:
    """Warnings about this router."""
    if spec.router is None or spec.router.kind != "expert_choice":
        return ()
    return (
        f"{KEY}kind=expert_choice: an expert compares all tokens of a group, so a token's output depends on later "
        "ones; the loss of a causal model is no measure of what it can do when it generates",
    )


def collectives(plan: Plan) -> list[Collective]:
    """The all-reduce over all workers in every step: fp64 statistics of all layers with experts."""
    layers = sum(1 for layer in plan.spec.layers() if layer.layer_role == "router")
    if not layers or plan.num_workers == 1:
        return []
    elements = statistics.exchanged(layers, plan.spec.experts)
    return [Collective(WORLD, "all_reduce", PURPOSE, 1, elements * BYTES["float64"])]


def frozen(config: Config, plan: Plan) -> Config:
    """`config` with the plan's router as the model's own, its ep and its expert dispatcher: nothing left to fill in."""
    chosen = plan.spec.router
    router = config.model.router if chosen is None or chosen.is_own else RouterConfig(**asdict(chosen))
    expert = replace(config.strategy.expert, kind=plan.expert.kind, fills=False) if plan.expert else ExpertConfig()
    strategies = replace(config.strategy, router={}, expert=expert)
    return replace(config, model=replace(config.model, router=router), strategy=strategies, ep=plan.mesh.size("ep"))


def single_device(config: Config, plan: Plan) -> Config:
    """`config` for the single-device reference: the same router, without ep and a dispatcher."""
    frozen_model = frozen(config, plan)
    return replace(frozen_model, strategy=replace(frozen_model.strategy, expert=ExpertConfig()), ep=None)
