"""Lower bounds of a candidate's time and memory, by which a search leaves out most candidates. Torch-free.

They come from the same predictions as a plan's own figures: of blocks alone, without what depends on the whole plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from parallelrun.config.schema import ClusterConfig, DataStrategyConfig
from parallelrun.model_spec import BlockSpec
from parallelrun.plan import expert_axes, prediction
from parallelrun.plan.load import data_strategy
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.plan.search.legal import Group, Legal
from parallelrun.plan.step_time.step import Known, block_times
from parallelrun.plan.structure import BatchSizes, Plan, once


class Bounds:
    """Of the candidates of a space. known: see `step_time_with`."""

    def __init__(self, legal: Legal, cluster: ClusterConfig, known: Known):
        self._legal, self._cluster, self._known = legal, cluster, known
        self._found: Known = {}
        alike = legal.spec.first_alike
        self._blocks = {name: legal.spec.block(name) for name in dict.fromkeys(alike.values())}
        self._counts = Counter(alike[block.name] for block in legal.spec.blocks)
        self._plainest = legal.space.recomputes()[0]

    def busy_s(self, group: Group, micro_batch: int) -> float | None:
        """Seconds in which a pp rank works at least, on average; None where the time is unknown."""
        key = "busy", self._tensor(group), micro_batch

        def compute() -> float | None:
            plan = self._plan(group, micro_batch, self._plainest)
            times = block_times(plan, self._cluster, self._known)
            seconds = 0.0
            for name, number in self._counts.items():
                time = times(self._blocks[name]) if times else None
                if time is None:
                    return None
                seconds += number * sum(sum(parts.values()) for parts in (time.forward, time.backward, time.again))
            return seconds

        microbatch: float | None = once(self._found, key, compute)
        count = self._legal.space.global_batch // group.dp // micro_batch
        return None if microbatch is None else microbatch * count / group.pp

    def held_bytes(self, group: Group, data: DataStrategyConfig) -> int:
        """Bytes that pp rank 0 holds throughout a step, or fewer."""
        counts, _ = self._of_first_rank(group)
        each = once(self._found, ("held", self._tensor(group), group.dp, repr(data)), lambda: self._held(group, data))
        return sum(number * each[name] for name, number in counts.items())

    def kept_bytes(self, group: Group, micro_batch: int, recompute: str) -> int:
        """Bytes that pp rank 0 keeps for backward when its first backward begins, or fewer."""
        key = "kept", self._tensor(group), micro_batch, recompute

        def compute() -> dict[str, int]:
            plan = self._plan(group, micro_batch, recompute)
            return {name: plan.tensor.saved_bytes(block, plan) for name, block in self._blocks.items()}

        each, (_, stages) = once(self._found, key, compute), self._of_first_rank(group)
        least = min(sum(number * each[name] for name, number in counts.items()) for counts in stages)
        schedule = self._legal.schedule(group)
        count = self._legal.space.global_batch // group.dp // micro_batch
        return least * schedule.least_in_flight(group.pp, group.virtual_stages, count)

    def _tensor(self, group: Group) -> object:
        return group.tp, group.number, group.ep, self._legal.schedule(group).splits_backward

    def _plan(self, group: Group, micro_batch: int, recompute: str) -> Plan:
        """A plan whose blocks are those of the candidates with this tensor strategy, micro-batch and recomputation."""
        plan: Plan = once(
            self._found, ("plan", self._tensor(group)),
            lambda: self._legal.plan(group, group.micro_batches[0], recompute, group.datas[0]),
        )  # fmt: skip
        count = self._legal.space.global_batch // group.dp // micro_batch
        batch = BatchSizes(plan.batch.global_batch, micro_batch, count)
        return self._legal.again(plan, group, batch, recompute)

    def _of_first_rank(self, group: Group) -> tuple[Counter[str], list[Counter[str]]]:
        """(blocks of pp rank 0, by the first equal block; those of each of its stages)."""

        def compute() -> tuple[Counter[str], list[Counter[str]]]:
            alike = self._legal.spec.first_alike
            own = [stage for stage in self._legal.stages(group)[0] if stage.pp_rank == 0]
            stages = [Counter(alike[name] for name in stage.blocks) for stage in own]
            return sum(stages, Counter()), stages

        key = "first rank", group.pp, group.virtual_stages, group.pipeline.kind
        found: tuple[Counter[str], list[Counter[str]]] = once(self._found, key, compute)
        return found

    def _held(self, group: Group, data: DataStrategyConfig) -> dict[str, int]:
        plan = self._plan(group, group.micro_batches[0], self._plainest)
        request = self._legal.request(group, data)
        strategy = data_strategy(data.kind).resolve(request)
        inner = tuple((axis, plan.mesh.size(axis)) for axis in plan.mesh.mesh_dims_of("ep")) if plan.expert else ()
        ep = inner, tuple((axis, parts) for axis, parts in plan.mesh.flattened if axis == "ep")
        dims, flattened = expert_axes.split(*strategy.mesh_dims(group.dp), *(ep if inner else ((), ())))
        tensor = plan.mesh.mesh_dims_of("tp")
        mesh = MeshShape(
            (("pp", group.pp), *dims, *((axis, plan.mesh.size(axis)) for axis in tensor)),
            (*flattened, *((axis, parts) for axis, parts in plan.mesh.flattened if axis == "tp")),
        )
        batch = BatchSizes(plan.batch.global_batch, plan.batch.replica_batch, 1)
        changed = replace(plan, data=strategy, mesh=mesh, batch=batch)
        return {name: _block_bytes(block, changed) for name, block in self._blocks.items()}


def _block_bytes(block: BlockSpec, plan: Plan) -> int:
    """Bytes of a block's matrices that a rank holds: weights, gradients that stay, optimizer state."""
    coordinate: dict[str, int] = {}
    known: dict[object, int] = {}
    return sum(
        once(
            known, (spec.shape, spec.layer_role, spec.heads, spec.frozen),
            lambda: sum(prediction.parameter_bytes(spec, plan, coordinate)),  # noqa: B023
        )
        for spec in block.parameters if len(spec.shape) > 1
    )  # fmt: skip
