"""Builds a training that is ready to step from a plan: mesh, sharded model, optimizer, pipeline runner, readers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parallelrun.base import registry
from parallelrun.checkpoint.exchange.source import initial_weights
from parallelrun.checkpoint.store import TrainingState
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.data.order import make_sampler
from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.models import initialise, recompute
from parallelrun.models.chunked_loss import defer_logits
from parallelrun.models.float8 import FUSED, SPLIT
from parallelrun.models.layers import ColumnLinear, UnsplitLinear
from parallelrun.models.network import Network, compile_blocks
from parallelrun.models.optimizers.optimizer import OffloadedOptimizer, Optimizer
from parallelrun.models.optimizers.rounded_optimizer import RoundedOptimizer
from parallelrun.models.vision.batch_norm import give_sets
from parallelrun.planner.contract.optimizers import with_lr_scale
from parallelrun.planner.contract.parameters import LocalParameter, uses_rounded
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.definitions import Packing
from parallelrun.planner.pieces.packing import as_computed
from parallelrun.training.loop.batchnorm_statistics import RunningStatistics
from parallelrun.training.loop.data_runtime import DataRuntime, data_runtime
from parallelrun.training.loop.gradients import Gradients
from parallelrun.training.loop.malloc import keep_freed_memory
from parallelrun.training.loop.pipeline_runner import PipelineRunner, build_runner
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.router_step import RoutingUpdater


@dataclass
class Training:
    """One rank's model parts, gradients, optimizer, readers and statistics: everything that a step needs."""

    config: Config
    plan: Plan
    mesh: Mesh
    model_parts: list[Network]
    data: DataRuntime
    gradients: Gradients
    runner: PipelineRunner
    optimizer: Optimizer
    reader: Reader
    eval_reader: Reader
    eval_batches: int
    dataset: Any
    statistics: RunningStatistics  # of BatchNorm, updated once per step
    routing: RoutingUpdater  # of layers with experts, updated once per step

    def close(self) -> None:
        """End the threads and processes that read ahead."""
        self.reader.close()
        self.eval_reader.close()

    @property
    def tokens_per_sample(self) -> float:
        """Loss terms of a sample; of packed documents, tokens without padding, on average over the dataset."""
        return float(self.packing.tokens if self.packing else self.plan.spec.targets_per_sample)

    @property
    def packing(self) -> Packing | None:
        """How documents fill the samples, if they are packed."""
        train = self.dataset.train
        return as_computed(train.packing(), self.plan.spec) if train.packs else None

    @property
    def parameters(self) -> list[LocalParameter]:
        """The parameters that the optimizer updates."""
        return self.data.parameters

    @property
    def held(self) -> list[LocalParameter]:
        """All parameters of this rank, the frozen ones last. They are saved, loaded and compared."""
        return [*self.data.parameters, *self.data.frozen]

    @property
    def state(self) -> TrainingState:
        """What a checkpoint of this rank holds, and what loading one fills."""
        return TrainingState(self.held, self.optimizer, self.plan, self.mesh, self.data.kept)

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss enters the total, so that each sample is counted once. Only last-stage ranks count.

        Of ranks with the same samples, the one with coordinate 0 counts. A tensor layout may split the samples over
        some of its axes; the other tensor axes hold copies.
        """
        split = self.plan.tensor.loss_axes(self.plan)
        coordinate = self.mesh.coordinate
        copies = [mesh_dim for mesh_dim in self.plan.mesh.mesh_dims_of("tp") if mesh_dim not in split]
        return coordinate.get("pp", 0) == self.plan.last_stage_pp_rank and not any(
            coordinate.get(mesh_dim, 0) for mesh_dim in copies
        )

    @property
    def counts_first(self) -> bool:
        """Whether targets are counted before every step: some are ignored, or the user's own loss says their number."""
        return self.dataset.has_ignored or self.plan.spec.own_loss

    @property
    def counts_targets(self) -> bool:
        """Whether this rank counts the valid targets of its data replica: last stage, tensor coordinate 0."""
        coordinate = self.mesh.coordinate
        return coordinate.get("pp", 0) == self.plan.last_stage_pp_rank and coordinate.get("tp", 0) == 0


def _parallelize(axis: str, kind: str, network: Network, plan: Plan, mesh: Mesh) -> None:
    """Call a strategy's `runtime.parallelize`, which shards parameters and replaces layers on meta, in place."""
    runtime = registry.load("strategies", f"{axis}.{kind}", "runtime")
    parallelize: Callable[[Network, Plan, Mesh], None] = runtime.parallelize
    parallelize(network, plan, mesh)


def whole_network(config: Config, plan: Plan) -> Network:
    """Return the network on the meta device, as for one device."""
    with torch.device("meta"):
        network: Network = registry.load("models", config.model.name, "network").build(
            config, plan.spec, plan.precision
        )
    return network


def _largest_product(plan: Plan) -> int:
    """Return about how many multiplications the largest product of a microbatch with a weight takes, on every rank."""
    spec, mesh = plan.spec, plan.mesh
    positions = math.prod(spec.boundary_shape[:-1] if spec.kind == "tokens" else spec.sample_shape)
    largest = max((parameter.numel for parameter in spec.parameters.values()), default=0)
    return plan.batch.micro_batch * positions * largest // (mesh.size("tp") * mesh.size("cp"))


def build_model_parts(config: Config, plan: Plan, mesh: Mesh, network: Network | None = None) -> list[Network]:
    """Return this rank's stages on the meta device, sharded over tensor and expert axes, with recompute and compile.

    All stages of the rank are split off one network, so that a weight tied between two of them is one parameter.
    network: that one, if it is built already; it is changed.
    """
    stages = plan.stages_of(mesh.coordinate.get("pp", 0))
    network = network or whole_network(config, plan)
    network.keep([name for stage in stages for name in stage.blocks])
    if plan.precision.others:  # before layers are replaced by those of a tensor strategy, which take over what it sets
        blocks = [network.block(name) for name in network.block_names if plan.spec.block(name).kind == "transformer"]
        for layer in (module for block in blocks for module in block.modules()):
            if isinstance(layer, (ColumnLinear, UnsplitLinear)):
                layer.float8 = SPLIT if plan.pipeline.splits_backward else FUSED
                layer.__dict__["uncompiled"] = ("forward",)
    if plan.sample_sets is not None:
        give_sets(network, plan, mesh)
    if plan.context:
        _parallelize("context", plan.context.kind, network, plan, mesh)
    _parallelize("tensor", plan.tensor.kind, network, plan, mesh)
    if plan.expert:
        _parallelize("expert", plan.expert.kind, network, plan, mesh)
    network.rounds_weights = uses_rounded(plan)
    recompute.apply(network, plan.recompute)
    defer_logits(network, plan.loss_chunks)
    if config.compile:
        compile_blocks(network)
    return network.split([stage.blocks for stage in stages])


def build(config: Config, plan: Plan, device: torch.device, network: Network | None = None) -> Training:
    """Build the training of this rank. Collective over the world. network: see `build_model_parts`."""
    config = with_lr_scale(config, plan)
    if device.type == "cpu":
        keep_freed_memory()
        torch_private.use_fast_products(_largest_product(plan))
    mesh = build_mesh(plan, device)
    model_parts = build_model_parts(config, plan, mesh, network)
    runtime = data_runtime(plan)
    runtime.shard(model_parts, plan, mesh)
    initialise.materialise(model_parts, plan, mesh, config.seed, initial_weights(config, plan.spec))
    data = runtime.attach(model_parts, plan, mesh)
    dataset = open_dataset(config, plan.spec)
    size = plan.batch.global_batch
    sampler = make_sampler(len(dataset.train), size, config.seed, dataset.train.shares)
    eval_sampler = make_sampler(len(dataset.val), size, config.seed, dataset.val.shares, shuffle=False)
    eval_batches = max(1, min(config.eval.batches, len(dataset.val) // size))
    last_step = config.bench.warmup + config.bench.steps if config.verb == "bench" else config.steps
    num_workers = config.dataset.num_workers
    offloads, rounds = plan.offloads_optimizer, plan.precision.rounding
    update = RoundedOptimizer if rounds else OffloadedOptimizer if offloads else Optimizer
    return Training(
        config=config,
        plan=plan,
        mesh=mesh,
        model_parts=model_parts,
        data=data,
        gradients=Gradients(data.parameters, plan, mesh, data.flat_gradients),
        runner=build_runner(model_parts, plan, mesh),
        optimizer=update(config.optimizer, data.parameters, plan, mesh),
        reader=Reader(dataset.train, sampler, plan, mesh, last_step=last_step, num_workers=num_workers),
        eval_reader=Reader(dataset.val, eval_sampler, plan, mesh, last_step=eval_batches, num_workers=num_workers),
        eval_batches=eval_batches,
        dataset=dataset,
        statistics=RunningStatistics(model_parts, data.frozen, plan, mesh),
        routing=RoutingUpdater(model_parts, data.frozen, plan, mesh),
    )
