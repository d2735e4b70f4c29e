"""The matrix of compositions: every pair of axes in every setting, each resolved as a run would be, by the rule that
refuses it.

A cell is a model with degrees and a setting of each axis that they have. Of these settings at most MOST differ from the
defaults: what refuses a composition is about one axis or two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import combinations, product
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors
from parallelrun.config.keys import known_keys
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import config_class, kinds, narrowed
from parallelrun.planner.contract.classes import data_strategy, tensor_strategy
from parallelrun.planner.contract.degrees import Degrees
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.resolve import shorthands
from parallelrun.planner.resolve.default_precision import with_precision
from parallelrun.planner.resolve.resolve_config import solve_degrees, spec_of

WORKERS, MOST, BATCH = 8, 2, 64
MODELS = {  # sizes that every degree divides
    "gpt": "model=gpt model.layers=16",
    "experts with a capacity": "model=moe_gpt model.layers=16 strategy=gshard",
    "latent attention, router bias": "model=moe_gpt model.layers=16 strategy=aux_free model.kv_lora_rank=32 "
    "model.qk_nope_head_dim=8 model.qk_rope_head_dim=8 model.v_head_dim=8 model.norm=rmsnorm model.activation=swiglu "
    "model.position=rope model.bias=false",
    "resnet": "model=resnet model.stages=[4,4,4] model.norm_samples=4",
    "alexnet": "model=alexnet",
}
KINDS = ("legal", "arithmetic", "undefined", "not_built")
NOT_VARIED = {"kind", "partition", "overlap", "timeline", "fills", "order"}  # keys that decide no composition
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|\b\d+(?:[.x]\d+)*\b(?!\.\d)")
Settings = dict[str, Any]  # by dotted key


def matrix(bases: Mapping[str, tuple[Config, frozenset[str]]], step: int = 1) -> dict[str, Any]:
    """Resolve all cells, or every `step`th. bases: MODELS, each composed, with the keys that its words set.

    Returns `models`: the number of cells by model and kind, where a cell that several rules refuse is of the first of
    KINDS, because what does not divide will not be legal once it is built; `rules`: of all refusals the text with N for
    numbers, kind, key, the number of cells that it refuses, whether or not others do, and the words of one.
    """
    models: dict[str, dict[str, int]] = {}
    rules: dict[str, dict[str, Any]] = {}
    for name, (config, given) in bases.items():
        folded, problems = shorthands.fold(with_precision(config, None)[0], given)
        base = replace(folded, global_batch=BATCH)
        spec = spec_of(narrowed(base), problems)
        assert spec is not None and not problems, problems
        counts = models[name] = dict.fromkeys(KINDS, 0)
        for number, settings in enumerate(_cells(base, spec)):
            if number % step:
                continue
            refused = _refusals(base, spec, settings)
            refusing = {problem.kind for problem in refused.values()}
            counts[next((kind for kind in KINDS if kind in refusing), KINDS[bool(refused)])] += 1
            shown = (
                f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
            )
            example = " ".join([MODELS[name], f"global_batch={BATCH}", *shown])
            for text, problem in refused.items():
                new = {"kind": problem.kind, "rule": text, "where": problem.where, "cells": 0, "example": example}
                rules.setdefault(text, new)["cells"] += 1
    total = {kind: sum(counts[kind] for counts in models.values()) for kind in KINDS}
    ordered = sorted(rules.values(), key=lambda rule: (rule["kind"] != KINDS[-1], rule["kind"], -rule["cells"]))
    return {"models": {**models, "all": total}, "rules": ordered}


def _refusals(base: Config, spec: ModelSpec, settings: Settings) -> dict[str, Problem]:
    """The violations of a cell by their text, with N for numbers."""
    sections: dict[str, Settings] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section.removeprefix("strategy."), {})[name] = value
    degrees, strategy = sections.pop(""), base.strategy
    changed = {axis: replace(getattr(strategy, axis), **own) for axis, own in sections.items()}
    config = narrowed(replace(base, strategy=replace(strategy, **changed), **degrees))
    data = data_strategy(config.strategy.data.kind)
    solved = solve_degrees(config, spec, Degrees(**degrees, servers=data.num_servers(data.asked_servers(config))))
    return {} if isinstance(solved, Plan) else {_NUMBER.sub("N", problem.what): problem for problem in solved}


def _cells(base: Config, spec: ModelSpec) -> Iterator[Settings]:
    """Yield the settings of every cell of a model, the degrees first."""
    for pp, dp, cp, tp in product((1, 2, 4, 8), repeat=4):
        if pp * dp * cp * tp > WORKERS or (cp > 1 and spec.kind == "images"):
            continue
        degrees = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, **({"ep": 1} if spec.experts else {})}
        axes = [
            _of_axis(base, axis, tp)
            for axis, size in (("data", dp * cp), ("tensor", tp), ("pipeline", pp), ("context", cp))
            if size > 1
        ]
        axes += [_of_experts(dp * cp, tp, spec.experts)] if spec.experts else []
        for number in range(MOST + 1):
            for differing in combinations(axes, number):
                for settings in product(*differing):
                    yield degrees | {key: value for setting in settings for key, value in setting.items()}


def _of_axis(base: Config, axis: str, tp: int) -> list[Settings]:
    """The settings of an axis without the default: every kind, by itself and with one of its switches; of a layout, the
    shapes that its class compares."""
    default, settings = getattr(base.strategy, axis).kind, []
    for kind in kinds(axis):
        of_kind = {} if kind == default else {f"strategy.{axis}.kind": kind}
        changes = _shapes(kind, tp) if axis == "tensor" else _switches(axis, kind)
        settings += [of_kind | change for change in changes if of_kind or change]
    return settings


def _shapes(kind: str, tp: int) -> list[Settings]:
    """The shapes of a layout in its own keys: of a plug-in, choices that it inherits may have others, and be equal."""
    usual, changes = vars(config_class("tensor", kind)()), list[Settings]()
    for shape in [vars(choice.config) for choice in tensor_strategy(kind).layout_choices(tp)] or [usual]:
        own = {key: shape.get(key, value) for key, value in usual.items() if key not in NOT_VARIED}
        change = {f"strategy.tensor.{key}": value for key, value in own.items() if value != usual[key]}
        changes += [change] if change not in changes else []
    return changes


@cache
def _switches(axis: str, kind: str) -> tuple[Settings, ...]:
    """No change to a strategy, and every other value of each of its keys that has choices or is on or off."""
    usual, keys = config_class(axis, kind)(), known_keys()
    changes: list[Settings] = [{}]
    for name in (item.name for item in fields(usual) if item.name not in NOT_VARIED):
        key = keys[f"strategy.{axis}.{name}"]
        values = key.choices or ((True, False) if key.kind == "bool" else ())
        changes += [{key.name: value} for value in values if value != getattr(usual, name)]
    return tuple(changes)


def _of_experts(ranks: int, tp: int, experts: int) -> list[Settings]:
    """Every ep, with each dispatcher, over dp x cp and over dp x cp x tp."""
    spans = [(1, {}), (tp, {"strategy.expert.tp": 1})][: 1 + (tp > 1)]
    return [
        {"ep": ep, "strategy.expert.kind": kind, **of_tp}
        for kind, (size, of_tp) in product(kinds("expert"), spans)
        for ep in divisors(ranks * size)[1:]
        if experts % ep == 0
    ]
