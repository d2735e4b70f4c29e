"""What a parameter server refuses, and the consistency that it fills in."""

from __future__ import annotations

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES, TABLE
from parallelrun.base.wording import counted
from parallelrun.planner.contract.optimizers import OPTIMIZERS
from parallelrun.planner.contract.request import Request

from ..common.keys import ParameterServerConfig
from .shards import cut

SYNC, ASYNC, SSP = "sync", "async", "ssp"
DEFAULT_STALENESS = 2


def check(request: Request) -> list[Problem]:
    """Every violation of a request."""
    checks = (_check_consistency, _check_delays, _check_num_servers, _check_unsupported)
    return [problem for check in checks for problem in check(request)]


def consistency_of(request: Request) -> str:
    data = ParameterServerConfig.of(request.config)
    return data.consistency or (SYNC if data.staleness is None else SSP)


def staleness_of(request: Request) -> int | None:
    if consistency_of(request) != SSP:
        return None
    staleness = ParameterServerConfig.of(request.config).staleness
    return DEFAULT_STALENESS if staleness is None else staleness


def _num_workers(request: Request) -> int:
    return request.dp // request.ep_replicas


def _check_consistency(request: Request) -> list[Problem]:
    """Staleness and backup workers that the consistency does not read, or that leave no gradient for an update."""
    data, consistency, problems = ParameterServerConfig.of(request.config), consistency_of(request), []
    staleness, backups = data.staleness, data.backup_workers or 0
    if staleness is not None and consistency != SSP:
        cause = "every update waits for all workers, so no gradient is stale"
        cause = cause if consistency == SYNC else "async has no bound"
        message = f"staleness={staleness} with consistency={consistency}: {cause}"
        fix = "consistency=ssp, or leave staleness out"
        problems.append(Problem(message, "staleness", fix, kind="contradiction"))
    if backups and consistency != SYNC:
        cause = "an update uses one gradient, so none is spare"
        message = f"backup_workers={backups} with consistency={consistency}: {cause}"
        fix = "consistency=sync, or leave backup_workers out"
        problems.append(Problem(message, "backup_workers", fix, kind="contradiction"))
    elif backups and backups >= (workers := _num_workers(request)):
        of_worker = request.ep_replicas
        each = f", {of_worker} for a worker (ep={request.ep})" if of_worker > 1 else ""
        message = f"backup_workers={backups} of dp={request.dp}{each}: an update needs at least one gradient"
        dp = (backups + 1) * of_worker
        world = dp * request.pp * request.cp * request.tp + request.servers
        more = f"dp={dp}" if request.config.world is None else f"world={world}"
        fix = f"{more} or backup_workers={workers - 1}"
        problems.append(Problem(message, "backup_workers", fix, kind="arithmetic"))
    return problems


def _check_delays(request: Request) -> list[Problem]:
    delays, key = ParameterServerConfig.of(request.config).delays, "strategy.data.delays"
    if any(not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf") for seconds in delays):
        return [Problem(f"{key}={delays}: each delay is a number of seconds, at least 0", key, f"{key}=[0,0.1]")]
    if len(delays) > (workers := _num_workers(request)):
        message = f"{key} has {len(delays)} entries, but there are {counted(workers, 'worker')}"
        return [Problem(message, key, f"dp={len(delays) * request.ep_replicas}", kind="arithmetic")]
    return []


def _check_num_servers(request: Request) -> list[Problem]:
    """Every server must own something."""
    element_size = BYTES[TABLE[request.config.precision.name].stored]
    min_bytes = int(ParameterServerConfig.of(request.config).shard_min_kb * 2**10)
    pieces = len(cut(request.spec, request.servers, min_bytes, element_size))
    if request.servers <= pieces:
        return []
    message = (
        f"servers={request.servers}: the model has only {counted(pieces, 'tensor')} or pieces of {min_bytes} bytes"
    )
    return [Problem(message, "servers", f"servers={pieces} or strategy.data.shard_min_kb=0", kind="arithmetic")]


def _check_unsupported(request: Request) -> list[Problem]:
    """Features for which all workers would have to exchange something in every step."""
    router, key, problems = request.spec.router, "model.router.bias_rate", []
    in_step = consistency_of(request) == SYNC or staleness_of(request) == 0
    in_step = in_step and not ParameterServerConfig.of(request.config).backup_workers
    if router is not None and router.bias_rate != 0.0 and not in_step:
        message = f"{key}={router.bias_rate} needs the expert load of the global batch"
        message += ", which workers of ps exchange only if all take every step together"
        fix = f"{key}=0, or consistency=sync without backup_workers"
        problems.append(Problem(message, key, fix, kind="not_built"))
    if request.config.model.lora.base_dtype is not None:  # 16 bits do not pay where every worker pulls all weights
        message = "model.lora.base_dtype: servers of ps store weights in the dtype of the precision"
        problems.append(Problem(message, "model.lora.base_dtype", "strategy.data.kind=ddp", kind="not_built"))
    if not OPTIMIZERS[request.config.optimizer.name].elementwise:
        message = f"optimizer={request.config.optimizer.name} updates complete matrices; servers of ps hold pieces"
        problems.append(Problem(message, "optimizer", "optimizer=adamw or strategy=ddp", kind="undefined"))
    if request.config.sdc.every:  # a step that is undone was pushed, and others may have read what followed
        message = "sdc.every looks for silent data corruption in steps that all ranks take, not on parameter servers"
        problems.append(Problem(message, "sdc.every", "sdc.every=0 or strategy=ddp", kind="not_built"))
    return problems
