"""What a refusal of a degree, grid, depth, split or list suggests is typed as it stands, and then accepted."""

from __future__ import annotations

import re
from random import Random

import pytest

from parallelrun.base.errors import ConfigError, Problem
from tests.matrix import examples
from tests.unit.config.test_presets import plan

KEYS = {
    "tp2d": ("tp", "grid"), "tp25d": ("tp", "depth", "grid"), "tp3d": ("tp",), "gpipe": ("pp", "microbatches"),
    "interleaved": ("pp", "virtual_stages"), "hsdp": ("dp", "strategy.data.shard"), "ptdp": ("tp", "pp", "dp"),
    "horovod": ("dp", "strategy.data.worker_batches"), "gshard": ("dp", "ep"),
    "1f1b": ("pp", "strategy.pipeline.split"), "zero_bubble": ("pp", "micro_batch"),
}  # fmt: skip
BLOCKS = ("embedding", "layers.1", "layers.2", "layers.4", "layers.6", "layers.9", "head")


def value(key: str, random: Random) -> str:
    if key == "grid":
        return f"{random.randint(1, 5)}x{random.randint(1, 5)}"
    if key.endswith(("split", "worker_batches")):
        items = BLOCKS if key.endswith("split") else [*map(str, range(10))]
        return f"[{','.join(random.sample(items, random.randint(1, 4)))}]"
    return str(random.randint(1, 16))


def problems(words: list[str]) -> tuple[Problem, ...]:
    try:
        plan(*words)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("strategy", KEYS)
def test_what_is_suggested_is_typed_and_helps(strategy):
    random, num_refused = Random(strategy), 0
    for _ in range(examples(6)):
        words = [f"model={'moe_gpt' if strategy == 'gshard' else 'gpt'}", f"strategy={strategy}"]
        words += [f"{key}={value(key, random)}" for key in KEYS[strategy] if random.random() < 0.9]
        for problem in problems(words):
            num_refused += 1
            assert problem.suggestion, (words, problem)
            for text in problem.suggestion.split(" or "):
                if text.startswith("leave "):
                    assert problem.kind == "unread"
                    continue
                assert re.fullmatch(r"([\w.]+=\S+)( [\w.]+=\S+)*", text), (words, problem)
                keys = {word.partition("=")[0] for word in text.split()}
                again = problems([*(word for word in words if word.partition("=")[0] not in keys), *text.split()])
                assert all(one.what != problem.what for one in again), (words, problem)
    assert num_refused
