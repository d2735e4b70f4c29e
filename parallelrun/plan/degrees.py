"""The degrees pp, dp and tp: those that are given, those filled from the world, and a check that their product fits.

ep is not a factor of the product: it divides dp, whose ranks also hold the experts (`expert_axes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from parallelrun.config.schema import DEFAULT_GLOBAL_BATCH, Config
from parallelrun.errors import Problem
from parallelrun.plan import expert_axes, fill_order
from parallelrun.plan.cluster_spec import ClusterSpec
from parallelrun.plan.hosts import ranks_per_node
from parallelrun.plan.load import data_strategy
from parallelrun.wording import counted, divisors, nearest

AXES = ("pp", "dp", "tp")
LARGEST = 2**20


@dataclass
class Degrees:
    """pp, dp, tp, ep (a divisor of dp) and the number of servers, which together determine the world.

    filled: sentences on values that were filled in. sound: the degrees can be planned with. demonstrated: no degree was
    given, so these are the preset's demonstration plan.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    servers: int = 0
    device: str = "cpu"
    filled: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sound: bool = True
    demonstrated: bool = False

    def shorten(self, most: int, config: Config) -> None:
        """Reduce pp of the demonstration plan to `most`, the number of stages that the model can be cut into."""
        if not self.demonstrated or self.pp <= most or config.strategy.own_axis == "pp":
            return
        self.pp = most
        sizes = " ".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "dp=1"
        self.filled[0] = f"{sizes} (filled: the smallest plan that shows strategy={config.strategy.name}, at pp={most})"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp + self.servers


def fill(
    config: Config,
    world: int | None,
    gpus: int | None,
    problems: list[Problem],
    servers: int = 0,
    cluster: ClusterSpec | None = None,
    experts: int = 0,
    num_problems: Callable[[Degrees], int] = lambda degrees: 0,
) -> Degrees:
    """Return the degrees of a run; append every violation to `problems`.

    The preset's axes that are not given share the ranks that the given degrees and the servers leave of the world, or
    the GPUs that the degrees leave (servers need no GPU). On CPU without degrees or a world, the preset's demonstration
    plan is used. If only ep is given, dp equals it.

    world: the number of ranks that a launcher has started, None without a launcher. gpus: GPUs of this host. servers:
    ranks that are not workers. cluster: the tasks of a TensorFlow cluster spec, one rank each. experts: number in a
    layer of the model. num_problems: returns the number of violations of a plan with these degrees; used if a preset
    fills several axes (`fill_order`).
    """
    before = len(problems)
    degrees = Degrees(servers=servers, device=_device(config, gpus))
    asked = _asked(config, problems)
    if cluster is None:
        degrees.servers = servers = _enough_servers(config, asked, world, servers, degrees.filled)
    target, source = _target(asked["world"], world, servers, cluster, problems)
    given = {axis: degree for axis in AXES if (degree := asked[axis]) is not None}
    degrees.sound = len(problems) == before
    if config.strategy.name == "single":
        _single({**given, "ep": asked["ep"] or 1}, target, degrees, problems)
        return degrees
    ep = asked["ep"] or 1
    fills_gpus = target is None and degrees.device == "cuda" and bool(gpus)
    fills_dp = "dp" in fill_order.axes(config.strategy) and (target is not None or fills_gpus)
    if ep > 1 and "dp" not in given and not fills_dp:
        given["dp"] = ep
        degrees.filled.append(f"dp={ep} (filled: ep, which divides it)")
    OpenAxes(config, given, gpus, ep, degrees, num_problems).fill(target, source, problems)
    for axis, degree in given.items():
        setattr(degrees, axis, degree)
    degrees.sound = degrees.sound and _is_plannable(degrees, problems)
    if degrees.sound:
        degrees.ep = expert_axes.degree(config, asked["ep"], degrees.dp, experts, degrees.filled, problems)
    return degrees


def _asked(config: Config, problems: list[Problem]) -> dict[str, int | None]:
    """The degrees and the world that the user set; None, with the violation appended, for those that are illegal."""
    asked = {axis: getattr(config, axis) for axis in (*AXES, "ep", "world")}
    for key, value in asked.items():
        if value is not None and not (type(value) is int and 1 <= value <= LARGEST):
            what = f"{key}={value} is not a whole number from 1 to {LARGEST}"
            problems.append(Problem(what, key, f"{key}=1", kind="arithmetic"))
            asked[key] = None
    return asked


def _enough_servers(
    config: Config, asked: dict[str, int | None], launched: int | None, servers: int, filled: list[str]
) -> int:
    """The number of servers that the user set; else the fewest that leave a dp which divides the batch."""
    target = asked["world"] or launched
    if servers == 0 or data_strategy(config.strategy.data.kind).asked_servers(config) is not None:
        return servers
    if config.strategy.own_axis != "dp" or target is None or asked["dp"] is not None or config.local_batch is not None:
        return servers
    others = prod(asked[axis] or 1 for axis in AXES)
    size = config.global_batch or DEFAULT_GLOBAL_BATCH
    for count in range(servers, target // 2 + 1):
        dp, rest = divmod(target - count, others)
        if rest == 0 and type(size) is int and size % dp == 0:
            if count > servers:
                few = f"{counted(servers, 'server')} of {target} ranks would leave dp={(target - servers) // others}"
                filled.append(f"servers={count} (filled: {few}, which does not divide {size} samples)")
            return count
    return servers


def _device(config: Config, gpus: int | None) -> str:
    if config.device in ("cpu", "cuda"):
        return config.device
    return "cuda" if gpus else "cpu"


def _target(
    asked: int | None, launched: int | None, servers: int, cluster: ClusterSpec | None, problems: list[Problem]
) -> tuple[int | None, str]:
    """(the world that the degrees must multiply to, its source for messages)."""
    if asked is not None and launched is not None and asked != launched:
        what = f"world={asked}, but the launcher has started {launched} ranks"
        problems.append(Problem(what, "world", f"world={launched}", kind="contradiction"))
    said = asked if launched is None else launched
    if cluster is not None and said not in (None, cluster.world):
        what = f"{'world=' if launched is None else 'ranks launched: '}{said}, but {cluster} has {cluster.world} tasks"
        problems.append(Problem(what, "world", f"world={cluster.world}", kind="contradiction"))
    beside = f", {counted(servers, 'server')}" if servers else ""
    if launched is not None:
        return launched, f"{launched} ranks launched{beside}"
    if asked is None and cluster is not None:
        return cluster.world, str(cluster)
    return asked, f"world {asked}{beside}"


def _single(given: dict[str, int], target: int | None, degrees: Degrees, problems: list[Problem]) -> None:
    """Check that `strategy=single` runs on one device."""
    wrong = {axis: degree for axis, degree in given.items() if degree != 1}
    if target not in (None, 1):
        wrong["world"] = target
    for axis, degree in wrong.items():
        what = f"strategy=single runs on one device, and {axis}={degree}"
        command = f"parallelrun strategy=ptdp {axis}={degree}"
        problems.append(Problem(what, axis, f"{axis}=1", command, kind="contradiction"))


@dataclass
class OpenAxes:
    """The axes that the preset fills and the user has not given."""

    config: Config
    given: dict[str, int]
    gpus: int | None
    ep: int
    degrees: Degrees
    num_problems: Callable[[Degrees], int]

    @property
    def names(self) -> list[str]:
        return [axis for axis in fill_order.axes(self.config.strategy) if axis not in self.given]

    def fill(self, target: int | None, source: str, problems: list[Problem]) -> None:
        """Spread the open axes over the world, or over this host's GPUs, or over the demonstration plan."""
        if target is None and self.degrees.device == "cuda" and self.gpus:
            _fill_gpus(self, self.gpus)
        elif target is None:
            _fill_freely(self.config, self.given, self.degrees)
        elif self.degrees.sound:
            _fill_world(self, target, source, problems)

    def degrees_for(self, ranks: int) -> tuple[fill_order.Sizes, bool]:
        """(the degrees of the open axes, whose product is `ranks`; whether they give a legal plan)."""
        cluster, workers = self.config.cluster, ranks * prod(self.given.values())
        per_host = ranks_per_node(cluster, workers) if cluster.gpus_per_node or cluster.nodes else self.gpus or workers
        candidates = fill_order.choices(self.config.strategy, self.names, ranks, min(per_host, workers))
        return fill_order.first_legal(candidates, self._problems_with)

    def set(self, sizes: fill_order.Sizes, why: str) -> None:
        """Set the degrees of the open axes and note the reason."""
        for axis, degree in sizes.items():
            setattr(self.degrees, axis, degree)
        shown = " ".join(f"{axis}={degree}" for axis, degree in sizes.items())
        given = "".join(f", {axis} {degree}" for axis, degree in self.given.items())
        self.degrees.filled.append(f"{shown} (filled: {why}{given})")

    def _problems_with(self, sizes: fill_order.Sizes) -> int:
        trial = replace(self.degrees, filled=[], warnings=[])
        for axis, degree in {**self.given, **sizes}.items():
            setattr(trial, axis, degree)
        return self.num_problems(trial)


def _fill_gpus(open_axes: OpenAxes, gpus: int) -> None:
    """Spread the open axes over the remaining GPUs, with a dp that ep divides. Some GPUs may stay idle."""
    if not open_axes.names:
        return
    rest = prod(open_axes.given.values())
    step = open_axes.ep if "dp" in open_axes.names else 1
    most = max(step, gpus // rest // step * step)
    found = (open_axes.degrees_for(ranks) for ranks in range(most, 0, -step))
    sizes = next((sizes for sizes, is_legal in found if is_legal), None) or open_axes.degrees_for(most)[0]
    open_axes.set(sizes, f"{gpus} GPU{'s' * (gpus > 1)}")
    used = rest * prod(sizes.values())
    if used < gpus:
        why = f"{rest * step} does not divide {gpus}" if gpus % (rest * step) else f"no plan on {gpus} is legal"
        open_axes.degrees.warnings.append(f"{gpus - used} of {gpus} GPUs stay idle: {why}")


def _fill_freely(config: Config, given: dict[str, int], degrees: Degrees) -> None:
    """Fill the demonstration plan, or its own axis beside the given degrees: no world limits them."""
    own, demo = config.strategy.own_axis, config.strategy.demo
    if not given:
        for axis in AXES:
            if demo.get(axis, 1) > 1:
                setattr(degrees, axis, demo[axis])
        sizes = " ".join(f"{axis}={getattr(degrees, axis)}" for axis in AXES if getattr(degrees, axis) > 1)
        degrees.demonstrated = bool(sizes)
        if sizes:
            degrees.filled.append(f"{sizes} (filled: the smallest plan that shows strategy={config.strategy.name})")
    elif own not in given:
        setattr(degrees, own, demo.get(own, 1))
        why = f"the smallest that shows strategy={config.strategy.name}" if demo.get(own, 1) > 1 else "no world given"
        degrees.filled.append(f"{own}={getattr(degrees, own)} (filled: {why})")


def _fill_world(open_axes: OpenAxes, target: int, source: str, problems: list[Problem]) -> None:
    """Spread the open axes over the rest of the world; without open axes, check that the degrees multiply to it."""
    given, degrees, unfilled = open_axes.given, open_axes.degrees, open_axes.names
    product = prod(given.values())
    if target <= degrees.servers:
        degrees.sound = False
        fix = f"world={degrees.servers + product}" + (f" or servers={target - 1}" if target > 1 else "")
        fix = "" if problems else fix  # the right world is unknown until earlier violations are fixed
        problems.append(Problem(f"{source}: no rank is left to be a worker", "world", fix, kind="arithmetic"))
        return
    target -= degrees.servers  # from here on: workers
    if unfilled and target % product == 0:
        open_axes.set(open_axes.degrees_for(target // product)[0], source)
    elif product != target:
        degrees.sound = False
        problems.append(_wrong_product(given, target, source, degrees.servers, unfilled))


def _wrong_product(given: dict[str, int], target: int, source: str, servers: int, unfilled: list[str]) -> Problem:
    """The given degrees do not multiply to `target` workers, or do not divide them if other axes are to be filled."""
    product = prod(given.values())
    shown = " x ".join(f"{axis} {degree}" for axis, degree in given.items())
    fixes = []
    for axis, degree in given.items():
        rest = product // degree
        legal = divisors(target // rest) if target % rest == 0 else []
        legal = legal if unfilled else legal[-1:]
        fixes += [f"{axis}={n}" for n in nearest(degree, legal)]
    if not unfilled:
        fixes.append(f"world={product + servers}")
        if servers and product < target:
            fixes.append(f"servers={servers + target - product}")
        what = f"{shown} = {product} ranks, but {source}; divisors of {target}: {', '.join(map(str, divisors(target)))}"
    else:
        multiples = sorted({max(1, target // product) * product, (target // product + 1) * product})
        fixes += [f"world={n + servers}" for n in multiples]
        remainder = f"{target} = {target // product} x {product} + {target % product}"
        axes = " and ".join(unfilled)
        what = f"{shown} = {product} ranks do not divide {source} ({remainder}), so {axes} cannot be filled"
    return Problem(what, "world", " or ".join(dict.fromkeys(fixes)), kind="arithmetic")


def _is_plannable(degrees: Degrees, problems: list[Problem]) -> bool:
    """Return whether the world is at most LARGEST; append the violation otherwise."""
    if degrees.world <= LARGEST:
        return True
    product = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in AXES)
    product += f" + {counted(degrees.servers, 'server')}" if degrees.servers else ""
    what = f"{product} = {degrees.world} ranks; the most that can be planned is {LARGEST}"
    problems.append(Problem(what, "world", f"world={LARGEST}", kind="arithmetic"))
    return False
