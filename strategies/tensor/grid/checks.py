"""Checks of a request for a grid tensor strategy; each problem names the nearest legal values.

Ranks that form no grid (`shape`), layer roles, sizes and samples that do not divide, and settings that exclude each
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import lcm, prod
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.models.moe.spec import has_own_router
from parallelrun.planner.contract.classes import splits_backward
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model import definitions

from ..common import checks as common
from ..common.keys import GridConfig
from .forms import FormChoice
from .shape import KEYS, arrange_request, broken_rule, format_sizes, possible_depths, read_grid

# roles of layers that may have parameters
ROLES = (
    "column_parallel", "row_parallel", "linear", "embedding", "position_embedding", "norm", "head", "router", "expert",
)  # fmt: skip
FARTHEST = 20_000  # distance from the tp asked for up to which legal ones are looked for
FORM, SAVE = "strategy.tensor.form", "strategy.tensor.save_gathered"


@dataclass(frozen=True)
class GridRequest:
    """A request for the grid strategy of a layout, with the requested form."""

    request: Request
    layout: str
    form: str

    @property
    def sizes(self) -> dict[str, int] | None:
        """The degree of every tensor axis; None where tp makes no grid."""
        return arrange_request(self.layout, self.request)

    @property
    def choice(self) -> FormChoice:
        """Return the inputs on which the forms depend, for a tp that can be laid out."""
        request, sizes = self.request, self.sizes
        assert sizes, "checked before"
        precision, samples = TABLE[request.config.precision.name], request.batch.micro_batch if request.batch else 0
        return FormChoice(
            request.spec,
            self.form,
            sizes,
            num_rows=max(1, samples) * prod(request.spec.boundary_shape[:-1]) // request.cp,
            samples=samples,
            save_gathered=GridConfig.of(request.config).save_gathered,
            compute=BYTES[precision.compute],
            reduce=BYTES[precision.reduce],
        )

    @property
    def without_batch(self) -> GridRequest:
        """The request before the batch is known."""
        return self._of(replace(self.request, batch=None))

    @property
    def sample_parts(self) -> int:
        """Into how many parts the samples of a microbatch are cut."""
        if definitions.model(self.request.config).is_lesson or self.sizes is None:
            return 1
        return self.without_batch.choice.sample_parts()

    def check(self) -> list[Problem]:
        request, problems = self.request, self._excluded()
        lesson = definitions.model(request.config).is_lesson
        if unbuilt := self._unbuilt():
            return problems + unbuilt
        if request.tp > 1 and not lesson:
            problems += self._roles()
        sizes = self.sizes
        if sizes is None:
            return [*problems, *self._no_grid()]
        if request.tp == 1 or lesson:
            return problems
        return problems + self._indivisible(sizes) + self._samples(sizes)

    def is_legal(self) -> bool:
        """Whether `check` finds nothing."""
        request, sizes = self.request, self.sizes
        if sizes is None or self._excluded() or self._unbuilt():
            return False
        if request.tp == 1 or definitions.model(request.config).is_lesson:
            return True
        return not (self._roles() or self.without_batch.choice.misfits() or self._samples(sizes))

    def _of(self, request: Request) -> GridRequest:
        return replace(self, request=request)

    def _excluded(self) -> list[Problem]:
        """Operands that both halves of a split backward would gather again: more traffic than the memory is worth."""
        tensor, pipeline = GridConfig.of(self.request.config), self.request.config.strategy.pipeline.kind
        if self.request.tp == 1 or tensor.save_gathered or not splits_backward(self.request):
            return []
        message = f"{SAVE}=false under {pipeline}: both halves of its backward would gather again"
        return [Problem(message, SAVE, f"{SAVE}=true or schedule=1f1b", kind="undefined")]

    def _roles(self) -> list[Problem]:
        """Samples and features are split everywhere, so every layer with parameters must be one that knows how."""
        request, spec = self.request, self.request.spec
        where = f"tp={request.tp} of kind {request.config.strategy.tensor.kind}"
        for layer in spec.layers():
            of_head = layer.layer_role in ("per_head", "attention") and layer.name in spec.pair_of
            if layer.parameters and layer.layer_role not in ROLES and not of_head:
                role = next(iter(layer.possible_roles), "column_parallel")
                message = f"layer {layer.name} has no layer role, and {where} splits what every layer reads"
                return [common.wrong_role(message, request, layer.name, role)]
        for pair in spec.pairs:
            splittable = [x for x in pair.inside if x.layer_role in ("per_head", "attention") or x.spans_heads]
            reader = next((x.name for x in pair.inside if x.parameters and x not in splittable), None)
            if reader:
                opener = pair.columns[0].name
                message = f"layer {reader} reads what {opener} has split over {where}: only a row_parallel layer may"
                return [common.wrong_role(message, request, reader, "row_parallel")]
        last = [layer for layer in spec.blocks[-1].layers if layer.parameters or layer.tied]
        if last and last[-1].layer_role == "head":
            return []
        name = last[-1].name if last else spec.blocks[-1].name
        message = f"layer {name} gives the logits, and {where} splits them: it must have the layer role head"
        return [common.wrong_role(message, request, name, "head")]

    def _unbuilt(self) -> list[Problem]:
        """Experts of somebody else's module: nobody knows where it would have to gather features for their router. And
        the gate of shared experts, whose one feature no grid splits."""
        spec, kind = self.request.spec, self.request.config.strategy.tensor.kind
        if self.request.tp > 1 and spec.experts and self.request.config.model.shared_gate:
            message = f"model.shared_gate=true: layout {kind} splits the features of every layer, and a gate has one"
            return [Problem(message, "layout", "layout=1d", kind="not_built")]
        if self.request.tp == 1 or not has_own_router(spec):
            return []
        message = (
            f"{spec.name} has experts with a router of their own, and layout {kind} cuts the features of what they "
            "read: where its module would have to gather them is not known"
        )
        return [Problem(message, "layout", "layout=1d", kind="not_built")]

    def _indivisible(self, sizes: dict[str, int]) -> list[Problem]:
        """One problem per size, with the nearest tp and the nearest sizes that fit. Copies of kv heads would be partial
        over a part of an axis of features, which the forms of products do not know; layout 1d has them."""
        parts: dict[tuple[str, int], int] = {}
        for misfit in self.without_batch.choice.misfits():
            place = (misfit.key, misfit.size)
            parts[place] = lcm(parts.get(place, 1), misfit.parts)
        legal, problems, spec = self._nearest_tp() if parts else [], [], self.request.spec
        for (key, size), count in parts.items():
            subject = f"{key}={size} is not" if key.startswith("model.") else f"layer {key}: {size} features are not"
            message = f"{subject} divisible by {count} ({format_sizes(sizes)})"
            copies = key == "model.kv_heads" and size != spec.heads and count % size == 0
            step = lcm(count, spec.heads or 1) if key == "model.hidden" and not spec.head_dim else count
            fixes = [either("tp", legal), either(key, nearest(size, common.legal_sizes(key, size, step, spec)))]
            fixes += ["" if legal else self._nearest_grid() or "layout=1d"]
            fixes += [f"{FORM}=auto"] if self.form not in ("auto", "cube") else []
            message += "; copies of kv heads are built for layout=1d only" if copies else ""
            kind = "not_built" if copies else "arithmetic"
            problems.append(Problem(message, "tp", " or ".join(filter(None, fixes)), kind=kind))
        return problems

    def _samples(self, sizes: dict[str, int]) -> list[Problem]:
        """Whole samples are split: micro_batch must divide."""
        request, batch, parts, config = self.request, self.request.batch, self.sample_parts, self.request.config
        if batch is None or batch.micro_batch % parts == 0:
            return []
        cut = f"{parts} parts ({format_sizes(sizes)}): only whole samples are split"
        message = f"micro_batch={batch.micro_batch} does not divide into {cut}"
        batch_keys = (key for key in ("micro_batch", "microbatches") if getattr(config, key) is not None)
        where, fixes = next(batch_keys, "global_batch"), []
        if where == "micro_batch":
            legal = [n for n in divisors(batch.replica_batch) if n % parts == 0] or [parts]
            fixes.append(either("micro_batch", nearest(batch.micro_batch, legal)))
        elif where == "microbatches":
            legal = [n for n in divisors(batch.replica_batch) if batch.replica_batch // n % parts == 0]
            fixes.append(either("microbatches", nearest(batch.microbatches, legal)))
        step = request.dp * parts * (batch.microbatches if where == "microbatches" else request.pp)
        key, scale = ("local_batch", request.dp) if config.local_batch is not None else ("global_batch", 1)
        fixes.append(either(key, [n // scale for n in common.multiples(batch.global_batch, step)]))
        return [Problem(message, where, " or ".join(filter(None, fixes)), kind="arithmetic")]

    def _no_grid(self) -> list[Problem]:
        """Return what is wrong with a tp that cannot be arranged, with the nearest values that can."""
        tensor, grid = GridConfig.of(self.request.config), None
        try:
            grid = read_grid(tensor.grid)
        except ValueError as error:
            return [Problem(str(error), "grid", self._nearest_grid() or "leave grid out", kind="arithmetic")]
        where, message = broken_rule(self.layout, self.request.tp, grid, tensor.depth)
        fixes = [either("tp", self._nearest_tp()), self._nearest_grid(), self._nearest_depth()]
        fix = " or ".join(filter(None, [*fixes, *self._fitting_worlds()]))
        if not fix:  # no one value would do
            free = self._with(**dict.fromkeys(KEYS[self.layout]))
            unset = [f"{name}=null" for name in KEYS[self.layout] if getattr(tensor, name) is not None]
            fix = " or ".join(" ".join([f"tp={tp}", *unset]) for tp in free._nearest_tp())
        return [Problem(message, where, fix, kind="arithmetic")]

    def _nearest_tp(self) -> list[int]:
        """Return the two tp nearest to the one asked for that grid and depth allow and that fit; 1 only if there is no
        other."""
        alone = [1] if self._is_legal(self._of(replace(self.request, tp=1))) else []
        return sorted(islice(self._legal_tp(), 2)) or alone

    def _nearest_grid(self) -> str:
        """Return the grid nearest to a square that makes tp, at the depth asked for."""
        if "grid" not in KEYS[self.layout]:
            return ""
        tp, depth = self.request.tp, GridConfig.of(self.request.config).depth
        depths = possible_depths(self.layout, tp, depth)
        possible = [(rows, tp // deep // rows) for deep in depths for rows in divisors(tp // deep)]
        possible.sort(key=lambda grid: abs(grid[0] - grid[1]))  # of two alike the wide one comes first
        texts = (f"{rows}x{columns}" for rows, columns in possible)
        return next((f"grid={text}" for text in texts if self._is_legal(self._with(grid=text))), "")

    def _nearest_depth(self) -> str:
        """The depths that make tp, at the grid asked for."""
        depth = GridConfig.of(self.request.config).depth
        if depth is None:
            return ""
        legal = [deep for deep in divisors(self.request.tp) if self._is_legal(self._with(depth=deep))]
        return either("depth", nearest(depth, legal))

    def _fitting_worlds(self) -> list[str]:
        """Where tp took what was left of a world: other degrees in this world, and other worlds."""
        request, ranks = self.request, self.request.dp * self.request.tp
        if request.config.tp is not None:
            return []
        left = sorted(islice(self._legal_tp(dividing=ranks), 2), reverse=True)
        fixes = [either("dp", [ranks // tp for tp in left])]
        if request.config.world is not None:
            fixes.append(either("world", [tp * request.pp * request.dp for tp in self._nearest_tp()]))
        return fixes

    def _legal_tp(self, dividing: int = 0) -> Iterator[int]:
        """Legal tp above 1, the nearest first. dividing: only the divisors of so many ranks."""
        tp = self.request.tp
        for distance in range(min(FARTHEST, 4 * max(tp, 8))):
            for candidate in dict.fromkeys((tp - distance, tp + distance)):
                in_range = 1 < candidate <= 4 * max(tp, 8) and dividing % candidate == 0
                if in_range and self._is_legal(self._of(replace(self.request, tp=candidate))):
                    yield candidate

    def _is_legal(self, other: GridRequest) -> bool:
        """Whether tp makes a grid in another request where the sizes divide."""
        return other.sizes is not None and not other.without_batch.choice.misfits()

    def _with(self, **settings: Any) -> GridRequest:
        """The request with other settings of the tensor strategy."""
        config, strategy = self.request.config, self.request.config.strategy
        strategy = replace(strategy, tensor=replace(strategy.tensor, **settings))
        return self._of(replace(self.request, config=replace(config, strategy=strategy)))
