"""The configuration on one device with which plans are compared."""

from __future__ import annotations

from dataclasses import replace

from parallelrun.config.schema.run_schema import Config, DataStrategyConfig, PipelineConfig, TensorStrategyConfig
from parallelrun.planner.contract.optimizers import with_lr_scale
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces import router_settings as routing
from parallelrun.planner.pieces import sample_sets
from parallelrun.planner.resolve.resolve_config import resolve


def single_device(config: Config, plan: Plan) -> tuple[Config, Plan]:
    """Return the same config and its plan with every degree 1, no servers and the same global batch."""
    config = routing.single_device(config, plan)
    strategy = replace(
        config.strategy,
        name="single",
        data=DataStrategyConfig(),
        tensor=TensorStrategyConfig(),
        pipeline=replace(config.strategy.pipeline, kind=PipelineConfig().kind, virtual_stages=None, split=[]),
    )
    single = replace(
        config, strategy=strategy, world=1, dp=1, cp=1, tp=1, pp=1,
        layout=None, grid=None, depth=None, schedule=None, virtual_stages=None,
        servers=None, consistency=None, staleness=None, backup_workers=None,
        microbatches=1, micro_batch=None, local_batch=None, global_batch=plan.batch.global_batch,
        recompute="none", compile=False, device=plan.device,
        model=replace(config.model, norm_samples=sample_sets.number(plan)),
        optimizer=with_lr_scale(config, plan).optimizer,
    )  # fmt: skip
    return single, resolve(single)
