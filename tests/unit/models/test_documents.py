"""Packed documents in a network: the loss and every gradient of the same documents apart, fused or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError
from parallelrun.launch.host import preflight
from parallelrun.models import documents as packed
from parallelrun.models import dropout, functions, initialise
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.models.network import Network, compile_blocks
from parallelrun.planner.model.definitions import IGNORED
from tests.plans import tiny_config, tiny_plan

SEQ, VOCAB = 24, 32
LENGTHS = [(5, 5, 1, 9), (24,), (1, 1, 2, 20), (3,)]  # equal ones, one token, a whole sample, much padding


def network(**changes: Any) -> Network:
    settings = {"model.seq": SEQ, "model.layers": 2, "precision.name": "fp64", "dataset.pack": True, **changes}
    config, plan = tiny_config(settings), tiny_plan(settings)
    with torch.device("meta"):
        built: Network = registry.load("models", config.model.name, "network").build(config, plan.spec, plan.precision)
    from parallelrun.distributed.mesh import build_mesh

    initialise.materialise([built], plan, build_mesh(plan, torch.device("cpu")), 3)
    return built


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of `LENGTHS`, with arbitrary tokens in the padding."""
    generator = np.random.default_rng(5)
    tokens = torch.from_numpy(generator.integers(VOCAB, size=(len(LENGTHS), SEQ)))
    targets = torch.from_numpy(generator.integers(VOCAB, size=(len(LENGTHS), SEQ)))
    for row, lengths in zip(targets, LENGTHS):
        row[sum(lengths) :] = IGNORED
    return tokens, targets


def apart(built: Network) -> tuple[float, dict[str, Tensor]]:
    """The summed loss of every document by itself, and the gradients."""
    tokens, targets = batch()
    built.zero_grad()
    total = 0.0
    for sample, lengths in enumerate(LENGTHS):
        for start, length in zip(np.cumsum([0, *lengths]).tolist(), lengths):
            own = slice(start, start + length)
            loss = built.loss(built(tokens[sample : sample + 1, own]), targets[sample : sample + 1, own])
            loss.backward()
            total += loss.item()
    return total, gradients(built)


def together(built: Network) -> tuple[float, dict[str, Tensor]]:
    tokens, targets = batch()
    built.zero_grad()
    loss = built.loss(built(tokens, documents=DocumentBounds.of(LENGTHS, SEQ)), targets)
    loss.backward()
    return loss.item(), gradients(built)


def gradients(built: Network) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in built.named_parameters() if one.grad is not None}


def errors(built: Network) -> tuple[float, float]:
    """The relative errors of the loss and of the worst gradient."""
    loss, expected = apart(built)
    found_loss, found = together(built)
    assert found.keys() == expected.keys()
    largest = max(float(one.abs().max()) for one in expected.values())
    worst = max(
        float((found[name] - one).abs().max()) / max(float(one.abs().max()), 1e-3 * largest)
        for name, one in expected.items()
    )
    return abs(found_loss - loss) / loss, worst


CASES: dict[str, dict[str, Any]] = {
    "rotary": {"model.position": "rope"},
    "learned": {"model.position": "learned"},
    "grouped": {"model.position": "rope", "model.kv_heads": 2},
    "window": {"model.position": "rope", "model.kv_heads": 2, "model.window": 3},
    "bert": {"model.name": "bert", "model.preset": "bert", "dataset.vocab": 31},
}


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_train_as_documents_apart(case: str) -> None:
    assert max(errors(network(**CASES[case]))) < 1e-12


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_with_recomputation(mode: str) -> None:
    built = network()
    built.recompute = mode
    assert max(errors(built)) < 1e-12


def test_without_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(
        query: Tensor, key: Tensor, value: Tensor, documents: DocumentBounds, causal: bool, window: int | None
    ) -> Tensor:
        return packed.attend_each(
            query, key, value, documents, lambda q, k, v, sample, start: functions.attend(q, k, v, causal)
        )

    monkeypatch.setattr(packed, "attend", each)
    assert max(errors(network())) < 1e-12


@pytest.mark.slow
def test_compiled_blocks_are_compiled_once_for_all_documents() -> None:
    try:
        preflight.refuse_packed_compile(torch.__version__)
    except ConfigError as refused:
        pytest.skip(str(refused))
    from torch._dynamo.testing import CompileCounter

    built, counter = network(), CompileCounter()
    expected = together(built)[1]
    compile_blocks(built, backend=counter)
    found = together(built)[1]
    frames = counter.frame_count
    tokens, _ = batch()
    built(tokens, documents=DocumentBounds.of([(2,) * 12, (24,), (7, 8), (1,) * 24], SEQ))
    assert frames > 0 and counter.frame_count == frames
    assert all(torch.allclose(found[name], one, rtol=1e-12, atol=1e-14) for name, one in expected.items())


def test_dropped_probabilities_are_those_of_the_whole_sample() -> None:
    product = AttentionProduct(0.3, 1, "site", torch.float64)
    query, key, value = torch.randn(3, 2, 4, SEQ, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with dropout.scope(torch.tensor([7, 9])):
        with packed.scope(DocumentBounds.of([(SEQ,), (10, 14)], SEQ)):
            found = product(query, key, value)
        whole = product(query, key, value)
    assert torch.equal(found[0], whole[0])
    # Not bit by bit: a product of other sizes may be summed in another order.
    torch.testing.assert_close(found[1, :, :10], whole[1, :, :10], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(found[1, :, 10:], whole[1, :, 10:])


def leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.attend

    def wrong(
        query: Tensor, key: Tensor, value: Tensor, documents: DocumentBounds, causal: bool, window: int | None
    ) -> Tensor:
        joined = [(sum(each[:2]), *each[2:]) for each in documents.lengths]
        return right(query, key, value, DocumentBounds(joined, documents.positions), causal)

    monkeypatch.setattr(packed, "attend", wrong)


def runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DocumentBounds.of.__func__  # type: ignore[attr-defined]

    def wrong(cls: type[DocumentBounds], lengths: Any, seq: int) -> DocumentBounds:
        found: DocumentBounds = right(cls, lengths, seq)
        return DocumentBounds(found.lengths, torch.arange(seq).expand(len(lengths), seq))

    monkeypatch.setattr(DocumentBounds, "of", classmethod(wrong))


@pytest.mark.parametrize("bug", [leaks, runs_on])
@pytest.mark.parametrize("case", ["rotary", "learned"])
def test_a_planted_bug_is_seen(bug: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    built = network(**CASES[case])
    if bug is runs_on and case == "rotary":  # differences of rotary positions are the same from any start
        assert max(errors(built)) < 1e-12
        return
    assert max(errors(built)) > 1e-3


def test_no_tensor_has_seq_times_seq_elements() -> None:
    query = torch.randn(1, 1, 512, 4, requires_grad=True)
    documents, sizes = DocumentBounds.of([(300, 100, 112)], 512), []

    def note(saved: Tensor) -> Tensor:
        sizes.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        packed.attend(query, query, query, documents, True).sum().backward()
    assert max(sizes) == query.numel()
