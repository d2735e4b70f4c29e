"""Folds shorthands (`layout`, `schedule`, ...) into the strategy section and finds keys that no strategy reads."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from parallelrun.config.schema import Config, DataStrategyConfig
from parallelrun.errors import Problem
from parallelrun.plan import routing
from parallelrun.plan.load import pipeline_schedule
from parallelrun.plan.optimizers import OPTIMIZERS, readers
from parallelrun.registry import has, load, names
from parallelrun.wording import did_you_mean, one_of

LAYOUTS = {"1d": "megatron", "2d": "2d", "2.5d": "2.5d", "3d": "3d"}  # the tensor strategy of every layout
OF_STRATEGIES = (
    "strategy.",
    "layout",
    "schedule",
    "virtual_stages",
)  # keys that say which ways are chosen and how they work
GRIDS = ("2d", "2.5d", "3d")  # tensor strategies that split samples and features over several axes
DATA_SHORTHANDS = ("servers", "consistency", "staleness", "backup_workers")  # of keys of `strategy.data`
HOROVOD_KEYS = ("reduction", "timeline", "stall_warn_s", "worker_batches", "join_divisor", "process_sets")


def kinds(axis: str) -> list[str]:
    """The names of the ways of one axis (`data`, `tensor`, `pipeline`, `expert`), without `none`."""
    return [
        name.partition(".")[2] for name in names("strategies") if name.startswith(f"{axis}.") and name[-5:] != ".none"
    ]


def fold(config: Config, given: frozenset[str]) -> tuple[Config, list[Problem]]:
    """(a copy of `config` whose strategy section says everything, and whose model.router has what a preset of experts
    fills in; the shorthands' violations).

    An explicit key beats the preset; two explicit keys that say different things are a contradiction. A kind that is
    unknown keeps the preset's, so that the other checks can go on.
    """
    problems: list[Problem] = []
    data, tensor, pipeline = config.strategy.data, config.strategy.tensor, config.strategy.pipeline
    if config.layout is not None:
        kind, found = _layout(config.layout)
        problems += found
        if kind and kind != tensor.kind:
            problems += _contradiction("layout", config.layout, "strategy.tensor.kind", tensor.kind, given)
            problems += _other_preset(config, kind)
            tensor = replace(tensor, kind=kind)
    for key in ("grid", "depth"):
        value = getattr(config, key)
        if value is not None:
            problems += _contradiction(key, value, f"strategy.tensor.{key}", getattr(tensor, key), given)
            tensor = replace(tensor, **{key: value})
    for key in DATA_SHORTHANDS:
        value = getattr(config, key)
        if value is not None:
            problems += _contradiction(key, value, f"strategy.data.{key}", getattr(data, key), given)
            data = replace(data, **{key: value})
    if config.schedule is not None:
        problems += one_of("schedule", config.schedule, kinds("pipeline"))
        problems += _contradiction("schedule", config.schedule, "strategy.pipeline.kind", pipeline.kind, given)
        if config.schedule in kinds("pipeline"):
            pipeline = replace(pipeline, kind=config.schedule)
    if config.virtual_stages is not None:
        long = "strategy.pipeline.virtual_stages"
        problems += _contradiction("virtual_stages", config.virtual_stages, long, pipeline.virtual_stages, given)
        pipeline = replace(pipeline, virtual_stages=config.virtual_stages)
    model, found = routing.fold(config, given)
    problems += found
    if config.strategy.expert.kind is not None:
        problems += one_of("strategy.expert.kind", config.strategy.expert.kind, kinds("expert"))
    for axis, of_axis in (("data", data), ("tensor", tensor), ("pipeline", pipeline)):
        if not (has("strategies", f"{axis}.{of_axis.kind}") and (axis == "pipeline" or of_axis.kind != "none")):
            problems += one_of(f"strategy.{axis}.kind", of_axis.kind, kinds(axis))
    strategy = replace(config.strategy, data=data, tensor=tensor, pipeline=pipeline, router={})
    return replace(config, model=model, strategy=strategy), problems


def _layout(layout: str) -> tuple[str | None, list[Problem]]:
    text = str(layout).lower()
    if text not in LAYOUTS:
        what = f"layout={layout} is unknown; it is one of {', '.join(LAYOUTS)}"
        return None, [Problem(what, "layout", did_you_mean(text, LAYOUTS, "layout="))]
    return LAYOUTS[text], []


def _other_preset(config: Config, kind: str) -> list[Problem]:
    """A preset that is about one tensor strategy names its layout: another one contradicts it."""
    preset, own = config.strategy.name, config.strategy.tensor.kind
    if config.strategy.own_axis != "tp":
        return []
    named = {of_axis: layout for layout, of_axis in LAYOUTS.items()}
    what = f"layout={config.layout} contradicts strategy={preset}, which is layout={named.get(own, own)}"
    return [Problem(what, "layout", f"layout={named.get(own, own)} or strategy=ptdp", kind="contradiction")]


def _contradiction(short: str, asked: object, long: str, said: object, given: frozenset[str]) -> list[Problem]:
    if long not in given or said is None or said == asked:
        return []
    what = f"{short}={asked} contradicts {long}={said}"
    return [Problem(what, short, f"leave {short} out or leave {long} out", kind="contradiction")]


def _unread_of_data(kind: str) -> dict[str, tuple[bool, str]]:
    """Per key of `strategy.data`: whether the way ignores it, and what the user may have meant."""
    reads = load("strategies", f"data.{kind}", "plan").Way.reads if has("strategies", f"data.{kind}") else ()
    hints = {
        "shard": "strategy=hsdp",
        **dict.fromkeys(("reshard_after_forward", "reduce_each_microbatch"), "strategy=fsdp"),
        "bucket_mb": "leave strategy.data.bucket_mb out",
        **dict.fromkeys(DATA_SHORTHANDS, "strategy=ps"),
        "sync_every": "strategy=local_sgd or strategy=diloco",
        **dict.fromkeys(("outer_lr", "outer_momentum", "outer_nesterov"), "strategy=diloco"),
        **dict.fromkeys(("algorithm", "group_size"), "strategy=ring"),
        **dict.fromkeys(("compression", "powersgd_rank"), "strategy=horovod or strategy=ring or strategy=ddp"),
        **dict.fromkeys(HOROVOD_KEYS, "strategy=horovod"),
    }
    keys = [field.name for field in fields(DataStrategyConfig) if field.name != "kind"]
    return {
        f"strategy.data.{key}": (key not in reads, hints.get(key, f"leave strategy.data.{key} out")) for key in keys
    }


def unread(config: Config, given: frozenset[str], pp: int) -> list[Problem]:
    """Keys that were set although the chosen strategies do not read them (`config` is folded)."""
    problems = []
    data, tensor, pipeline = config.strategy.data.kind, config.strategy.tensor.kind, config.strategy.pipeline.kind
    strategies = f"data={data} tensor={tensor} pipeline={pipeline if pp > 1 else 'none'}"

    def complain(key: str, value: object, fix: str) -> None:
        problems.append(
            Problem(f"{key}={value} is read by none of the chosen strategies ({strategies})", key, fix, kind="unread")
        )

    shaped = {"grid": ("2d", "2.5d"), "depth": ("2.5d",)}
    for key in ("grid", "depth"):
        value = getattr(config, key)
        if value is not None and tensor not in shaped[key]:
            complain(key, value, f"leave {key} out")
    for key in DATA_SHORTHANDS:
        value = getattr(config, key)
        if value and _unread_of_data(data)[f"strategy.data.{key}"][0]:
            complain(key, value, f"leave {key} out, or strategy=ps")
    if pp == 1 and config.schedule is not None:
        complain("schedule", config.schedule, "pp=2, or leave schedule out")
    number = config.strategy.pipeline.virtual_stages
    explicit = config.virtual_stages is not None or "strategy.pipeline.virtual_stages" in given
    if explicit and number != 1 and (pp == 1 or not pipeline_schedule(pipeline).takes_virtual_stages):
        fix = "leave virtual_stages out"
        complain("virtual_stages", number, f"schedule=interleaved, or {fix}" if pp > 1 else fix)
    known = config.optimizer.name in OPTIMIZERS
    rules = {
        **_unread_of_data(data),
        "strategy.tensor.sequence_parallel": (tensor in GRIDS, "layout=1d"),
        "strategy.tensor.grid": (tensor not in ("2d", "2.5d"), "layout=2d"),
        "strategy.tensor.depth": (tensor != "2.5d", "layout=2.5d"),
        "strategy.tensor.form": (tensor not in ("2d", "2.5d"), "layout=2d"),
        "strategy.tensor.save_gathered": (tensor not in GRIDS, "layout=2d"),
        "strategy.pipeline.kind": (pp == 1, "pp=2"),
        "strategy.pipeline.partition": (pp == 1, "pp=2"),
        "strategy.pipeline.split": (pp == 1, "pp=2"),
        "dataset.path": (config.dataset.name in ("pystdlib", "synthetic", "digits"), "dataset=text"),
        **{
            f"optimizer.{key}": (known and key not in OPTIMIZERS[config.optimizer.name].own_keys, readers(key))
            for key in ("momentum", "betas", "eps")
        },
    }
    for key, (ignored, suggestion) in rules.items():
        if key in given and ignored:
            asked: Any = config
            for part in key.split("."):
                asked = getattr(asked, part)
            if asked is not None:  # null is what the key has where it is left out
                complain(key, asked, suggestion if "leave" in suggestion else f"{suggestion} or leave {key} out")
    return problems
