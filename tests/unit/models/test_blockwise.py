"""Attention block by block equals attention over all keys: output and gradients, whatever blocks the tokens come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from parallelrun.distributed import torch_private
from parallelrun.models import documents, dropout, functions
from parallelrun.models.blockwise import blocks
from parallelrun.models.blockwise.blocks import DroppedPart, Merged, attend_to_block, block_gradients
from parallelrun.models.blockwise.tiles import document_tiles, tiles
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.functions import attend, attend_with_dropout
from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.planner.contract.context_order import ORDERS, Span

SEQ, RANKS = 24, 3


def spans_of(order, rank):
    return ORDERS[order].spans(RANKS, rank, SEQ)


def positions(spans):
    return [span.start + span.step * index for span in spans for index in range(span.length)]


def drawn(heads, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return torch.randn(2, SEQ, heads, 8, dtype=dtype).transpose(1, 2)


def by_blocks(query, key, value, grad, order, causal, dropped=None, window=None):
    """(output, gradients of query, key, value), put together from what every rank computes."""
    own = [positions(spans_of(order, rank)) for rank in range(RANKS)]
    output, gradients = torch.zeros_like(query), [torch.zeros_like(one) for one in (query, key, value)]
    for rank in range(RANKS):
        parts, merged = [], None if window is None else Merged.nothing(query[:, :, own[rank]])
        for source in [rank, *(other for other in range(RANKS) if other != rank)]:
            keys, values = key[:, :, own[source]], value[:, :, own[source]]
            part = dropped and dropped(own[rank], own[source])
            for tile in tiles(spans_of(order, rank), spans_of(order, source), causal, window):
                out, lse = attend_to_block(query[:, :, own[rank]], keys, values, tile, part)
                first, merged = merged is None, merged or Merged(out, lse)
                if not first:
                    merged.add(out, lse, tile.query)
                parts.append((source, keys, values, tile, part))
        mine = merged.out.to(query.dtype)
        output[:, :, own[rank]] = mine
        for source, keys, values, tile, part in parts:
            whole = grad[:, :, own[rank]], query[:, :, own[rank]], keys, values, mine, merged.lse
            of_query, of_key, of_value = block_gradients(*whole, tile, part)
            gradients[0][:, :, own[rank][tile.query]] += of_query
            gradients[1][:, :, own[source][tile.key]] += of_key
            gradients[2][:, :, own[source][tile.key]] += of_value
    return [output, *gradients]


def reference(query, key, value, grad, attention):
    leaves = [one.detach().clone().requires_grad_() for one in (query, key, value)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def largest(ours, expected):
    return max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_give_what_all_keys_give(order, causal, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(torch_private, "has_fused_attention", lambda query, key: False)
        monkeypatch.setattr(blocks, "ROWS", 3)  # does not divide a tile
    tensors = drawn(4), drawn(2, seed=1), drawn(2, seed=2), drawn(4, seed=3)
    expected = reference(*tensors, lambda *leaves: attend(*leaves, causal=causal))
    assert largest(by_blocks(*tensors, order, causal), expected) < 1e-12


@pytest.mark.parametrize("window", [1, 2, 5, 9, SEQ - 1, SEQ])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_of_a_window_give_what_all_keys_give(order, window, monkeypatch):
    monkeypatch.setattr(blocks, "ROWS", 3)  # does not divide a tile
    tensors = drawn(4), drawn(2, seed=1), drawn(2, seed=2), drawn(4, seed=3)
    distance = torch.arange(SEQ).unsqueeze(1) - torch.arange(SEQ)
    seen = (distance >= 0) & (distance < window)

    def masked(query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)

    expected = reference(*tensors, masked)
    assert largest(by_blocks(*tensors, order, True, window=window), expected) < 1e-12
    monkeypatch.setattr(functions, "WINDOW_PART", 4)
    assert largest(reference(*tensors, lambda *leaves: attend(*leaves, window=window)), expected) < 1e-12


@pytest.mark.parametrize("window", range(1, SEQ + 1))
@pytest.mark.parametrize("order", ORDERS)
def test_tiles_of_a_window_are_its_pairs_and_each_query_of_one_sees_a_key(order, window):
    found, work = np.zeros((SEQ, SEQ), dtype=int), 0
    for mine in (spans_of(order, rank) for rank in range(RANKS)):
        for theirs in (spans_of(order, source) for source in range(RANKS)):
            for tile in tiles(mine, theirs, True, window):
                rows, columns = positions(mine)[tile.query], positions(theirs)[tile.key]
                seen = np.ones((len(rows), len(columns)), dtype=int)
                seen = np.tril(seen) if tile.causal else seen
                seen -= 0 if tile.oldest is None else np.tril(seen, tile.oldest)
                assert seen.any(1).all()
                found[np.ix_(rows, columns)] += seen
                work += tile.work
    wanted = np.tril(np.ones((SEQ, SEQ), dtype=int)) - np.tril(np.ones((SEQ, SEQ), dtype=int), -window)
    assert np.array_equal(found, wanted) and work == wanted.sum()


@pytest.mark.parametrize("order", ORDERS)
def test_dropped_probabilities_count_in_the_sum(order):
    """One device drops after the softmax: the log-sum-exp is that of all probabilities."""
    torch.manual_seed(4)
    keep, rate = torch.rand(2, 4, SEQ, SEQ) > 0.3, 0.3

    def dropped(queries, keys):
        return DroppedPart(lambda _, rows, columns: keep[:, :, queries[rows]][..., keys[columns]], rate)

    tensors = drawn(4), drawn(2, seed=1), drawn(2, seed=2), drawn(4, seed=3)
    expected = reference(*tensors, lambda *leaves: attend_with_dropout(*leaves, keep, rate))
    assert largest(by_blocks(*tensors, order, True, dropped), expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_fp32(dtype):
    """Merging a block with itself changes nothing; in half precision, the errors of many merges would add up."""
    query, key, value, _ = (drawn(4, dtype, seed) for seed in range(4))
    (tile,) = tiles((Span(0, 1, SEQ),), (Span(0, 1, SEQ),), False)
    out, lse = attend_to_block(query, key, value, tile)
    merged = Merged(out, lse.clone())
    for _ in range(50):
        merged.add(out * torch.tensor(1.001, dtype=dtype), lse, tile.query)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    assert float((merged.out - out).abs().max()) < 0.01 * float(out.abs().max())


def test_zigzag_and_stripes_balance_the_work():
    def works(order):
        spans = [spans_of(order, rank) for rank in range(RANKS)]
        return [sum(tile.work for keys in spans for tile in tiles(queries, keys, True)) for queries in spans]

    assert max(works("zigzag")) == min(works("zigzag"))
    assert max(works("striped")) - min(works("striped")) == SEQ // RANKS * (RANKS - 1)
    assert max(works("contiguous")) > 4 * min(works("contiguous"))


def test_a_stripe_of_one_token_sees_nothing_later():
    assert tiles((Span(0, 3, 1),), (Span(2, 3, 1),), True) == ()


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_of_documents_are_the_pairs_inside_documents(order: str, causal: bool) -> None:
    for lengths in ((SEQ,), (1, 2, 5, 1, 7), (SEQ // 2, SEQ // 2), (3,) * 5, ()):
        document = np.repeat(np.arange(len(lengths)), lengths)
        document = np.concatenate([document, -np.arange(1, SEQ - document.size + 1)])  # padding sees nothing
        wanted = (document[:, None] == document[None, :]) & (document >= 0)
        wanted = np.tril(wanted) if causal else wanted
        found = np.zeros((SEQ, SEQ), dtype=int)
        for rank in range(RANKS):
            for source in range(RANKS):
                mine, theirs = spans_of(order, rank), spans_of(order, source)
                for tile in document_tiles(mine, theirs, causal, lengths, 3):
                    assert tile.samples == slice(3, 4)
                    rows, columns = positions(mine)[tile.query], positions(theirs)[tile.key]
                    assert not tile.causal or len(rows) == len(columns)
                    seen = np.ones((len(rows), len(columns)), dtype=int)
                    found[np.ix_(rows, columns)] += np.tril(seen) if tile.causal else seen
        assert np.array_equal(found, wanted), (lengths, found - wanted)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed, dropped"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_and_soft_caps(window, softcap, packed, monkeypatch):
    """The cap comes before the mask; the sink joins the softmax once, as a key of value 0, and drops with others."""
    monkeypatch.setattr(blocks, "ROWS", 7)  # several parts of the queries, which see other keys
    rate, ids = 0.3 if packed else 0.0, torch.tensor([7, 9])
    product = AttentionProduct(rate, 0, "product", torch.float64, True, window, softcap, num_sinks=4).double()
    with torch.no_grad():
        product.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
    query, key, value, grad = drawn(4), drawn(2, seed=1), drawn(2, seed=2), drawn(4, seed=3)
    places = torch.arange(SEQ)
    distance = places.unsqueeze(1) - places
    unseen = (distance < 0) | (distance >= (window or SEQ))
    bounds = DocumentBounds.of([(9, 15), (4, 18)], SEQ) if packed else None
    if bounds:
        starts = (places - bounds.positions).unsqueeze(1)
        others = (starts.unsqueeze(-1) != starts.unsqueeze(-2)) | ~bounds.is_token[:, None, :, None]
        unseen = unseen | others
    keep = dropout.keep_mask(product.key, ids, torch.arange(4 * SEQ), places, rate).view(2, 4, SEQ, SEQ)

    def written_out(query, key, value):
        scores = query @ key.repeat_interleave(2, 1).transpose(-2, -1) * 8**-0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        sinks = product.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        joined = torch.cat((scores.masked_fill(unseen, float("-inf")), sinks), -1)
        return (joined.softmax(-1)[..., :-1] * keep / (1 - rate)) @ value.repeat_interleave(2, 1)

    found, of_sinks = [], []
    with dropout.scope(ids), documents.scope(bounds):
        for attention in (product, written_out):
            found.append(reference(query, key, value, grad, attention))
            product.sinks.grad = None
            attention(query, key, value).backward(grad)
            of_sinks.append(product.sinks.grad)
    assert largest(*found) < 1e-12 and largest(of_sinks[:1], of_sinks[1:]) < 1e-12
    if packed:
        return
    with torch.no_grad():
        last = product.of_last(query[:, :, -1:], key, value)
        assert largest([last], [written_out(query, key, value)[:, :, -1:]]) < 1e-12
