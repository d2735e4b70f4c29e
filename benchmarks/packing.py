"""Packed documents against a document a sample with padding: training steps of one rank, paired.

    python -m benchmarks.packing                        # sequences 4,096, 8,192 and 16,384, 30 pairs each
    python -m benchmarks.packing --size 4096 --pairs 10

Both sides train the same model on as many samples of the same length. Lengths of documents are drawn even on a
logarithmic scale from 64 tokens to the sequence. Padded, a sample is one document and padding, under attention over the
whole sample, as a loop without documents computes it; packed, it is what `dataset.pack` makes of the same documents.
ratio: the time of a step, packed over padded. of_valid: how many times more valid tokens a second are trained packed,
over how many times more there are in a sample; the bar is 0.9 of it, so the ratio of the times may be 1 / 0.9.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.pairs import compare, on_ranks, read_arguments, time_pairs
from parallelrun.base.registry import load
from parallelrun.data.packing import pack
from parallelrun.distributed.mesh import build_mesh
from parallelrun.models import initialise
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.network import Network
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter, held_parameters
from parallelrun.planner.model.definitions import IGNORED
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config

BAR = 1 / 0.9  # of the time of a step
SIZES = ("4096", "8192", "16384")
SHORTEST, NUM_DOCUMENTS, NUM_SAMPLES = 64, 4096, 8
MODEL = {
    "model.layers": 1, "model.hidden": 32, "model.heads": 2, "model.vocab": 128, "dataset.vocab": 128,
    "model.position": "rope", "dataset.pack": True, "global_batch": 1, "dataset.samples": 8,
}  # fmt: skip


def lengths_of(seq: int) -> np.ndarray:
    """The inputs of documents."""
    drawn = np.random.default_rng(seq).uniform(np.log(SHORTEST), np.log(seq + 1), NUM_DOCUMENTS)
    return np.minimum(np.exp(drawn).astype(np.int64), seq)


def samples_of(lengths: np.ndarray, seq: int, packed: bool) -> list[tuple[int, ...]]:
    """The documents of some samples, whose share of valid tokens is near the mean of all."""
    if not packed:
        return [(int(one),) for one in lengths[:NUM_SAMPLES]]
    packs = pack(lengths, seq, 0, 0)
    chosen = np.random.default_rng(1).integers(len(packs), size=NUM_SAMPLES)
    return [tuple(packs.lengths[packs.pieces(int(index))].tolist()) for index in chosen]


def stepper(seq: int, samples: list[tuple[int, ...]], packed: bool) -> Callable[[], float]:
    """A full step of one sample: forward, backward and update. Padded samples are attended to whole."""
    config = tiny_config({**MODEL, "model.seq": seq})
    plan = resolve(config)
    with torch.device("meta"):
        network: Network = load("models", config.model.name, "network").build(config, plan.spec, plan.precision)
    initialise.materialise([network], plan, build_mesh(plan, torch.device("cpu")), 3)
    held = [(one, network.get_parameter(one.name)) for one in held_parameters(plan, 0)]
    parameters = [LocalParameter(one.name, p, one.spec, one.layout, one.shared) for one, p in held]
    optimizer, numbers = Optimizer(config.optimizer, parameters), np.random.default_rng(2)
    batches = [_batch(numbers, seq, one, packed) for one in samples]
    state = {"step": 0}

    def step() -> float:
        tokens, targets, bounds = batches[state["step"] % len(batches)]
        state["step"] += 1
        network.zero_grad()
        loss = network.loss(network(tokens, documents=bounds), targets) / (targets >= 0).sum()
        loss.backward()
        optimizer.step(1e-3)
        return loss.item()

    return step


def _batch(
    numbers: np.random.Generator, seq: int, lengths: tuple[int, ...], packed: bool
) -> tuple[Tensor, Tensor, DocumentBounds | None]:
    drawn = torch.from_numpy(numbers.integers(128, size=(2, 1, seq)))
    drawn[1, :, sum(lengths) :] = IGNORED
    return drawn[0], drawn[1], DocumentBounds.of([lengths], seq) if packed else None


def _measure_rank(seq: int, pairs: int, warmup: int) -> dict[str, Any]:
    lengths = lengths_of(seq)
    packed, padded = (samples_of(lengths, seq, one) for one in (True, False))
    times = time_pairs(stepper(seq, packed, True), stepper(seq, padded, False), pairs, warmup)
    squares = [sum(one**2 for one in each) / seq**2 for each in packed]
    return {
        "times": times,
        "valid_packed": pack(lengths, seq, 0, 0).packing().tokens / seq,
        "valid_padded": float(lengths.mean()) / seq,
        "attention_packed": statistics.mean(squares),
    }


def main() -> None:
    arguments = read_arguments(__doc__, "packing", ("pairs",), sizes=SIZES)
    results = (
        ({"case": f"sequence {seq:,}", **on_ranks(1, _measure_rank, seq, arguments.pairs, arguments.warmup)}, BAR)
        for seq in map(int, arguments.size.split(","))
    )
    compare(arguments.name, results, _valid_tokens)


def _valid_tokens(row: dict[str, Any]) -> str:
    row["speedup"] = row["valid_packed"] / row["valid_padded"] / row["ratio"]
    shares = f"{row['valid_packed']:.1%} of the tokens are valid, padded {row['valid_padded']:.1%}"
    return f"{shares}; valid tokens/s {row['speedup']:.2f}x"


if __name__ == "__main__":
    main()
