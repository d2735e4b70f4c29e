"""What `verify` runs in the place of a plan, the single device with which it compares, and the memory that it needs."""

from __future__ import annotations

from dataclasses import replace

from parallelrun.base.precision import BYTES, TABLE
from parallelrun.config.schema.run_schema import Config, DataStrategyConfig, PipelineConfig, TensorStrategyConfig
from parallelrun.planner.contract.optimizers import with_lr_scale
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces import router_settings as routing
from parallelrun.planner.pieces import sample_sets
from parallelrun.planner.resolve.resolve_config import resolve


def checked_config(config: Config) -> Config:
    """Return the config that is compared: verify's precision, and SGD unless `verify.optimizer=same`.

    Products in fp8 stay so; all else is in verify's precision. SGD has a large learning rate, so that in fp32 too the
    updates are larger than the rounding of the weights.
    """
    optimizer = replace(config.optimizer, rounding="none")
    if config.verify.optimizer != "same":
        optimizer = replace(optimizer, name="sgd", lr=1.0, momentum=0.0, schedule="constant", warmup=0)
    in_fp8 = TABLE[config.precision.name].others and config.verify.precision == "fp64"
    precision = replace(config.precision, name="fp8_fp64" if in_fp8 else config.verify.precision)
    return replace(config, optimizer=optimizer, precision=precision, resume=None)


def checked_plan(config: Config, plan: Plan) -> Plan:
    """Return the plan of the checked config. Rare events, such as synchronisations, happen within the checked steps."""
    data = plan.data.checked(config.verify.steps)
    plan = replace(plan, precision=TABLE[config.precision.name], optimizer=config.optimizer.name, data=data)
    promised = plan.data.equivalence(plan)
    return replace(plan, equivalence=promised) if promised.kind == plan.equivalence.kind else plan


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
        recompute="none", loss_chunks=1, compile=False, device=plan.device,
        model=replace(config.model, norm_samples=sample_sets.number(plan)),
        optimizer=with_lr_scale(config, plan).optimizer,
    )  # fmt: skip
    return single, resolve(single)


def compared_bytes(config: Config, plan: Plan) -> int:
    """Return the least memory that rank 0 needs in addition to its training. config, plan: as they are checked.

    Two traces have the initial weights, the gradients of each step and the final weights (2 x steps + 2 times the size
    of the model; the gathering of the last ones takes 4 more), and the reference has its weights and gradients.
    """
    elements = sum(spec.numel for spec in plan.spec.parameters.values())
    return (2 * config.verify.steps + 8) * elements * BYTES[plan.precision.stored]
