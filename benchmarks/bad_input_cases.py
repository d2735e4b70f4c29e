"""The cases of the campaign of bad input, drawn by a seed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from benchmarks.bad_input_files import RECIPES
from benchmarks.bad_input_words import (
    DICTS,
    ENVIRON,
    LISTS,
    MAIN_FLAGS,
    NUMBERS,
    PATHS,
    PRESETS,
    TEXTS,
    TOOLS,
    VERBS,
    WRONG,
)
from parallelrun.config.keys import PATH_KEYS, Key, known_keys


@dataclass(frozen=True)
class Case:
    """A command line. names: what the message must contain; is_file: no fix but another file may exist."""

    family: str
    words: tuple[str, ...]
    names: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    is_file: bool = False
    may_torch: bool = False


def _value(random: Random, key: Key) -> str:
    if key.name in PATH_KEYS and random.random() < 0.7:
        return random.choice(PATHS)
    pools = {"int": NUMBERS, "float": NUMBERS, "list": LISTS, "dict": DICTS, "bool": NUMBERS, "str": TEXTS}
    if random.random() < 0.15:
        return random.choice(NUMBERS + TEXTS + LISTS + DICTS)
    return random.choice(pools.get(key.kind, NUMBERS + TEXTS))


def _one_key(random: Random) -> Case:
    key = random.choice(list(known_keys().values()))
    words = (*random.choice(VERBS), *random.choice(PRESETS), f"{key.name}={_value(random, key)}")
    return Case("one key", words, is_file=key.name in PATH_KEYS, may_torch=True)


def _many(random: Random) -> Case:
    chosen = random.sample(WRONG, random.choice((2, 2, 3, 4)))
    words = (*random.choice(VERBS[:6]), *(word for word, _ in chosen))
    return Case("many keys", words, tuple(name for _, name in chosen))


def _typo(random: Random) -> Case:
    name = random.choice([key.name for key in known_keys().values() if not key.is_of_presets])
    place = random.randrange(len(name))
    before, letter, after = name[:place], name[place], name[place + 1 :]
    typed = random.choice((before + after, before + 2 * letter + after, before + random.choice("aeiou_.-ü") + after))
    return Case("typo", (*random.choice(VERBS), f"{typed}=1"), ())


def _degrees(random: Random) -> Case:
    keys = ("world", "gpus", "dp", "tp", "pp", "cp", "ep", "depth", "servers", "virtual_stages", "microbatches",
        "global_batch", "local_batch", "micro_batch", "model.heads", "model.layers", "model.hidden",
            "model.kv_heads", "model.seq", "model.vocab", "strategy.data.shard", "strategy.expert.group_size",
            "cluster.nodes", "cluster.gpus_per_node", "strategy.data.group_size", "min_world")  # fmt: skip
    chosen = random.sample(keys, random.choice((2, 3, 4, 6)))
    values = (1, 2, 3, 5, 7, 8, 13, 64, 1000, 4097, 10**6, 2**20, 10**9)
    words = (*random.choice(VERBS[:6]), *random.choice(PRESETS), *(f"{key}={random.choice(values)}" for key in chosen))
    return Case("degrees", words)


def _recipe(random: Random) -> Case:
    names = (
        *RECIPES,
        "nosuch.yaml",
        "folder",
        "binary",
        "fifo",
        "loop",
        "locked",
        "/dev/zero",
        "/proc/self/mem",
        "./empty",
    )
    name = random.choice(names)
    head = random.choice((*VERBS[:7], ("recipes", "validate"), ("show",)))
    return Case(
        "recipe", (*head, name if head in (("recipes", "validate"), ("show",)) else f"recipe={name}"), is_file=True
    )


def _environ(random: Random) -> Case:
    chosen = random.sample(list(ENVIRON), random.choice((1, 1, 2, 3)))
    environ = {name: random.choice(ENVIRON[name]) for name in chosen}
    if "RANK" in environ and random.random() < 0.5:
        environ = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"} | environ
    words = random.choice(
        (
            ("plan",),
            ("run", "strategy=single"),
            ("plan", "cluster=mine"),
            ("ls", "recipes"),
            ("strategy=ps", "dp=2"),
            ("compile=true", "strategy=single"),
            ("device=cuda",),
            ("show", "quickstart"),
        )
    )
    return Case("environment", words, (), environ, is_file=True, may_torch=True)


def _tool(random: Random) -> Case:
    tool = random.choice(list(TOOLS))
    return Case("tool", (tool, *shlex.split(random.choice(TOOLS[tool]))), is_file=True, may_torch=True)


def _flag(random: Random) -> Case:
    words = shlex.split(random.choice(MAIN_FLAGS))
    return Case("flag", (*random.choice(((), ("plan",), ("run",), ("bench",))), *words), is_file=True, may_torch=True)


def _files(random: Random) -> Case:
    key = random.choice(
        (
            "runs",
            "resume",
            "init.weights",
            "path",
            "tokenizer",
            "dataset.cache",
            "model.source",
            "model.from_hf",
            "plot",
            "sweep.directory",
            "sweep.resume",
        )
    )
    path = random.choice(
        (
            *PATHS,
            "badrun",
            "badruns",
            "badhf",
            "badckpt",
            "badckpt/checkpoints/step-000001",
            "/proc/x",
            "/sys/x",
            "badhf/config.json",
            "badhf/model.safetensors",
        )
    )
    more = {
        "path": ("dataset=" + random.choice(("text", "megatron", "imagefolder", "cifar10", "mnist", "digits")),),
        "tokenizer": ("dataset=text", "path=text.txt"),
        "plot": ("plan",),
        "model.source": ("model=module",),
    }.get(key, ())
    return Case(
        "files",
        (
            *(("plan",) if key == "plot" else random.choice(((), ("plan",), ("verify",)))),
            *(word for word in more if word != "plan"),
            "strategy=single",
            f"{key}={path}",
        ),
        (),
        is_file=True,
        may_torch=True,
    )


FAMILIES: Mapping[str, Callable[[Random], Case]] = {
    "one": _one_key, "many": _many, "typo": _typo, "degrees": _degrees, "recipe": _recipe, "environment": _environ,
    "tool": _tool, "flag": _flag, "files": _files,
}  # fmt: skip


def draw(seed: int, family: str = "") -> Case:
    """Return the case of a seed, of a family if one is named."""
    random = Random(seed)
    return FAMILIES[family or random.choice(list(FAMILIES))](random)
