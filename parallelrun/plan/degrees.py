"""The degrees: what is given, what is filled from the world, and whether they multiply to it.

ep is none of the factors: it divides dp, whose ranks also hold the experts (`expert_axes`).
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
from parallelrun.wording import counted, divisors, nearest

AXES = ("pp", "dp", "tp")
LARGEST = 2**20


@dataclass
class Degrees:
    """pp, dp, tp, the ep that divides dp, the servers beside them, and the world they make.

    filled: what was filled in and why. sound: they can be planned with. demonstrated: nothing was given, so they are
    the preset's demonstrating plan.
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
        """Fewer stages than the demonstrating plan has, for a model that cannot be cut so often."""
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
    """The degrees of a run, appending every violation to `problems`.

    world: the number of ranks a launcher has started (None: not attached). gpus: GPUs of this host (None or 0: none).
    servers: ranks of the world that are no workers. cluster: the tasks that a TensorFlow user names, one rank each. The
    axes that the preset fills, as far as they are not given, take what the other degrees and the servers leave of the
    world, or what the degrees leave of the GPUs (servers need none); with neither degrees nor world on CPU the preset's
    demonstrating plan is used. experts: of a layer of the model; ep divides them and dp, and where only ep is given dp
    is as large. num_problems: how many violations a plan of these degrees would have, asked where a preset fills
    several axes (`fill_order`).
    """
    before = len(problems)
    degrees = Degrees(servers=servers, device=_device(config, gpus))
    asked = {axis: getattr(config, axis) for axis in (*AXES, "ep", "world")}
    for key, value in asked.items():
        if value is not None and not _is_degree(value):
            problems.append(
                Problem(f"{key}={value} is not a whole number from 1 to {LARGEST}", key, f"{key}=1", kind="arithmetic")
            )
            asked[key] = None
    if cluster is None:
        degrees.servers = servers = _enough_servers(config, asked, world, servers, degrees.filled)
    target, source = _target(asked["world"], world, servers, cluster, problems)
    given = {axis: asked[axis] for axis in AXES if asked[axis] is not None}
    degrees.sound = len(problems) == before
    if config.strategy.name == "single":
        _single({**given, **({"ep": asked["ep"]} if asked["ep"] else {})}, target, degrees, problems)
        return degrees
    ep = asked["ep"] or 1
    fills_dp = "dp" in fill_order.axes(config.strategy)
    says_dp = fills_dp and (target is not None or (degrees.device == "cuda" and gpus))
    if ep > 1 and "dp" not in given and not says_dp:
        given["dp"] = ep
        degrees.filled.append(f"dp={ep} (filled: ep, which divides it)")
    spread = _Spread(config, given, gpus, ep, degrees, num_problems)
    if target is None and degrees.device == "cuda" and gpus:
        _fill_gpus(spread, gpus)
    elif target is None:
        _fill_freely(config, given, degrees)
    elif degrees.sound:
        _fill_world(spread, target, source, problems)
    for axis, degree in given.items():
        setattr(degrees, axis, degree)
    if degrees.sound and degrees.world > LARGEST:
        what = f"{_product(degrees)} = {degrees.world} ranks; the most that can be planned is {LARGEST}"
        problems.append(Problem(what, "world", f"world={LARGEST}", kind="arithmetic"))
    degrees.sound = degrees.sound and degrees.world <= LARGEST
    if degrees.sound:
        degrees.ep = expert_axes.degree(config, asked["ep"], degrees.dp, experts, degrees.filled, problems)
    return degrees


def _enough_servers(
    config: Config, asked: dict[str, int | None], launched: int | None, servers: int, filled: list[str]
) -> int:
    """As many servers as asked for; if nobody said, the fewest that leave a dp which divides the batch."""
    target = asked["world"] or launched
    free = servers and config.strategy.data.servers is None and config.strategy.own_axis == "dp"
    if not free or target is None or asked["dp"] is not None or config.local_batch is not None:
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


def _is_degree(value: object) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def _device(config: Config, gpus: int | None) -> str:
    if config.device in ("cpu", "cuda"):
        return config.device
    return "cuda" if gpus else "cpu"


def _target(
    asked: int | None, launched: int | None, servers: int, cluster: ClusterSpec | None, problems: list[Problem]
) -> tuple[int | None, str]:
    """(the world that the degrees must multiply to, what said so)."""
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
    """`strategy=single` is one device and nothing else."""
    wrong = {axis: degree for axis, degree in given.items() if degree != 1}
    if target not in (None, 1):
        wrong["world"] = target
    for axis, degree in wrong.items():
        what = f"strategy=single runs on one device, and {axis}={degree}"
        command = f"parallelrun strategy=ptdp {axis}={degree}"
        problems.append(Problem(what, axis, f"{axis}=1", command, kind="contradiction"))


@dataclass
class _Spread:
    """The axes that the preset fills and that are not given, and how they share ranks."""

    config: Config
    given: dict[str, int]
    gpus: int | None
    ep: int
    degrees: Degrees
    num_problems: Callable[[Degrees], int]

    @property
    def open_axes(self) -> list[str]:
        return [axis for axis in fill_order.axes(self.config.strategy) if axis not in self.given]

    def over(self, ranks: int) -> tuple[fill_order.Sizes, bool]:
        """(the degrees of the open axes on `ranks` ranks together, whether they make a legal plan)."""
        cluster, workers = self.config.cluster, ranks * prod(self.given.values())
        per_host = ranks_per_node(cluster, workers) if cluster.gpus_per_node or cluster.nodes else self.gpus or workers
        candidates = fill_order.choices(self.config.strategy, self.open_axes, ranks, min(per_host, workers))
        return fill_order.first_legal(candidates, self._problems_with)

    def take(self, sizes: fill_order.Sizes, why: str) -> None:
        """Set the open axes, and say why."""
        for axis, degree in sizes.items():
            setattr(self.degrees, axis, degree)
        shown = " ".join(f"{axis}={degree}" for axis, degree in sizes.items())
        self.degrees.filled.append(f"{shown} (filled: {why}{_others(self.given)})")

    def _problems_with(self, sizes: fill_order.Sizes) -> int:
        trial = replace(self.degrees, filled=[], warnings=[])
        for axis, degree in {**self.given, **sizes}.items():
            setattr(trial, axis, degree)
        return self.num_problems(trial)


def _fill_gpus(spread: _Spread, gpus: int) -> None:
    """The open axes take the GPUs that are left, dp as many as ep divides; they are no contract, so some may idle."""
    if not spread.open_axes:
        return
    rest = prod(spread.given.values())
    step = spread.ep if "dp" in spread.open_axes else 1
    most = max(step, gpus // rest // step * step)
    sizes, _ = next((found for ranks in range(most, 0, -step) if (found := spread.over(ranks))[1]), spread.over(most))
    spread.take(sizes, f"{gpus} GPU{'s' * (gpus > 1)}")
    used = rest * prod(sizes.values())
    if used < gpus:
        why = f"{rest * step} does not divide {gpus}" if gpus % (rest * step) else f"no plan on {gpus} is legal"
        spread.degrees.warnings.append(f"{gpus - used} of {gpus} GPUs stay idle: {why}")


def _fill_freely(config: Config, given: dict[str, int], degrees: Degrees) -> None:
    """Nothing says how large the world is: the demonstrating plan, or its own axis beside the degrees given."""
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


def _fill_world(spread: _Spread, target: int, source: str, problems: list[Problem]) -> None:
    """The open axes take what is left of the world; or all degrees must multiply to it."""
    given, degrees, open_axes = spread.given, spread.degrees, spread.open_axes
    product = prod(given.values())
    if target <= degrees.servers:
        degrees.sound = False
        fix = f"world={degrees.servers + product}" + (f" or servers={target - 1}" if target > 1 else "")
        fix = "" if problems else fix  # the world cannot be mended before what is said already is
        problems.append(Problem(f"{source}: no rank is left to be a worker", "world", fix, kind="arithmetic"))
        return
    target -= degrees.servers  # from here on: workers
    if open_axes and target % product == 0:
        spread.take(spread.over(target // product)[0], source)
        return
    if product == target:
        return
    degrees.sound = False
    shown = " x ".join(f"{axis} {degree}" for axis, degree in given.items())
    fixes = []
    for axis, degree in given.items():
        rest = product // degree
        legal = [n for n in divisors(target // rest)] if target % rest == 0 else []
        if not open_axes:
            legal = legal[-1:]
        fixes += [f"{axis}={n}" for n in nearest(degree, legal)]
    if not open_axes:
        fixes.append(f"world={product + degrees.servers}")
        if degrees.servers and product < target:
            fixes.append(f"servers={degrees.servers + target - product}")
        what = f"{shown} = {product} ranks, but {source}; divisors of {target}: {', '.join(map(str, divisors(target)))}"
    else:
        multiples = sorted({max(1, target // product) * product, (target // product + 1) * product})
        fixes += [f"world={n + degrees.servers}" for n in multiples]
        remainder = f"{target} = {target // product} x {product} + {target % product}"
        unfilled = " and ".join(open_axes)
        what = f"{shown} = {product} ranks do not divide {source} ({remainder}), so {unfilled} cannot be filled"
    problems.append(Problem(what, "world", " or ".join(dict.fromkeys(fixes)), kind="arithmetic"))


def _others(given: dict[str, int]) -> str:
    return "".join(f", {axis} {degree}" for axis, degree in given.items())


def _product(degrees: Degrees) -> str:
    workers = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in AXES)
    return f"{workers} + {counted(degrees.servers, 'server')}" if degrees.servers else workers
