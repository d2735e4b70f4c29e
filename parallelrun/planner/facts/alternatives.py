"""Plans that differ from the user's in the strategy of one axis, resolved and predicted like every other plan.

`detail=data_axis` compares the data strategies on several numbers of nodes, `detail=layouts` the tensor layouts. A node
is a rank of the data axis or a server. Samples per worker are those of the user's plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed, kinds
from parallelrun.planner.contract.classes import data_strategy, tensor_strategy
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.facts.plan_facts import facts, figures
from parallelrun.planner.pieces.hosts import ranks_per_node
from parallelrun.planner.resolve.freeze import filled
from parallelrun.planner.resolve.resolve_config import solve

MAX_COUNTS = 6  # numbers of nodes


@dataclass(frozen=True)
class Point:
    """One plan. equivalence: to training on one device. sent_bytes: by the rank that sends most, in a step. figures:
    those of a sweep of plans."""

    nodes: int
    servers: int
    equivalence: str
    sent_bytes: int
    figures: dict[str, Any]

    @property
    def step_s(self) -> float | None:
        """The predicted step time, or its bound at peak rates (`is_bound`); None where the cluster gives no rates."""
        seconds: float | None = self.figures["step_time_predicted_s"]
        return seconds

    @property
    def is_bound(self) -> bool:
        return bool(self.figures["step_time_is_bound"])


@dataclass(frozen=True)
class Alternative:
    """One strategy. selected: it is the user's own. here: on as many nodes as the user's plan, None where it is not
    legal there, for the `reason`. curve: on several numbers of nodes."""

    name: str
    kind: str
    selected: bool
    here: Point | None
    curve: tuple[Point, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Alternatives:
    """All strategies of one axis. nodes: of the user's plan, with its servers. replica_batch: samples of a worker."""

    nodes: int
    servers: int
    replica_batch: int
    strategies: tuple[Alternative, ...]

    @property
    def selected(self) -> Alternative:
        return next(strategy for strategy in self.strategies if strategy.selected)

    @property
    def is_timed(self) -> bool:
        """Whether the cluster gives the rates from which step times follow."""
        return any(strategy.here and strategy.here.step_s for strategy in self.strategies)


def requested(config: Config, section: str) -> bool:
    """Return whether `detail` names a section. Its plans take a second or more, so no other command computes them."""
    return config.detail is not None and not {section, "all"}.isdisjoint(config.detail.split(","))


def data_axis(plan: Plan, config: Config) -> Alternatives | None:
    """The plan under every data strategy; None for a single replica without servers."""
    nodes = plan.mesh.size("dp") + plan.servers
    if nodes == 1:
        return None
    base, counts = filled(config, plan), node_counts(nodes)
    sections = {count: dict(_data_sections(plan, base, count)) for count in counts}
    data: Any = base.strategy.data
    own = _name(replace(data, servers=plan.servers) if plan.servers else data)
    strategies = []
    for name in dict.fromkeys((*sections[nodes], own)):
        section = sections[nodes].get(name, data)
        plans = {count: _solved(plan, base, "data", sections[count].get(name, section), count) for count in counts}
        points = {count: _point(solved, base, count) for count, solved in plans.items() if isinstance(solved, Plan)}
        reason = "" if nodes in points else str(plans[nodes])
        selected = isinstance(at := plans[nodes], Plan) and (at.data, at.servers) == (plan.data, plan.servers)
        strategies.append(Alternative(name, section.kind, selected, points.get(nodes), tuple(points.values()), reason))
    return Alternatives(nodes, plan.servers, plan.batch.replica_batch, _with_one_selected(strategies, own))


def node_counts(nodes: int) -> list[int]:
    """Powers of two up to twice the plan's nodes, and the plan's own."""
    powers = [2**exponent for exponent in range(1, (2 * nodes).bit_length()) if 2**exponent != nodes]
    return sorted([*powers[-(MAX_COUNTS - 1) :], nodes])


def layouts(plan: Plan, config: Config) -> Alternatives | None:
    """The plan in every tensor layout; None where tensors are not split."""
    tp = plan.mesh.size("tp")
    if tp == 1:
        return None
    base, nodes = filled(config, plan), plan.mesh.size("dp") + plan.servers
    choices = [choice for kind in kinds("tensor") for choice in tensor_strategy(kind).layout_choices(tp)]
    strategies: list[Alternative] = []
    for choice in choices:
        if any(strategy.reason and strategy.name == choice.variant_of for strategy in strategies):
            continue  # the layout that this one varies is not legal, for the same reason
        section = replace(choice.config, overlap=plan.tensor.overlap)
        solved = _solved(plan, base, "tensor", section, nodes)
        if isinstance(solved, Plan):
            selected = (solved.tensor, solved.mesh) == (plan.tensor, plan.mesh)
            strategies.append(Alternative(choice.name, section.kind, selected, _point(solved, base, nodes)))
        else:
            strategies.append(Alternative(choice.name, section.kind, False, None, reason=solved))
    own = plan.tensor.label(plan)
    if not any(strategy.selected for strategy in strategies):
        form = plan.tensor.asked_form(base)
        own += ("" if plan.tensor.save_gathered else " lean") + ("" if form == "auto" else f" {form}")
        strategies.append(Alternative(own, plan.tensor.kind, True, _point(plan, base, nodes)))
    return Alternatives(nodes, plan.servers, plan.batch.replica_batch, _with_one_selected(strategies, own))


def _with_one_selected(strategies: list[Alternative], own: str) -> tuple[Alternative, ...]:
    """Two spellings may resolve to one plan, the user's: the one with its name is marked, else the first."""
    selected = [strategy for strategy in strategies if strategy.selected]
    marked = next((strategy for strategy in selected if strategy.name == own), selected[0])
    return tuple(replace(strategy, selected=strategy is marked) for strategy in strategies)


def _data_sections(plan: Plan, base: Config, nodes: int) -> Iterator[tuple[str, Any]]:
    """(name, section) of every data strategy on `nodes` nodes: as a search tries it, and as it names itself."""
    pp, tp = plan.mesh.size("pp"), plan.mesh.size("tp")
    in_node = max(1, ranks_per_node(base.cluster, nodes * pp * tp) // tp)
    for kind in kinds("data"):
        strategy = data_strategy(kind)
        if strategy.has_servers:
            own: Any = base.strategy.data if plan.data.kind == kind else strategy.config_class()
            counts: dict[object, int] = {count: count for count in sorted({1, plan.servers or 1})}
            for text, servers in {**counts, "half": nodes // 2}.items():
                yield _name(replace(own, servers=text)), replace(own, servers=servers)
            continue
        sections = strategy.choices(nodes, pp, in_node) or [
            strategy.config_class(**settings) for settings in strategy.compared
        ]
        yield from ((_name(section), section) for section in sections)


def _name(section: Any) -> str:
    """The kind of a data strategy and its settings: `fsdp shard=8`."""
    settings = [
        f"{item.name}={str(value).lower() if isinstance(value, bool) else value}"
        for item in fields(section)
        if item.name != "kind" and (value := getattr(section, item.name)) != _default(item)
    ]
    return " ".join([section.kind, *settings])


def _default(item: Any) -> object:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _solved(plan: Plan, base: Config, axis: str, section: Any, nodes: int) -> Plan | str:
    """The plan with another section of `strategy`, on `nodes` nodes; or why it is not legal."""
    data: Any = section if axis == "data" else base.strategy.data
    servers = (data.servers or 1) if data_strategy(data.kind).has_servers else 0
    dp = nodes - servers
    if dp < 1:
        return f"no worker is left beside {servers} servers"
    changed = replace(
        base,
        strategy=replace(base.strategy, **{axis: section}),
        cluster=replace(base.cluster, ps=None, worker=None),
        dp=dp,
        world=None,
        global_batch=plan.batch.replica_batch * dp,
    )
    solved = solve(completed(changed), frozenset(), None, None, sweep=True, spec=plan.spec)
    return solved if isinstance(solved, Plan) else "; ".join(dict.fromkeys(problem.what for problem in solved))


def _point(plan: Plan, base: Config, nodes: int) -> Point:
    results = facts(plan, base)
    rows = [row for row in results.traffic if row.operation != "recv"]
    sent = round(sum(row.wire_bytes / row.every for row in rows))
    return Point(nodes, plan.servers, plan.equivalence.kind, sent, figures(plan, base.cluster, results))
