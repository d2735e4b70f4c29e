"""Dropout by hash: fair coins, the same for the same element whoever holds it, fresh for every sample and site."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.models import dropout
from parallelrun.models.masked_layers import AttentionProduct, HashDropout

RATE = 0.1
F64 = torch.float64


def whole_mask(
    num_samples: int = 8, rows: int = 64, columns: int = 128, key: int = 5, rate: float = RATE
) -> torch.Tensor:
    return dropout.keep_mask(key, torch.arange(num_samples), torch.arange(rows), torch.arange(columns), rate)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten().double(), b.flatten().double())))[0, 1].item()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_elements_are_kept_at_the_rate_asked_for(rate: float) -> None:
    mask = whole_mask(16, 256, 256, rate=rate).double()
    deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert mask.mean().item() == pytest.approx(1 - rate, abs=5 * deviation)
    for dims in (
        (1, 2),
        (0, 2),
        (0, 1),
    ):  # no sample, row or column is favoured: means spread as those of fair coins do
        means = mask.mean(dims)
        assert means.std().item() == pytest.approx((rate * (1 - rate) * means.numel() / mask.numel()) ** 0.5, rel=0.6)


def test_neighbours_samples_sites_and_seeds_are_independent() -> None:
    mask = whole_mask(16, 128, 256)
    bound = 5 / (mask.numel() // 2) ** 0.5
    others = [dropout.site_key(1, "layers.0"), dropout.site_key(1, "layers.1"), dropout.site_key(2, "layers.0")]
    pairs = [
        (mask[:, :, 1:], mask[:, :, :-1]),
        (mask[:, 1:], mask[:, :-1]),
        (mask[1:], mask[:-1]),
        *((mask, whole_mask(16, 128, 256, key=key)) for key in others),
    ]
    for a, b in pairs:
        assert abs(correlation(a, b)) < bound


def hashed(key: int, sample: int, row: int, column: int) -> int:
    """The same 32 bits in Python's whole numbers: no overflow, no sign, no vector unit to get wrong."""

    def mix(bits: int) -> int:
        bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) % 2**64
        return bits ^ bits >> 31

    row_key = mix((mix((sample + key) % 2**64) + row) % 2**64)
    bits = (row_key + column * 0x9E3779B1) % 2**32
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) % 2**32 ^ row_key >> 32
    bits = ((bits ^ bits >> 15) * 0x846CA68B) % 2**32
    return bits ^ bits >> 16


def kept(key: int, sample: int, row: int, column: int, rate: float) -> bool:
    bits = hashed(key, sample, row, column)
    return (bits - 2**32 if bits >= 2**31 else bits) >= round(rate * 2**32) - 2**31


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 2**30))
def test_masks_are_those_of_the_written_hash(key: int, sample: int, row: int, column: int) -> None:
    """Other devices, versions and later edits must derive these very masks: resumed runs depend on them."""
    where = torch.tensor([sample]), torch.tensor([row]), torch.arange(column, column + 8)
    expected = [kept(key, sample, row, column + i, 0.5) for i in range(8)]
    assert dropout.keep_mask(key, *where, 0.5).flatten().tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 2**30))
def test_uniform_numbers_are_the_first_bits_of_that_hash(key: int, sample: int, row: int, column: int) -> None:
    where = torch.tensor([sample]), torch.tensor([row])
    expected = [(hashed(key, sample, row, column + i) >> 8) / 2**24 for i in range(8)]
    assert dropout.uniform(key, *where, torch.arange(column, column + 8)).flatten().tolist() == expected
    assert dropout.uniform(key, *where, torch.arange(1)).tolist() == [[[(hashed(key, sample, row, 0) >> 8) / 2**24]]]


def test_site_keys_are_pinned() -> None:
    assert dropout.site_key(1234, "layers.3.mlp.dropout") == 1224264678990824792


def test_a_layer_on_a_slice_drops_what_the_whole_layer_drops_there() -> None:
    x, ids = torch.ones(3, 8, 16, dtype=F64), torch.tensor([7, 1, 40])
    layer = HashDropout(0.3, 11, "layers.0.mlp.dropout", 16, F64)
    with dropout.scope(ids):
        whole = layer(x)
        layer.sequence_offset, layer.hidden_offset = 4, 8
        assert torch.equal(layer(x[:, 4:, 8:]), whole[:, 4:, 8:])
    layer.sequence_offset = layer.hidden_offset = 0
    with dropout.scope(ids[1:]):
        assert torch.equal(layer(x[1:]), whole[1:])
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.7}


def test_explicit_attention_without_drops_is_the_fused_one_grouped_heads_too() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 8, 6, dtype=F64, generator=generator)
    key, value = torch.randn(2, 2, 2, 8, 6, dtype=F64, generator=generator)
    layer = AttentionProduct(1e-12, 11, "layers.0.attention", F64)  # active, but drops nothing
    with dropout.scope(torch.tensor([5, 6])):
        explicit = layer(query, key, value)
    torch.testing.assert_close(explicit, layer.eval()(query, key, value), rtol=1e-10, atol=1e-10)


def test_without_samples_in_scope_it_says_what_to_do() -> None:
    layer = HashDropout(0.3, 11, "embedding.dropout", 16, F64)
    with pytest.raises(ValueError, match=r"embedding\.dropout needs sample ids"):
        layer(torch.ones(1, 2, 16))
    assert torch.equal(layer.eval()(torch.ones(1, 2, 16)), torch.ones(1, 2, 16))
    with pytest.raises(ValueError, match="below 1"):
        HashDropout(1.0, 11, "embedding.dropout", 16, F64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_derives_the_same_mask() -> None:
    device = torch.device("cuda")
    arguments = (torch.arange(8), torch.arange(64), torch.arange(128))
    mask = dropout.keep_mask(5, *(tensor.to(device) for tensor in arguments), RATE)
    assert torch.equal(mask.cpu(), whole_mask())
