"""The precision of a run for which none was chosen: bf16 on GPUs that are fastest in it, else fp32."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.cli import argv
from parallelrun.config import compose
from parallelrun.planner.resolve.freeze import filled, freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve

RUN = ("model=gpt", "strategy=ddp", "dp=2")


def composed(*words: str, verb: str = "run") -> compose.Composed:
    return compose.compose_once(compose.prepare(argv.read([verb, *words]).overrides, (), verb, False))[0]


@pytest.mark.parametrize(
    ("verb", "words", "gpus", "precision"),
    [
        ("run", (), 0, "fp32"),
        ("run", ("cluster=h100_dgx",), 0, "fp32"),  # the ranks run on this host's CPU
        ("run", (), 2, "bf16"),
        ("run", ("device=cuda",), 0, "bf16"),
        ("run", ("device=cpu",), 2, "fp32"),
        ("run", ("device=cuda", "precision=fp32"), 0, "fp32"),
        ("run", ("device=cuda", "cluster=v100_32gb"), 0, "fp32"),  # as fast in fp32
        ("run", ("device=cuda", "cluster.peak_tflops=312"), 0, "bf16"),
        ("verify", ("device=cuda",), 0, "fp32"),  # verify.precision says what is compared
        ("plan", ("cluster=h100_dgx",), 0, "bf16"),
        ("plan", ("cluster=h100_dgx", "precision=fp16"), 0, "fp16"),
        ("plan", ("cluster=laptop",), 0, "fp32"),
        ("plan", (), 0, "fp32"),
    ],
)
def test_the_default_is_bf16_where_gpus_are_fastest_in_it(
    verb: str, words: tuple[str, ...], gpus: int, precision: str
) -> None:
    found = composed(*RUN, *words, verb=verb)
    plan = resolve(found.config, given=found.given, gpus=gpus)
    chosen = any(word.startswith("precision=") for word in words)
    assert plan.precision.name == precision and plan.precision.stored == "float32"
    assert any(text.startswith("precision=bf16 (filled: ") for text in plan.filled) == (
        precision == "bf16" and not chosen
    )


@pytest.mark.parametrize("chosen", ["auto", "fp32", "bf16"])
def test_ranks_compute_in_the_precision_that_was_resolved_wherever_they_run(chosen: str) -> None:
    found: Any = composed(*RUN, "device=cuda", f"precision={chosen}")
    plan = resolve(found.config, given=found.given, gpus=0)
    frozen = load_frozen(freeze(found.config, plan))
    assert frozen.precision.name == filled(found.config, plan).precision.name == plan.precision.name
    assert resolve(frozen, gpus=0).precision == resolve(frozen, gpus=8).precision == plan.precision
