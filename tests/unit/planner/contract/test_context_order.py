"""Orders of tokens over the cp ranks, against lists of all positions and pairs."""

from itertools import chain

import pytest

from parallelrun.planner.contract.context_order import (
    ORDERS,
    Span,
    document_work,
    imbalance,
    imbalance_of,
    num_pairs,
    packed_imbalance,
    part,
)


def positions(spans):
    return [span.start + i * span.step for span in spans for i in range(span.length)]


def test_positions_are_those_of_the_papers():
    of_rank_1 = {name: positions(order.spans(2, 1, 8)) for name, order in ORDERS.items()}
    assert of_rank_1 == {"contiguous": [4, 5, 6, 7], "zigzag": [2, 3, 4, 5], "striped": [1, 3, 5, 7]}
    assert positions(ORDERS["zigzag"].spans(2, 0, 8)) == [0, 1, 6, 7]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_position_has_one_rank(order, size):
    held = [positions(ORDERS[order].spans(size, index, 60)) for index in range(size)]
    assert sorted(chain(*held)) == list(range(60))
    assert all(one == sorted(one) and len(one) == 60 // size for one in held)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_parts_of_a_rank_are_consecutive_pieces_of_what_it_holds(order, num):
    spans = ORDERS[order].spans(2, 1, 48)
    parts = [positions(part(spans, num, index)) for index in range(num)]
    assert list(chain(*parts)) == positions(spans)
    assert set(map(len, parts)) == {24 // num}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_work_and_imbalance_equal_a_count_of_all_pairs(order, size):
    seq, spans = 48, [ORDERS[order].spans(size, index, 48) for index in range(size)]
    work = [[sum(q >= k for q in positions(a) for k in positions(b)) for b in spans] for a in spans]
    assert [[num_pairs(a, b) for b in spans] for a in spans] == work
    mean = sum(map(sum, work)) / size
    steps = sum(max(work[rank][(rank - step) % size] for rank in range(size)) for step in range(size))
    assert imbalance(order, size, seq).ranks == pytest.approx(max(map(sum, work)) / mean)
    assert imbalance(order, size, seq).steps == pytest.approx(steps / mean)


def test_work_of_spans_of_any_length():
    for query in (Span(0, 1, 3), Span(2, 1, 5), Span(9, 1, 1)):
        for key in (Span(0, 1, 4), Span(3, 1, 3), Span(8, 1, 2)):
            expected = sum(q >= k for q in positions([query]) for k in positions([key]))
            assert num_pairs([query], [key]) == expected


def test_zigzag_is_even_and_contiguous_nearly_twice_the_mean():
    assert imbalance("zigzag", 8, 2**15).ranks == 1
    assert imbalance("zigzag", 8, 2**15).steps == pytest.approx(1, abs=1e-3)
    assert imbalance("contiguous", 8, 2**15).ranks == pytest.approx(15 / 8, rel=1e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
def test_work_inside_documents_equals_a_count_of_all_pairs(order, causal):
    samples, size = ((7, 1, 20, 3), (48,), (2, 40)), 4
    spans = [ORDERS[order].spans(size, index, 48) for index in range(size)]
    document_of = [[*chain(*([i] * n for i, n in enumerate(each)))] for each in samples]
    seen = [
        [
            sum(
                max(q, k) < len(of) and of[q] == of[k] and (k <= q or not causal)
                for of in document_of
                for q in positions(spans[rank])
                for k in positions(spans[(rank - step) % size])
            )
            for step in range(size)
        ]
        for rank in range(size)
    ]
    assert document_work(spans, samples, causal) == seen
    found, mean = packed_imbalance(order, size, 48, causal, samples, 3), sum(map(sum, seen)) / size
    assert found.ranks == pytest.approx(max(map(sum, seen)) / mean)
    assert found.steps == pytest.approx(sum(max(rank[step] for rank in seen) for step in range(size)) / mean)


def test_of_several_calls_each_waits_for_its_slowest_rank():
    assert imbalance_of([[[1, 0], [3, 0]], [[3, 0], [1, 0]]]).ranks == 1.5
    assert imbalance_of([]) == (1.0, 1.0)


def test_stripes_are_even_inside_every_document_and_chunks_of_the_sample_are_not():
    samples = ((3000, 1000, 96), (1500, 1500, 500, 500))
    found = {order: packed_imbalance(order, 4, 4096, True, samples, 1) for order in ORDERS}
    assert found["striped"].steps < 1.01 < 1.15 < found["zigzag"].ranks < found["contiguous"].ranks
