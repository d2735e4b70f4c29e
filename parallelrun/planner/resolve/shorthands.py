"""Folds shorthands (`layout`, `schedule`, ...) into the strategy section and finds keys that no strategy reads."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.base.registry import has
from parallelrun.base.wording import did_you_mean, one_of
from parallelrun.config.schema.model_schema import LoraConfig, ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import kinds, own_keys
from parallelrun.planner.contract.classes import pipeline_schedule, tensor_strategy
from parallelrun.planner.contract.optimizers import OPTIMIZERS, readers
from parallelrun.planner.model import definitions
from parallelrun.planner.pieces import router_settings

# keys that say which strategies are chosen and how they work
OF_STRATEGIES = ("strategy.", "layout", "schedule", "virtual_stages")
# set by presets, or read by the parts that choose a model's data, rate and experts
_OF_ANY_MODEL = (
    "name", "preset", "description", "dataset", "suited_lr", "from_hf", "experts", "router", "own_router"
)  # fmt: skip
MOST_NAMED = 4  # strategies in a suggestion


@lru_cache(maxsize=1)
def short_keys() -> dict[str, str]:
    """The keys of data and tensor strategies that may be given without the prefix: `servers` -> `data`."""
    root = {item.name for item in fields(Config)}
    return {key: axis for axis in ("tensor", "data") for kind in kinds(axis) for key in own_keys(axis, kind) & root}


def layouts() -> dict[str, str]:
    """The tensor strategy that each value of `layout` names."""
    return {tensor_strategy(kind).layout_name: kind for kind in kinds("tensor")}


def fold(config: Config, user_keys: frozenset[str]) -> tuple[Config, list[Problem]]:
    """(a copy of `config` whose strategy section says everything, and whose model.router has what a preset of experts
    fills in; the shorthands' violations).

    An explicit key beats the preset; two explicit keys that say different things are a contradiction. A kind that is
    unknown keeps the preset's, so that the other checks can go on.
    """
    problems: list[Problem] = []
    data, tensor, pipeline = config.strategy.data, config.strategy.tensor, config.strategy.pipeline
    if config.layout is not None:
        kind, of_router = _layout(config.layout)
        problems += of_router
        if kind and kind != tensor.kind:
            problems += _contradiction("layout", config.layout, "strategy.tensor.kind", tensor.kind, user_keys)
            problems += _other_preset(config)
            tensor = replace(tensor, kind=kind)
    sections: dict[str, Any] = {"data": data, "tensor": tensor}
    for key, axis in sorted(short_keys().items()):
        value, section = getattr(config, key), sections[axis]
        if value is not None:
            problems += _contradiction(key, value, f"strategy.{axis}.{key}", getattr(section, key), user_keys)
            sections[axis] = replace(section, **{key: value})
    if config.schedule is not None:
        problems += one_of("schedule", config.schedule, kinds("pipeline"))
        problems += _contradiction("schedule", config.schedule, "strategy.pipeline.kind", pipeline.kind, user_keys)
        if config.schedule in kinds("pipeline"):
            pipeline = replace(pipeline, kind=config.schedule)
    if config.virtual_stages is not None:
        long = "strategy.pipeline.virtual_stages"
        problems += _contradiction("virtual_stages", config.virtual_stages, long, pipeline.virtual_stages, user_keys)
        pipeline = replace(pipeline, virtual_stages=config.virtual_stages)
    model, of_router = router_settings.fold(config, user_keys)
    problems += of_router
    if config.strategy.expert.kind is not None:
        problems += one_of("strategy.expert.kind", config.strategy.expert.kind, kinds("expert"))
    chosen: dict[str, Any] = {**sections, "pipeline": pipeline, "context": config.strategy.context}
    for axis, of_axis in chosen.items():
        if not (has("strategies", f"{axis}.{of_axis.kind}") and (axis == "pipeline" or of_axis.kind != "none")):
            problems += one_of(f"strategy.{axis}.kind", of_axis.kind, kinds(axis))
    strategy = replace(config.strategy, **chosen, router={})
    return replace(config, model=model, strategy=strategy), problems


def _layout(layout: str) -> tuple[str | None, list[Problem]]:
    text, names = str(layout).lower(), layouts()
    if text not in names:
        message = f"layout={layout} is unknown; it is one of {', '.join(names)}"
        return None, [Problem(message, "layout", did_you_mean(text, names, "layout="))]
    return names[text], []


def _other_preset(config: Config) -> list[Problem]:
    """A preset that is about one tensor strategy names its layout: another one contradicts it."""
    preset, own = config.strategy.name, config.strategy.tensor.kind
    if config.strategy.own_axis != "tp":
        return []
    named = tensor_strategy(own).layout_name if has("strategies", f"tensor.{own}") else own
    message = f"layout={config.layout} contradicts strategy={preset}, which is layout={named}"
    return [Problem(message, "layout", f"layout={named} or strategy=ptdp", kind="contradiction")]


def _contradiction(short: str, requested: object, long: str, said: object, user_keys: frozenset[str]) -> list[Problem]:
    if long not in user_keys or said is None or said == requested:
        return []
    message = f"{short}={requested} contradicts {long}={said}"
    return [Problem(message, short, f"leave {short} out or leave {long} out", kind="contradiction")]


def _unread_keys(axis: str, kind: str) -> set[str]:
    """The keys of other strategies of an axis, which this one does not read."""
    if not has("strategies", f"{axis}.{kind}"):
        return set()
    return {key for other in kinds(axis) for key in own_keys(axis, other)} - own_keys(axis, kind)


def _readers(axis: str, key: str) -> str:
    """The choices that read a key: `strategy=ring or strategy=horovod`, `layout=2d`; empty if most strategies do."""
    readers = [kind for kind in kinds(axis) if key in own_keys(axis, kind)]
    if axis == "tensor":
        return f"layout={tensor_strategy(readers[0]).layout_name}"
    return " or ".join(f"strategy={kind}" for kind in readers) if len(readers) < MOST_NAMED else ""


def unread(config: Config, user_keys: frozenset[str], pp: int, cp: int = 1) -> list[Problem]:
    """Keys that were set although the chosen strategies do not read them (`config` is folded)."""
    problems = []
    data, tensor, pipeline = config.strategy.data.kind, config.strategy.tensor.kind, config.strategy.pipeline.kind
    strategies = f"data={data} tensor={tensor} pipeline={pipeline if pp > 1 else 'none'}"
    strategies += f" context={config.strategy.context.kind}" if cp > 1 else ""

    def complain(key: str, value: object, fix: str) -> None:
        section = "model" if key == "dropout" else key.partition(".")[0]
        chosen = {"model": config.model.preset, "dataset": config.dataset.name, "optimizer": config.optimizer.name}
        by = f"read by none of the chosen strategies ({strategies})"
        by = f"not read by {section}={chosen[section]}" if section in chosen else by
        problems.append(Problem(f"{key}={value} is {by}", key, fix, kind="unread"))

    of_others = {"tensor": _unread_keys("tensor", tensor), "data": _unread_keys("data", data)}
    for key, axis in sorted(short_keys().items(), key=lambda item: (item[1] == "data", item[0])):
        value = getattr(config, key)
        if value and key in of_others[axis]:
            complain(key, value, f"leave {key} out" + (f", or {_readers(axis, key)}" if axis == "data" else ""))
    if pp == 1 and config.schedule is not None:
        complain("schedule", config.schedule, "pp=2, or leave schedule out")
    number = config.strategy.pipeline.virtual_stages
    explicit = config.virtual_stages is not None or "strategy.pipeline.virtual_stages" in user_keys
    if explicit and number != 1 and (pp == 1 or not pipeline_schedule(pipeline).takes_virtual_stages):
        fix = "leave virtual_stages out"
        complain("virtual_stages", number, f"schedule=interleaved, or {fix}" if pp > 1 else fix)
    long = {f"strategy.{axis}.{key}": (axis, key) for axis, keys in of_others.items() for key in sorted(keys)}
    ignored = {name: _readers(axis, key) for name, (axis, key) in long.items() if name in user_keys}
    ignored |= _ignored_elsewhere(config, pp) | _ignored_context(config, user_keys, cp)
    for key, suggestion in ignored.items():
        asked = attrgetter(key)(config) if key in user_keys else None
        if asked not in (None, [], {}):  # as if it had not been set
            complain(key, asked, f"{suggestion} or leave {key} out" if suggestion else f"leave {key} out")
    return problems


def _ignored_context(config: Config, user_keys: frozenset[str], cp: int) -> dict[str, str]:
    """Keys of `strategy.context` that are set at cp=1, or that the chosen kind does not read."""
    kind, section = config.strategy.context.kind, "strategy.context."
    unread = _unread_keys("context", kind) if cp > 1 else {key.removeprefix(section) for key in user_keys}
    readers = {key: [other for other in kinds("context") if key in own_keys("context", other)] for key in unread}
    fixes = {key: "cp=2" if cp == 1 else f"strategy.context.kind={names[0]}" for key, names in readers.items() if names}
    return {section + key: fix for key, fix in fixes.items() if section + key in user_keys}


def _ignored_elsewhere(config: Config, pp: int) -> dict[str, str]:
    """Keys of the pipeline, model, dataset and optimizer that are ignored, each with the change that makes it read."""
    ignored = {f"strategy.pipeline.{key}": "pp=2" for key in ("kind", "partition", "split") if pp == 1}
    own = definitions.model(config).own_keys if has("models", config.model.name) else None
    if own is not None:
        chosen = {item.name for item in fields(ModelConfig)} - {*own, *_OF_ANY_MODEL, *router_settings.OF_EXPERTS}
        ignored |= {f"model.{key}": "" for key in chosen - {"lora"}}
        if "lora" not in own:
            ignored |= {f"model.lora.{item.name}": "model=hf" for item in fields(LoraConfig)}
        elif config.model.lora.rank is None:
            ignored |= {f"model.lora.{key}": "model.lora.rank=8" for key in ("alpha", "targets", "base_dtype")}
        ignored |= {"dropout": ""} if "dropout" not in own and config.dropout else {}
    if config.model.window is None:
        ignored |= dict.fromkeys(("model.global_period", "model.local_rope_theta"), "model.window=1024")
    if has("datasets", config.dataset.name):
        dataset = definitions.dataset(config)
        if not dataset.reads_path:
            ignored["dataset.path"] = "dataset=text"
        of_text = () if dataset.reads_tokenizer else ("tokenizer", "column", "split", "append_eod", "cache")
        ignored |= {f"dataset.{key}": "dataset=text" for key in of_text}
        for key in dataset.unread:
            ignored[f"dataset.{key}"] = "dataset=chat" if key == "chat_template" else "dataset=text"
        if not dataset.packs:
            ignored["dataset.pack"] = "dataset=text"
        if not dataset.reads_source:
            ignored["dataset.source"] = "dataset=custom"
        if not dataset.reads_mixture:
            ignored["dataset.mixture"] = "dataset=mixture"
    if config.optimizer.name in OPTIMIZERS:
        own_keys = OPTIMIZERS[config.optimizer.name].own_keys
        read = {key for kind in OPTIMIZERS.values() for key in kind.own_keys}
        ignored |= {f"optimizer.{key}": readers(key) for key in sorted(read.difference(own_keys))}
    return ignored
