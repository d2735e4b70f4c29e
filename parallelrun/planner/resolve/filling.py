"""Finds the degrees of a run: those that are given, the others filled from the world, and a check that they fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf, prod

from parallelrun.base.errors import Problem
from parallelrun.base.wording import counted, divisors, nearest
from parallelrun.config.schema.run_schema import DEFAULT_GLOBAL_BATCH, Config
from parallelrun.planner.contract.classes import data_strategy
from parallelrun.planner.contract.degrees import AXES, LARGEST, Degrees, Sizes, device_of, shown
from parallelrun.planner.pieces import expert_axes
from parallelrun.planner.pieces.cluster_spec import ClusterSpec, target_world
from parallelrun.planner.pieces.hosts import ranks_per_node


def fill(
    config: Config,
    world: int | None,
    gpus: int | None,
    problems: list[Problem],
    servers: int,
    cluster: ClusterSpec | None,
    experts: int,
    num_problems: Callable[[Degrees], int],
) -> Degrees:
    """Return the degrees of a run; append every violation to `problems`.

    The preset's axes that are not given share the ranks that the given degrees and the servers leave of the world, or
    the GPUs that the degrees leave (servers need no GPU). On CPU without degrees or a world, the preset's demonstration
    plan is used. If only ep is given, dp equals it. A preset whose own axis is none of AXES runs on one device.

    world: the number of ranks that a launcher has started. gpus: GPUs of this host. cluster: the tasks of a TensorFlow
    cluster spec, one rank each. experts: number in a layer. num_problems: that of a plan with these degrees.
    """
    before = len(problems)
    device = device_of(config, gpus)
    degrees, requested = Degrees(servers=servers, device=device), read(config, problems)
    if cluster is None:
        degrees.servers = _enough_servers(config, requested, world, servers, degrees.filled)
    target, source = target_world(requested["world"], world, degrees.servers, cluster, problems)
    set_degrees = {axis: degree for axis in AXES if (degree := requested[axis]) is not None}
    degrees.sound, ep = len(problems) == before, requested["ep"] or 1
    if config.strategy.own_axis not in AXES:
        problems += _check_single(config, {**set_degrees, "ep": ep, "world": target or 1})
        return degrees
    filling = Filling(config, set_degrees, gpus, ep, degrees, num_problems)
    fills_gpus = target is None and device == "cuda" and bool(gpus)
    if ep > 1 and "dp" not in set_degrees and ("dp" not in filling.open_axes or not (fills_gpus or target)):
        set_degrees["dp"] = ep // gcd(ep, filling.inside)
        divided = "it" if filling.inside == 1 else f"dp x {filling.inside} ranks of a replica"
        degrees.filled.append(f"dp={set_degrees['dp']} (filled: ep, which divides {divided})")
    filling.set(set_degrees)
    if fills_gpus:
        filling.fill_gpus(gpus or 0)
    elif target is None:
        filling.fill_freely()
    elif degrees.sound:
        filling.fill_world(target, source, problems)
    if degrees.sound and degrees.world > LARGEST:
        problems.append(_too_large(degrees))
        degrees.sound = False
    if degrees.sound:
        degrees.ep = expert_axes.degree(config, requested["ep"], degrees, experts, problems)
    return degrees


def read(config: Config, problems: list[Problem]) -> dict[str, int | None]:
    """The degrees and the world that the user set; None, with the violation appended, for those that are illegal."""
    degrees = {axis: getattr(config, axis) for axis in (*AXES, "ep", "world")}
    for key, value in degrees.items():
        if value is not None and not (type(value) is int and 1 <= value <= LARGEST):
            message = f"{key}={value} is not a whole number from 1 to {LARGEST}"
            problems.append(Problem(message, key, f"{key}=1", kind="arithmetic"))
            degrees[key] = None
    return degrees


def _enough_servers(
    config: Config, requested: dict[str, int | None], launched: int | None, servers: int, filled: list[str]
) -> int:
    """The number of servers that the user set; else the fewest that leave a dp which divides the batch."""
    target = requested["world"] or launched
    if servers == 0 or data_strategy(config.strategy.data.kind).asked_servers(config) is not None:
        return servers
    if (
        config.strategy.own_axis != "dp"
        or target is None
        or requested["dp"] is not None
        or config.local_batch is not None
    ):
        return servers
    others = prod(requested[axis] or 1 for axis in AXES)
    size = config.global_batch or DEFAULT_GLOBAL_BATCH
    for count in range(servers, target // 2 + 1):
        dp, rest = divmod(target - count, others)
        if rest == 0 and type(size) is int and size % dp == 0:
            if count > servers:
                few = f"{counted(servers, 'server')} of {target} ranks would leave dp={(target - servers) // others}"
                filled.append(f"servers={count} (filled: {few}, which does not divide {size} samples)")
            return count
    return servers


def _check_single(config: Config, sizes: Sizes) -> list[Problem]:
    """Check that a preset without an axis runs on one device."""
    return [
        Problem(
            f"strategy={config.strategy.name} runs on one device, and {axis}={degree}",
            axis, f"{axis}=1", f"parallelrun strategy=ptdp {axis}={degree}", kind="contradiction",
        )
        for axis, degree in sizes.items() if degree != 1
    ]  # fmt: skip


@dataclass
class Filling:
    """Chooses the degrees of `open_axes`, which the preset fills and the user has not given."""

    config: Config
    given: Sizes
    gpus: int | None
    ep: int
    degrees: Degrees
    num_problems: Callable[[Degrees], int]

    @property
    def open_axes(self) -> list[str]:
        """The open axes, the first to fill first: those of `fill_order`, or the preset's own axis alone."""
        strategy = self.config.strategy
        return [axis for axis in strategy.fill_order or [strategy.own_axis] if axis not in self.given]

    @property
    def inside(self) -> int:
        """The ranks of a replica, as far as they are given, over which ep is taken."""
        return expert_axes.ranks_inside(self.config, self.given.get("cp", 1), self.given.get("tp", 1))

    def set(self, sizes: Sizes, why: str = "") -> None:
        """Set degrees; why: note the reason for which they were filled in."""
        for axis, degree in sizes.items():
            setattr(self.degrees, axis, degree)
        if why and sizes:
            self.degrees.filled.append(f"{shown(sizes)} (filled: {why})")

    def fill_freely(self) -> None:
        """Fill the demonstration plan, or its own axis beside the given degrees: no world limits them."""
        strategy = self.config.strategy
        own, demo = strategy.own_axis, strategy.demo
        if not self.given:
            sizes = {axis: demo[axis] for axis in AXES if demo.get(axis, 1) > 1}
            self.degrees.demonstrated = bool(sizes)
            self.set(sizes, f"the smallest plan that shows strategy={strategy.name}")
        elif own not in self.given:
            size = demo.get(own, 1)
            self.set({own: size}, f"the smallest that shows strategy={strategy.name}" if size > 1 else "no world given")

    def fill_gpus(self, gpus: int) -> None:
        """Spread the open axes over the remaining GPUs, with a dp that ep divides. Some GPUs may stay idle."""
        if not self.open_axes:
            return
        rest = prod(self.given.values())
        step = self.ep // gcd(self.ep, self.inside) if "dp" in self.open_axes else 1
        most = max(step, gpus // rest // step * step)
        candidates = (self._sizes(ranks) for ranks in range(most, 0, -step))
        sizes = next((sizes for sizes, is_legal in candidates if is_legal), None) or self._sizes(most)[0]
        self.set(sizes, f"{gpus} GPU{'s' * (gpus > 1)}{self._beside}")
        used = rest * prod(sizes.values())
        if used < gpus:
            why = f"{rest * step} does not divide {gpus}" if gpus % (rest * step) else f"no plan on {gpus} is legal"
            self.degrees.warnings.append(f"{gpus - used} of {gpus} GPUs stay idle: {why}")

    def fill_world(self, target: int, source: str, problems: list[Problem]) -> None:
        """Spread the open axes over the rest of the world; without open axes, check that the degrees multiply to it."""
        given, degrees = self.given, self.degrees
        size, workers = prod(given.values()), target - degrees.servers
        if workers <= 0:
            degrees.sound = False
            fix = f"world={degrees.servers + size}" + (f" or servers={target - 1}" if target > 1 else "")
            fix = "" if problems else fix  # the right world is unknown until earlier violations are fixed
            problems.append(Problem(f"{source}: no rank is left to be a worker", "world", fix, kind="arithmetic"))
        elif self.open_axes and workers % size == 0:
            self.set(self._sizes(workers // size)[0], source + self._beside)
        elif size != workers:
            degrees.sound = False
            problems.append(_wrong_product(given, workers, source, degrees.servers, self.open_axes))

    @property
    def _beside(self) -> str:
        return "".join(f", {axis} {degree}" for axis, degree in self.given.items())

    def _sizes(self, ranks: int) -> tuple[Sizes, bool]:
        """(the best degrees of the open axes whose product is `ranks`; whether they give a legal plan).

        Without a legal plan, the degrees with the fewest violations.
        """
        candidates = self._candidates(ranks)
        if len(candidates) == 1:
            return candidates[0], True
        fewest, best = inf, candidates[0]
        for sizes in candidates:
            trial = replace(self.degrees, filled=[], warnings=[], **sizes)  # type: ignore[arg-type]
            count = self.num_problems(trial)
            if count < fewest:
                fewest, best = count, sizes
            if count == 0:
                break
        return best, fewest == 0

    def _candidates(self, ranks: int) -> list[Sizes]:
        """All degrees of the open axes whose product is `ranks`, the best ones first.

        A tensor-parallel group must fit in a host. The best choice gives every axis at least its degree in the preset's
        demonstration plan, then makes the first axis as large as possible, then the second.
        """
        axes, cluster, demo = self.open_axes, self.config.cluster, self.config.strategy.demo
        if len(axes) == 1:
            return [{axes[0]: ranks}]
        workers = ranks * prod(self.given.values())
        per_host = ranks_per_node(cluster, workers) if cluster.gpus_per_node or cluster.nodes else self.gpus or workers
        candidates = []
        for first in product(*(divisors(ranks) for _ in axes[1:])):
            rest, indivisible = divmod(ranks, prod(first))
            sizes = dict(zip(axes, (*first, rest)))
            if not indivisible and min(per_host, workers) % sizes.get("tp", 1) == 0:
                candidates.append(sizes)

        def rank(sizes: Sizes) -> tuple[int, ...]:
            too_small = sum(degree < demo.get(axis, 1) for axis, degree in sizes.items())
            return too_small, *(-degree for degree in sizes.values())

        return sorted(candidates, key=rank)


def _too_large(degrees: Degrees) -> Problem:
    factors = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in AXES if axis != "cp" or degrees.cp > 1)
    factors += f" + {counted(degrees.servers, 'server')}" if degrees.servers else ""
    message = f"{factors} = {degrees.world} ranks; the most that can be planned is {LARGEST}"
    return Problem(message, "world", f"world={LARGEST}", kind="arithmetic")


def _wrong_product(degrees: dict[str, int], target: int, source: str, servers: int, unfilled: list[str]) -> Problem:
    """The given degrees do not multiply to `target` workers, or do not divide them if other axes are to be filled."""
    product = prod(degrees.values())
    factors = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    fixes = []
    for axis, degree in degrees.items():
        rest = product // degree
        legal = divisors(target // rest) if target % rest == 0 else []
        legal = legal if unfilled else legal[-1:]
        fixes += [f"{axis}={n}" for n in nearest(degree, legal)]
    if not unfilled:
        fixes.append(f"world={product + servers}")
        if servers and product < target:
            fixes.append(f"servers={servers + target - product}")
        message = (
            f"{factors} = {product} ranks, but {source}; divisors of {target}: {', '.join(map(str, divisors(target)))}"
        )
    else:
        multiples = sorted({max(1, target // product) * product, (target // product + 1) * product})
        fixes += [f"world={n + servers}" for n in multiples]
        remainder = f"{target} = {target // product} x {product} + {target % product}"
        axes = " and ".join(unfilled)
        message = f"{factors} = {product} ranks do not divide {source} ({remainder}), so {axes} cannot be filled"
    return Problem(message, "world", " or ".join(dict.fromkeys(fixes)), kind="arithmetic")
