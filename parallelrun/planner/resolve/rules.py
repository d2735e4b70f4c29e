"""Checks of a configuration that apply to every plan: the bounds in the schema, and a few combinations of keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from operator import attrgetter, ge, gt, le, lt
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.base.precision import TABLE
from parallelrun.base.registry import has, names
from parallelrun.base.wording import DETAILS, counted, did_you_mean, one_of
from parallelrun.config.keys import Key, default_of, known_keys
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.stack_schema import OWN, StackConfig
from parallelrun.config.units import implausible, plausible_range
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.contract.optimizers import OPTIMIZERS, check_lr_scale
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.predict.cluster_cost import peak_flops

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LARGEST = 2**40  # bound of integers without one in the schema: far more than any machine can hold
MOST_FLOPS_PER_BYTE = 5000  # of memory bandwidth: ten times that of an H100 in 8 bits
DEGREES = {"world", "dp", "cp", "tp", "pp", "ep"}  # `degrees` bounds them
OF_GOODPUT = ("mtbf_gpu_hours", "checkpoint_gb_s", "restart_s", "repair_hours")  # the first two are needed
OF_PLAN = ("detail", "tokens", "explain", "objective", "days", *OF_GOODPUT)
OF_RESTARTS = ("restarts", "elastic", "min_world")
VERBS = {"plot": ("plan", "explain"), **dict.fromkeys(OF_PLAN, ("plan",))}  # keys that only these verbs read
_READ_BY = {**VERBS, **dict.fromkeys(OF_RESTARTS, ("run", "plan", "explain"))}


def too_large(config: Config) -> list[Problem]:
    """Refuse numbers that are too large, before anything is built that many times."""
    problems = []
    for name, key in known_keys().items():
        if name in DEGREES or key.kind == "float":
            continue
        value, most = attrgetter(name)(config), LARGEST if key.most is None else key.most
        numbers = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(type(number) is int and number > most for number in numbers):
            message = f"{name}={value} is too large to plan with: at most {most}"
            fix = f"{name}={most}" if key.kind == "int" else ""
            problems.append(Problem(message, name, fix, kind="arithmetic"))
    return problems


def check(config: Config) -> list[Problem]:
    """Return every violation that does not depend on degrees or a model's spec."""
    problems = out_of_bounds(config) + one_of("optimizer", config.optimizer.name, OPTIMIZERS)
    problems += _betas(list(config.optimizer.betas)) + check_lr_scale(config) + _profile(config)
    problems += _peaks(config.cluster.peak_tflops)
    problems += [] if problems else _balance(config.cluster)
    for name in config.tracker.use:
        if not has("trackers", name):
            problems += one_of("tracker", name, names("trackers"), "parallelrun ls trackers")
    for section in config.detail.split(",") if config.detail is not None else ():
        problems += one_of("detail", section, (*DETAILS, "all"))
    if config.name is not None and not RUN_NAME.fullmatch(config.name):
        message = f"name={config.name[:80]!r} is not a run name: 1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit"
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).lstrip("-._")[:64]
        problems.append(Problem(message, "name", f"name={cleaned or 'run'}"))
    for key, name in (("strategy.name", config.strategy.name), ("model.preset", config.model.preset)):
        if not RUN_NAME.fullmatch(name):
            message = (
                f"{key}={name[:80]!r} is part of directory names: it needs 1 to 64 of A-Z a-z 0-9 . _ -, as `name`"
            )
            problems.append(Problem(message, key, "the preset's own name"))
    if config.optimizer.decay_steps is not None and config.optimizer.schedule in ("constant", "inverse_sqrt"):
        message = f"optimizer.decay_steps: optimizer.schedule={config.optimizer.schedule} has no decay that ends"
        problems.append(Problem(message, "optimizer.decay_steps", "optimizer.schedule=wsd", kind="unread"))
    problems += _goodput(config) + _elastic(config) + _emulation(config) + _stack(config) + _fp8(config)
    for key, verbs in _READ_BY.items():
        value = getattr(config, key)
        if value not in (None, False) and config.verb not in verbs:
            value = "true" if value is True else value
            message = f"{key}={value} is read by {' and '.join(verbs)} only, not by {config.verb}"
            command = f"parallelrun {verbs[0]} ... {key}={value}"
            problems.append(Problem(message, key, f"leave {key} out", command, kind="unread"))
    return problems


def _emulation(config: Config) -> list[Problem]:
    """Refuse to emulate hosts of which too little is known."""
    if not config.emulate:
        if config.emulate_slowdown is None:
            return []
        message = f"emulate_slowdown={config.emulate_slowdown:g} is read with emulate=true only"
        return [Problem(message, "emulate_slowdown", "emulate=true", kind="unread")]
    cluster, problems = config.cluster, []
    if not cluster.inter_gb_s:
        message = f"emulate=true needs the rate between hosts, which cluster={cluster.name} does not give"
        problems.append(Problem(message, "cluster.inter_gb_s", "cluster.inter_gb_s=3.125, or cluster=ethernet_25g"))
    if not cluster.gpus_per_node and not cluster.nodes:
        message = f"emulate=true needs the ranks of a host, which cluster={cluster.name} does not give"
        problems.append(Problem(message, "cluster.gpus_per_node", "cluster.gpus_per_node=1, or cluster.nodes=4"))
    return problems


def _stack(config: Config) -> list[Problem]:
    """Refuse to run as another program than this one."""
    if config.verb in VERBS["plot"] or replace(config.stack, description="") == StackConfig():
        return []
    message = f"stack={config.stack.name} is a program whose steps plan predicts; {config.verb} runs parallelrun's own"
    return [Problem(message, "stack", f"stack={OWN}", f"parallelrun plan ... stack={config.stack.name}")]


def _fp8(config: Config) -> list[Problem]:
    """Refuse products in fp8 of programs without."""
    precision = TABLE.get(config.precision.name)
    if not precision or not precision.others or config.stack.fp8 != "none":
        return []
    message = f"precision={precision.name}: {config.stack.name} has no products in 8 bits"
    return [Problem(message, "precision", f"precision={precision.others}", kind="not_built")]


def _goodput(config: Config) -> list[Problem]:
    """Refuse failures without the rate of checkpoints, or the other way round."""
    keys_set = [key for key in OF_GOODPUT if getattr(config, key) is not None]
    absent = [key for key in OF_GOODPUT[:2] if key not in keys_set] if keys_set else []
    examples = {"mtbf_gpu_hours": "mtbf_gpu_hours=50000", "checkpoint_gb_s": "checkpoint_gb_s=20"}
    return [Problem(f"{keys_set[0]} is given without {key}", key, examples[key]) for key in absent]


def _elastic(config: Config) -> list[Problem]:
    """Refuse settings of restarts that nothing would read."""
    problems = []
    if config.elastic and config.restarts == 0:
        message = "elastic=true changes the plan at a restart, and restarts=0 allows none"
        problems.append(Problem(message, "elastic", "restarts=3", kind="contradiction"))
    if config.min_world is not None and not config.elastic:
        message = f"min_world={config.min_world} is for elastic=true only: other runs keep their ranks"
        problems.append(Problem(message, "min_world", "elastic=true", kind="unread"))
    return problems


def check_min_world(config: Config, world: int) -> list[Problem]:
    """Refuse more ranks after a failure than the run has at its start."""
    if config.min_world is None or config.min_world <= world:
        return []
    message = f"min_world={config.min_world} is above the plan's {world} ranks"
    return [Problem(message, "min_world", f"min_world={world} or less", kind="arithmetic")]


def check_tokens(config: Config, spec: ModelSpec | None) -> list[Problem]:
    """Refuse `tokens` for a model that reads none, and a token id outside the vocabulary."""
    problems: list[Problem] = []
    if spec is not None and config.tokens is not None and spec.kind != "tokens":
        message = f"tokens={config.tokens:g}: model={spec.name} reads {spec.kind}, not tokens"
        problems.append(Problem(message, "tokens", "leave tokens out", kind="undefined"))
    mask = spec.mask_token if spec is not None else None
    if spec is not None and mask is not None and not 0 <= mask < spec.vocab:
        message = f"model.mask_token={mask} is outside the vocabulary of {counted(spec.vocab, 'token id')}"
        problems.append(Problem(message, "model.mask_token", f"model.vocab={mask + 1}", kind="arithmetic"))
    return problems


def check_devices(config: Config, user_keys: frozenset[str], servers: int) -> list[Problem]:
    """Refuse `gpus` where some ranks are servers, which have no device."""
    if not servers or "gpus" not in user_keys:
        return []
    message = (
        f"gpus={config.world} counts a device for every rank, and servers of strategy={config.strategy.name} have none"
    )
    return [Problem(message, "gpus", f"world={config.world}, servers included", kind="contradiction")]


def check_products(spec: ModelSpec, config: Config, tp: int) -> list[Problem]:
    """Check that the model's products are such as the precision has, and as the tensor strategy can split.

    Layouts of grids are not built: convolutions are not products that SUMMA or a cube could block. A grid's rows would
    split their samples, as dp does, and its columns compute them again. Nor do grids add up panels in 8 bits.
    """
    kind, precision = config.strategy.tensor.kind, TABLE.get(config.precision.name)
    strategy = tensor_strategy(kind) if has("strategies", f"tensor.{kind}") else None
    if precision and precision.others:
        what, fix = f"precision={precision.name}: linear layers of transformers multiply in 8 bits", precision.others
        if not any(block.kind == "transformer" for block in spec.blocks):
            message = f"{what}, and model={spec.name} has none"
            return [Problem(message, "precision", f"precision={fix}", kind="undefined")]
        if tp > 1 and config.stack.name == OWN and not (strategy and strategy.is_one_dimensional):
            message = f"{what} under layout=1d, not under layout={kind}"
            return [Problem(message, "layout", f"layout=1d or precision={fix}", kind="not_built")]
    if spec.kind == "images" and tp > 1 and not (strategy and strategy.splits_images):
        message = f"model={spec.name}: layout={kind} does not split channels of images, only layout=1d is built"
        return [Problem(message, "layout", "layout=1d or strategy=tp", kind="not_built")]
    return []


def out_of_bounds(config: Config, section: str = "") -> list[Problem]:
    """Return the violations of bounds in the schema, for all keys or for those that begin with `section`."""
    return [
        problem
        for name, key in known_keys().items()
        if name.startswith(section)
        for problem in _outside(key, _as_given(config, name), attrgetter(name)(config))
    ]


def _as_given(config: Config, key: str) -> str:
    """The short name of `key` if the user has set it (`servers` for `strategy.data.servers`)."""
    short = key.rpartition(".")[2]
    has_short = key.startswith("strategy.") and short not in DEGREES
    return short if has_short and getattr(config, short, None) is not None else key


def _outside(key: Key, name: str, value: Any) -> list[Problem]:
    """The violation of the bounds of `key` (called `name` in the message) by `value`; None means that it is unset."""
    if value is None or key.kind not in ("int", "float", "str"):
        return []
    if key.choices:
        return one_of(name.removesuffix(".name"), value, key.choices)
    if key.kind == "int":
        if key.least is None or (type(value) is int and value >= key.least):  # True and 2.0 are not whole numbers
            return []
        message = f"{name}={value} is not a whole number of at least {key.least}"
        return [Problem(message, name, f"{name}={default_of(name, max(int(key.least), 1))}")]
    bounds = ("at least", ge, key.least), ("above", gt, key.above), ("at most", le, key.most), ("below", lt, key.below)
    limits = [(word, holds, bound) for word, holds, bound in bounds if bound is not None]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not limits or (is_number and all(holds(value, bound) for _, holds, bound in limits)):
        return implausible(key, name, value)
    inside = key.least if key.least is not None else 1.0 if key.below is None and key.most is None else 0.5
    message = f"{name}={value} is not a finite number {' and '.join(f'{word} {bound}' for word, _, bound in limits)}"
    if key.plausible:
        message += f": {plausible_range(key)}"
        if is_number and not implausible(key, name, -value):
            inside = -value
    if key.most == 1 and is_number and 1 < value <= 100:
        return [Problem(f"{message}; {value:g} % are {value / 100:g}", name, f"{name}={value / 100:g}")]
    return [Problem(message, name, f"{name}={default_of(name, inside)}")]


def _profile(config: Config) -> list[Problem]:
    """Check that the steps to profile are steps of the run."""
    wrong = [step for step in config.profile if type(step) is not int or not 1 <= step <= config.steps]
    if type(config.steps) is not int or config.steps < 1:
        wrong = [step for step in wrong if type(step) is not int or step < 1]
    if not wrong:
        return []
    message = f"profile={list(config.profile)}: {wrong[0]} is not one of the steps 1 to {config.steps}"
    return [Problem(message, "profile", f"profile=[{min(3, max(config.steps, 1))}]")]


def _peaks(peaks: Any) -> list[Problem]:
    """Check `cluster.peak_tflops`: one rate, or one per precision."""
    key = "cluster.peak_tflops"
    peak = replace(known_keys()[key], kind="float")
    if not isinstance(peaks, Mapping):
        return _outside(peak, key, peaks)
    unknown = [name for name in peaks if name not in TABLE]
    problems = [
        Problem(f"{key} has no {name}; it is one of {', '.join(TABLE)}", key, f"{key}.{did_you_mean(name, TABLE)}")
        for name in map(str, unknown)
    ]
    return problems + [p for name in TABLE for p in _outside(peak, f"{key}.{name}", peaks.get(name))]


def _balance(cluster: ClusterConfig) -> list[Problem]:
    """Refuse a memory's bandwidth in TB/s: each rate may be plausible while their ratio is not."""
    peak, key = max((peak_flops(cluster, name) or 0.0 for name in TABLE), default=0.0), "cluster.memory_gb_s"
    rate = cluster.memory_gb_s
    if not rate or peak / (rate * 1e9) <= MOST_FLOPS_PER_BYTE:
        return []
    message = (
        f"{key}={rate:g}: a device of {peak / 1e12:g} TFLOP/s computes {peak / (rate * 1e9):,.0f} FLOPs for each byte"
    )
    fix = f"{key}={rate * 1e3:g}"
    return [Problem(f"{message} that it reads, where at most {MOST_FLOPS_PER_BYTE:,} are plausible", key, fix)]


def _betas(betas: list[float]) -> list[Problem]:
    if len(betas) == 2 and all(isinstance(b, (int, float)) and isfinite(b) and 0 <= b < 1 for b in betas):
        return []
    message = f"optimizer.betas={betas} are not two numbers, each at least 0 and below 1"
    return [Problem(message, "optimizer.betas", "optimizer.betas=[0.9,0.95]")]
