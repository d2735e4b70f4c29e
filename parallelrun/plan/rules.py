"""What a config must satisfy whatever the plan: ranges and names of model, optimizer, run, verify and bench."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from parallelrun import definitions, registry
from parallelrun.config.keys import known_keys
from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.plan import lr_scale
from parallelrun.plan.optimizers import OPTIMIZERS
from parallelrun.precision import TABLE
from parallelrun.wording import did_you_mean

ROUTER = "model.router."
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CHOICES = {
    "precision.name": tuple(TABLE),
    "optimizer.name": tuple(OPTIMIZERS),
    "optimizer.schedule": ("cosine", "linear", "constant"),
    "recompute": ("none", "selective", "full"),
    "ranks": ("few", "all"),
    "tracker": ("none", "tensorboard"),
    "verify.optimizer": ("sgd", "same"),
    "verify.precision": ("fp64", "fp32"),
    "strategy.pipeline.partition": ("cost", "uniform"),
    "strategy.data.compression": ("none", "fp16", "powersgd"),
    "strategy.data.reduction": ("average", "adasum"),
    "strategy.data.join_divisor": ("initial", "active"),
    "strategy.tensor.form": ("auto", "stationary_x", "stationary_y", "stationary_w", "summa"),
    "model.router.kind": ("top_k", "gshard", "switch", "expert_choice"),
    "model.router.score": ("softmax", "sigmoid"),
    "model.router.renormalise": ("none", "before", "after"),
    "model.router.drop_policy": ("position", "probability"),
    "model.router.second_expert": ("random", "all"),
}
# The largest whole numbers that can be planned with: what is counted one by one (layers, samples of a step) is bounded
# by the time that it takes, everything else lies far above what any machine could hold.
LARGEST = 2**40
LARGEST_OF = {
    "seed": 2**63 - 1,
    "dataset.num_workers": 256,
    **dict.fromkeys(
        ("global_batch", "local_batch", "micro_batch", "microbatches", "model.router.group_samples"), 2**20
    ),
    **dict.fromkeys(("model.layers", "model.stages", "model.dense_layers", "model.expert_period"), 10_000),
    **dict.fromkeys(("model.heads", "model.kv_heads", "model.experts", "model.shared_experts"), 2**20),
    **dict.fromkeys(("model.hidden", "model.ffn", "model.expert_ffn", "model.vocab", "model.seq"), 2**30),
    **dict.fromkeys(("model.image", "model.channels", "model.width"), 2**16),
    **dict.fromkeys(("model.rows", "model.inner", "model.columns"), 2**20),
    **dict.fromkeys(("cluster.nodes", "cluster.gpus_per_node", "strategy.demo"), 2**20),
}
# key: the least whole number allowed
WHOLE = {
    "steps": 1,
    "seed": 0,
    "optimizer.warmup": 0,
    "eval.every": 0,
    "eval.batches": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "verify.steps": 1,
    "bench.warmup": 0,
    "bench.steps": 1,
    "precision.scale_window": 1,
    "dataset.samples": 1,
    "dataset.vocab": 1,
    "dataset.max_bytes": 1,
    "dataset.crop": 0,
    "dataset.num_workers": 0,
    "strategy.data.shard": 1,
    "strategy.data.sync_every": 1,
    "strategy.data.group_size": 1,
    "strategy.data.servers": 1,
    "strategy.data.staleness": 0,
    "strategy.data.backup_workers": 0,
    "strategy.data.powersgd_rank": 1,
    "strategy.pipeline.virtual_stages": 1,
    "strategy.tensor.depth": 1,
    "strategy.expert.chunks": 1,
    "strategy.expert.group_size": 1,
    "model.router.top_k": 1,
    "model.router.min_capacity": 0,
    "model.router.group_samples": 1,
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 1,
}
DEGREES = {"world", "dp", "tp", "pp", "ep"}  # `degrees` says how large they may be
# key: (least, is it allowed itself, bound above or None, is that allowed itself)
REAL: dict[str, tuple[float, bool, float | None, bool]] = {
    "optimizer.lr": (0, True, None, False),
    "optimizer.min_lr_ratio": (0, True, 1, True),
    "optimizer.weight_decay": (0, True, None, False),
    "optimizer.eps": (0, False, None, False),
    "optimizer.momentum": (0, True, 1, False),
    "optimizer.clip": (0, True, None, False),
    "dropout": (0, True, 1, False),
    "timeout_s": (0, False, None, False),
    "tokens": (0, False, None, False),
    "verify.tolerance": (0, False, None, False),
    "precision.loss_scale": (0, False, None, False),
    "dataset.val_fraction": (0, False, 1, False),
    "strategy.data.shard_min_kb": (0, True, None, False),
    "strategy.data.outer_lr": (0, False, None, False),
    "strategy.data.outer_momentum": (0, True, 1, False),
    "strategy.data.bucket_mb": (0, True, None, False),
    "strategy.data.stall_warn_s": (0, True, None, False),
    "model.norm_eps": (0, False, None, False),
    "model.init_std": (0, True, None, False),
    "model.label_smoothing": (0, True, 1, False),
    "model.attention_dropout": (0, True, 1, False),
    "model.rope_theta": (0, False, None, False),
    "model.norm_momentum": (0, False, 1, True),
    "model.suited_lr": (0, True, None, False),
    "model.router.scaling": (0, False, None, False),
    "model.router.capacity_factor": (0, False, None, False),
    "model.router.eval_capacity_factor": (0, False, None, False),
    "model.router.aux_coefficient": (0, True, None, False),
    "model.router.z_coefficient": (0, True, None, False),
    "model.router.jitter": (0, True, 1, False),
    "model.router.bias_rate": (0, True, None, False),
    "cluster.memory_gb": (0, False, None, False),
    "cluster.intra_gb_s": (0, False, None, False),
    "cluster.inter_gb_s": (0, False, None, False),
    "cluster.latency_us": (0, True, None, False),
}

POSITIVE = (0, False, None, False)
VERBS = {"plot": ("plan", "explain"), "tokens": ("plan",)}  # of keys that not every verb reads


def too_large(config: Config) -> list[Problem]:
    """Numbers that nothing can be planned with: to be told before anything is made as often as they say."""
    problems = []
    for key in sorted(known_keys().keys() - DEGREES):
        value, most = _get(config, key), LARGEST_OF.get(key, LARGEST)
        numbers = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(type(number) is int and number > most for number in numbers):
            what = f"{key}={value} is more than can be planned with: at most {most}"
            problems.append(Problem(what, key, kind="arithmetic"))
    return problems


def check(config: Config) -> list[Problem]:
    """Every violation that needs neither degrees nor a model's spec."""
    problems = _by_tables(config, of_router=False)
    problems += _betas(list(config.optimizer.betas)) + lr_scale.check(config) + _profile(config)
    problems += _peaks(config.cluster.peak_tflops)
    if config.name is not None and not RUN_NAME.fullmatch(config.name):
        what = f"name={config.name[:80]!r} is no run name: 1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).lstrip("-._")[:64]
        problems.append(Problem(what, "name", f"name={cleaned or 'run'}"))
    for key, name in (("strategy.name", config.strategy.name), ("model.preset", config.model.preset)):
        if not RUN_NAME.fullmatch(name):
            what = f"{key}={name[:80]!r} names directories of runs: 1 to 64 of A-Z a-z 0-9 . _ -, as `name`"
            problems.append(Problem(what, key, "the preset's own name"))
    for key, verbs in VERBS.items():
        value = getattr(config, key)
        if value is not None and config.verb not in verbs:
            what = f"{key}={value} is read by {' and '.join(verbs)} only, not by {config.verb}"
            command = f"parallelrun plan ... {key}={value}"
            problems.append(Problem(what, key, f"leave {key} out", command, kind="unread"))
    return problems + model(config)


def check_tokens(config: Config, spec: ModelSpec | None) -> list[Problem]:
    """`tokens` are those of a model that reads tokens."""
    if config.tokens is None or spec is None or spec.kind == "tokens":
        return []
    what = f"tokens={config.tokens:g}: model={spec.name} reads {spec.kind}, which have no tokens"
    return [Problem(what, "tokens", "leave tokens out", kind="undefined")]


def model(config: Config) -> list[Problem]:
    """Sizes and router of the model, each by itself: what its spec cannot be made without (how they divide, the spec
    and `plan.routing` check)."""
    sizes = definitions.model(config).sizes if registry.has("models", config.model.name) else {}
    problems = [p for key, least in sizes.items() for p in _whole(f"model.{key}", getattr(config.model, key), least)]
    return problems + _by_tables(config, of_router=True)


def _by_tables(config: Config, of_router: bool) -> list[Problem]:
    """Violations of the tables, of the router's keys or of all others."""
    problems = []
    for key, known in CHOICES.items():
        value = _get(config, key)
        if key.startswith(ROUTER) == of_router and value not in known:
            short = key.removesuffix(".name")
            what = f"{short}={value} is unknown; it is one of {', '.join(known)}"
            problems.append(Problem(what, short, did_you_mean(value, known, f"{short}=")))
    for key, least in WHOLE.items():
        problems += (
            _whole(_as_given(config, key), _get(config, key), least) if key.startswith(ROUTER) == of_router else []
        )
    for key, bounds in REAL.items():
        problems += _real(key, _get(config, key), *bounds) if key.startswith(ROUTER) == of_router else []
    return problems


def _get(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _as_given(config: Config, key: str) -> str:
    """The shorthand of `key` where the user has set that (`servers` for `strategy.data.servers`)."""
    short = key.rpartition(".")[2]
    return short if key.startswith("strategy.") and getattr(config, short, None) is not None else key


def _whole(key: str, value: object, least: int) -> list[Problem]:
    """None means "not given" and is no violation; `True` and 2.0 are no whole numbers."""
    if value is None or (type(value) is int and value >= least):
        return []
    return [
        Problem(
            f"{key}={value} is not a whole number of at least {least}", key, f"{key}={_default(key, max(least, 1))}"
        )
    ]


def _real(key: str, value: Any, least: float, closed: bool, bound: float | None, bound_closed: bool) -> list[Problem]:
    if value is None:
        return []
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    above = number and (value >= least if closed else value > least)
    if above and (bound is None or (value <= bound if bound_closed else value < bound)):
        return []
    allowed = f"{'at least' if closed else 'above'} {least}"
    if bound is not None:
        allowed += f" and {'at most' if bound_closed else 'below'} {bound}"
    return [
        Problem(
            f"{key}={value} is not a finite number {allowed}",
            key,
            f"{key}={_default(key, _inside(least, closed, bound))}",
        )
    ]


def _default(key: str, otherwise: object) -> object:
    """What stands in the schema, if anything does."""
    value = _get(Config(), key) if key in known_keys() else None
    return otherwise if value is None else value


def _inside(least: float, closed: bool, bound: float | None) -> float:
    return least if closed else (least + bound) / 2 if bound is not None else 1.0


def _profile(config: Config) -> list[Problem]:
    """The steps to profile are steps of the run."""
    wrong = [step for step in config.profile if type(step) is not int or not 1 <= step <= config.steps]
    if not wrong or type(config.steps) is not int or config.steps < 1:
        return []
    what = f"profile={list(config.profile)}: {wrong[0]} is not one of the steps 1 to {config.steps}"
    return [Problem(what, "profile", f"profile=[{min(3, config.steps)}]")]


def _peaks(given: Any) -> list[Problem]:
    """Of `cluster.peak_tflops`: one rate, or one per precision."""
    key = "cluster.peak_tflops"
    if not isinstance(given, Mapping):
        return _real(key, given, *POSITIVE)
    unknown = [name for name in given if name not in TABLE]
    problems = [
        Problem(f"{key} has no {name}; it is one of {', '.join(TABLE)}", key, f"{key}.{did_you_mean(name, TABLE)}")
        for name in map(str, unknown)
    ]
    return problems + [p for name in TABLE for p in _real(f"{key}.{name}", given.get(name), *POSITIVE)]


def _betas(betas: list[float]) -> list[Problem]:
    legal = len(betas) == 2 and all(isinstance(b, (int, float)) and isfinite(b) and 0 <= b < 1 for b in betas)
    if legal:
        return []
    what = f"optimizer.betas={betas} are not two numbers, each at least 0 and below 1"
    return [Problem(what, "optimizer.betas", "optimizer.betas=[0.9,0.95]")]
