"""The plan of fsdp: its traffic and memory, as torch's FSDP2 of 2.11 and 2.13 has them under this folder's runtime.

Layouts append the shard axis to one dim's axes: each parameter's local tensor is split, never a flat concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.config.schema.run_schema import DataStrategyConfig
from parallelrun.planner.contract.classes import splits_backward
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import ExchangeForm
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters, held_parameters
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.contract.request import Request
from parallelrun.planner.memory.peak import gradient_bytes
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.planner.predict.prediction import merge

from ..common.bucket_prediction import buckets_of, final_collectives, local_shapes, summing_bytes
from ..common.buckets import padded_numel, reduce_bytes, shard_dim
from ..common.keys import FSDPConfig
from . import checks
from .units import BLOCK, TIED, Unit, UnitSharding, is_unsharded

ENGINE = "engine"  # the purpose of what torch's engine sends by itself


@dataclass(frozen=True)
class FSDP(UnitSharding):
    """The checks and predictions of fsdp."""

    kind = "fsdp"
    config_class = FSDPConfig
    takes_experts = True
    takes_context = True
    shards_weights = True
    saves_memory = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return checks.check(request)

    @classmethod
    def resolve(cls, request: Request) -> FSDP:
        data = FSDPConfig.of(request.config)
        reshard, reduce_each = data.reshard_after_forward, data.reduce_each_microbatch
        return cls(
            shard=data.shard or request.num_data_ranks,
            reshard_after_forward=request.pp == 1 if reshard is None else reshard,
            reduce_each_microbatch=not splits_backward(request) if reduce_each is None else reduce_each,
        )

    @classmethod
    def choices(cls, dp: int, pp: int, in_node: int) -> list[DataStrategyConfig]:
        """Weights freed after forward or kept; copies of the shards in every host (HSDP)."""
        configs: list[DataStrategyConfig] = [FSDPConfig(), FSDPConfig(reshard_after_forward=pp > 1)]
        return configs + ([FSDPConfig(shard=in_node)] if 1 < in_node < dp and dp % in_node == 0 else [])

    @property
    def detail(self) -> str:
        weights = "freed after forward" if self.reshard_after_forward else "kept between microbatches"
        often = "in every backward pass" if self.reduce_each_microbatch else "once a step"
        return f"sharded over {self.shard} ranks, gathered weights {weights}, gradients reduced {often}"

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        """Sharded, unless a step reduces several microbatches at once: until then gradients are unsharded."""
        accumulates = plan.batch.microbatches > 1 or plan.pipeline.splits_backward
        if accumulates and not self.reduce_each_microbatch:
            return tensor_layout
        return self.state_layout(parameter, tensor_layout, plan)

    def keeps_gradients(self, plan: Plan) -> bool:
        """A step begins without gradients, so that those of a single microbatch exist only after its backward."""
        return plan.batch.microbatches > 1 and not plan.pipeline.splits_backward

    def reducing_bytes(self, stage: int, coordinate: dict[str, int], plan: Plan) -> tuple[int, int] | None:
        """The flat copy of the largest unit's gradients with this rank's part of the sum; its parts of all sums."""
        if not self.reduce_each_microbatch or plan.num_data_ranks == 1:
            return None
        units = [unit for unit in self.units(plan, plan.stages[stage].pp_rank) if unit.stage == stage]
        sent = [reduce_bytes(plan) * _padded_numel(unit.trained, coordinate, plan) for unit in units] or [0]
        return max(sent) + max(sent) // self.shard, sum(sent) // self.shard

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The gathered weights that stay; `backward_bytes` counts those that are freed."""
        if plan.num_data_ranks == 1:
            return 0
        units = self.counted_units(plan, pp_rank)
        return sum(count * _gathered_bytes(unit, coordinate, plan) for unit, count in units if not unit.reshard)

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """The bytes at each block: the weights gathered for it and for the next one; in passes that reduce, the pending
        gradients of the block after it, the root's unsharded ones, and the reduced ones of all blocks after it, unless
        these are counted for the complete step."""
        sent, freed = self._by_block(stage, number, coordinate, plan)
        left = self._left_by_blocks(stage, coordinate, plan)
        sizes, reduced = [], 0
        for index in reversed(range(len(sent))):
            pending = sent[index + 1] if index + 1 < len(sent) else 0
            reduced += 0 if self.keeps_gradients(plan) else pending // self.shard
            sizes.append(pending + reduced + sum(left[index + 1 :]) + sum(_gathered_at(index, freed)))
        return sizes[::-1]

    def closing_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
        """The bytes at each block: its unsharded gradients in the dtype of the sum (counted elsewhere if they stay to
        the last pass), their flat copy, and this rank's part of the sum; in addition the root's unsharded gradients,
        the weights that are gathered for the next block, and, unless they are counted for the complete step, the
        reduced gradients of all blocks after it. The root itself is reduced last."""
        copies = 1 if self._counts_unsharded(plan) else 2
        sent, freed = self._by_block(stage, number, coordinate, plan)
        left = self._left_by_blocks(stage, coordinate, plan)
        sizes, reduced = [], 0
        for index, flat in reversed([*enumerate(sent)]):
            others = reduced + sum(left[index + 1 :]) + _gathered_at(index, freed)[1]
            sizes.append(copies * flat + flat // self.shard + others)
            reduced += 0 if self.keeps_gradients(plan) else flat // self.shard
        reduces = self.reduce_each_microbatch or number == plan.batch.microbatches - 1
        for unit in self.units(plan, plan.stages[stage].pp_rank) if reduces else ():
            if unit.stage == stage and not unit.block:
                flat = reduce_bytes(plan) * _padded_numel(unit.trained, coordinate, plan)
                sizes[-1] = max(sizes[-1], copies * flat + flat // self.shard + reduced)
        return sizes[::-1]

    def _counts_unsharded(self, plan: Plan) -> bool:
        """Whether unsharded gradients are stored, and so counted, for the complete step (`gradient_layout`)."""
        return not self.reduce_each_microbatch and self.keeps_gradients(plan)

    def _left_by_blocks(self, stage: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
        """Bytes, for each block of a stage, of the unsharded gradients that it leaves: for the root to reduce those of
        weights that blocks share, and those in no unit. 0 where they are counted for the complete step."""
        pp_rank, left = plan.stages[stage].pp_rank, list[HeldParameter]()
        if not self._counts_unsharded(plan):
            left += (p for unit in self.units(plan, pp_rank) if not unit.block for p in unit.trained.parameters)
        if not self.keeps_gradients(plan):
            left += (p for p in held_parameters(plan, pp_rank) if is_unsharded(p, plan))
        sizes = dict.fromkeys(plan.stages[stage].blocks, 0)
        for parameter in left:
            if parameter.stage == stage:
                reader = plan.spec.readers.get(parameter.spec.name)
                block = reader if reader in sizes else parameter.block
                sizes[block] += gradient_bytes(plan, [parameter], coordinate)
        return [*sizes.values()]

    def _by_block(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> tuple[list[int], list[int]]:
        """For each block of a stage, bytes of the gradients that backward pass `number` reduces, and of the gathered
        weights that are freed after forward."""
        names = plan.stages[stage].blocks
        reduces = self.reduce_each_microbatch or number == plan.batch.microbatches - 1
        sent, freed = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for unit in self.units(plan, plan.stages[stage].pp_rank):
            if unit.stage == stage and unit.block:
                sent[unit.block] += reduce_bytes(plan) * _padded_numel(unit.trained, coordinate, plan) if reduces else 0
                freed[unit.block] += _gathered_bytes(unit, coordinate, plan) if unit.reshard else 0
        return [*sent.values()], [*freed.values()]

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The reduced gradients, unless they are counted for the complete step. Where backward is split, units are
        reduced one after the other: a unit's weights are freed, its unsharded gradients become a flat copy, of which
        gloo makes another one, and this rank's part of the sum stays. Last, those in no unit are summed over copies."""
        summed = summing_bytes(pp_rank, coordinate, plan)
        if self.keeps_gradients(plan) or (self.reduce_each_microbatch and plan.pipeline.splits_backward):
            return summed
        if not plan.pipeline.splits_backward:  # else they are counted with all gradients of the schedule
            in_no_unit = ((p, count) for p, count in distinct_parameters(plan, pp_rank) if is_unsharded(p, plan))
            summed += sum(count * gradient_bytes(plan, [p], coordinate) for p, count in in_no_unit)
        current, most = 0, 0
        for unit, count in self.counted_units(plan, pp_rank):
            flat = reduce_bytes(plan) * _padded_numel(unit.trained, coordinate, plan)
            if plan.pipeline.splits_backward:
                weights = _gathered_bytes(unit, coordinate, plan)
                most = max(most, current - weights + flat + flat // self.shard)
                current -= count * (weights + flat)
            current += count * (flat // self.shard)
        return max(most, current + summed)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """All-gathers per use, a reduce-scatter per unit and backward pass that reduces (HSDP: and one all-reduce of
        the shards a step); the sums of parameters in no unit; then the final sums."""
        final = final_collectives(pp_rank, coordinate, plan)
        if plan.num_data_ranks == 1:
            return final
        rows = []
        for unit, count in self.counted_units(plan, pp_rank):
            calls = count * self._num_gathers(unit, plan)
            gathered = calls * _gathered_bytes(unit, coordinate, plan)
            rows.append(Collective(unit.axis, "all_gather", ENGINE, calls, gathered))
            if not unit.trained.parameters:
                continue
            reduced = reduce_bytes(plan) * _padded_numel(unit.trained, coordinate, plan)
            each = self.reduce_each_microbatch and unit.kind != TIED  # two stages' weight: the runtime reduces it last
            often = count * (plan.batch.microbatches if each else 1)
            rows.append(Collective(unit.axis, "reduce_scatter", ENGINE, often, often * reduced))
            if plan.mesh.size("dp_replicate") > 1:
                shard = reduced // plan.mesh.size(unit.axis)
                rows.append(Collective("dp_replicate", "all_reduce", ENGINE, count, count * shard))
        parameters = distinct_parameters(plan, pp_rank)
        if not once(
            plan.weights_cache, ("unsharded", pp_rank), lambda: any(is_unsharded(p, plan) for p, _ in parameters)
        ):
            return merge(rows) + final
        buckets = buckets_of(pp_rank, coordinate, plan)
        for number, axis in enumerate(buckets.axes):
            rows.append(Collective(axis, "all_reduce", "gradients", 1, buckets.sent_bytes(number, padded=False)))
        return merge(rows) + final

    def _num_gathers(self, unit: Unit, plan: Plan) -> int:
        """All-gathers of a unit in one step: two a microbatch if freed after forward, one if after backward alone."""
        if unit.reshard:
            return 2 * plan.batch.microbatches
        is_freed = self.reshard_after_forward and (plan.mesh.size("pp") == 1 or unit.kind == BLOCK)
        return plan.batch.microbatches if is_freed else 1

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        once, again = not self.reduce_each_microbatch, self.reshard_after_forward
        return ExchangeForm(scatters_once=once, gathers_again=again, gathers_rounded=True)


def _gathered_at(index: int, freed: Sequence[int]) -> tuple[int, int]:
    """Bytes of the gathered weights of a block in its backward pass, and of those that arrive for the next one."""
    return freed[index], freed[index - 1] if freed[index] and index else 0


def _padded_numel(unit: Unit, coordinate: dict[str, int], plan: Plan) -> int:
    """Elements of a unit as it is sent, computed once for the units of equal blocks."""
    block = plan.spec.first_alike.get(unit.block, unit.stage)
    dtypes = frozenset(p.spec.stored for p in unit.parameters)
    key = "padded numel", unit.kind, block, len(unit.parameters), dtypes, *sorted(coordinate.items())

    def compute() -> int:
        shapes = local_shapes(unit.parameters, coordinate, plan)
        dims = [shard_dim(p.spec, p.layout, unit.axis, plan) for p in unit.parameters]
        return sum(padded_numel(shape, plan.mesh.size(unit.axis), dim) for shape, dim in zip(shapes, dims))

    return once(plan.weights_cache, key, compute)


def _gathered_bytes(unit: Unit, coordinate: dict[str, int], plan: Plan) -> int:
    if unit.rounded:
        return BYTES[plan.precision.compute] * _padded_numel(unit, coordinate, plan)
    size = 0
    for dtype in dict.fromkeys(p.spec.stored for p in unit.parameters):
        alike = replace(unit, parameters=tuple(p for p in unit.parameters if p.spec.stored == dtype))
        size += BYTES[dtype or plan.precision.stored] * _padded_numel(alike, coordinate, plan)
    return size
