"""Closed forms of the data axis against algorithms that are run step by step, and against the reference's figures."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, log2

import pytest

from parallelrun.planner.predict import data_cost as cost
from parallelrun.planner.predict.data_cost import Exchange, Link
from parallelrun.strategies.data.common.allreduce.algorithm import Algorithm
from parallelrun.strategies.data.common.allreduce.rings import HierarchicalAllReduce, RingAllReduce
from parallelrun.strategies.data.common.allreduce.trees import HalvingDoubling, TreeAllReduce

SIZE = 840 * 8  # bytes: 840 numbers, divisible by every n up to 8
LINK = Link(bytes_per_s=1e6, latency_s=1e-3)
RANKS = range(2, 9)


class Network:
    """Nodes with full-duplex links. A round sends its messages at once; what a node sends or receives queues up."""

    def __init__(self, link: Link = LINK):
        self.link = link
        self.seconds = 0.0
        self.rounds = 0
        self.sent: Counter[object] = Counter()
        self.received: Counter[object] = Counter()

    def round(self, messages: list[tuple[object, object, float]], link: Link | None = None) -> None:
        """messages: (from, to, bytes)."""
        link = link or self.link
        out: Counter[object] = Counter()
        into: Counter[object] = Counter()
        for source, target, size in messages:
            out[source] += size
            into[target] += size
        self.sent += out
        self.received += into
        self.rounds += 1
        self.seconds += link.latency_s + max([*out.values(), *into.values()]) / link.bytes_per_s

    def busiest(self) -> float:
        return max([*self.sent.values(), *self.received.values()])


def vectors(n: int, length: int = SIZE // 8) -> list[list[int]]:
    return [[(rank + 1) * 1000 + index for index in range(length)] for rank in range(n)]


def total(held: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*held)]


def ring_in_rounds(held: list[list[int]], network: Network, nodes: list[object] | None = None) -> None:
    """Baidu's ring on real numbers, in place; segments as even as they can be."""
    n, length = len(held), len(held[0])
    nodes = nodes or list(range(n))
    bounds = [0]
    for index in range(n):
        bounds.append(bounds[-1] + length // n + (index < length % n))
    for phase in ("add", "copy"):
        for step in range(n - 1):
            moved = []
            for rank in range(n):
                segment = (rank - step + (phase == "copy")) % n
                start, stop = bounds[segment], bounds[segment + 1]
                moved.append((rank, (rank + 1) % n, start, held[rank][start:stop]))
            for _, target, start, numbers in moved:
                for index, number in enumerate(numbers, start):
                    held[target][index] = number + (held[target][index] if phase == "add" else 0)
            network.round([(nodes[a], nodes[b], 8 * len(numbers)) for a, b, _, numbers in moved])


@pytest.mark.parametrize("n", RANKS)
def test_a_ring_run_step_by_step_takes_what_the_form_says(n):
    held, network = vectors(n), Network()
    expected = total(held)
    ring_in_rounds(held, network)
    assert held == [expected] * n
    form = cost.ring(SIZE, n, LINK)
    assert (form.steps, form.worker_bytes) == (network.rounds, network.busiest())
    assert form.seconds == pytest.approx(network.seconds, rel=1e-12)


@pytest.mark.parametrize("n", [3, 5, 7])
def test_uneven_segments_cost_a_ring_no_more_than_one_number_a_step(n):
    held, network = vectors(n, 101), Network()
    ring_in_rounds(held, network)
    form = cost.ring(101 * 8, n, LINK)
    assert form.seconds <= network.seconds <= form.seconds + 2 * (n - 1) * 8 / LINK.bytes_per_s


def halving_doubling_in_rounds(held: list[list[int]], network: Network) -> None:
    """Recursive vector halving, distance doubling, and back; extra ranks fold into the first ones."""
    n, length = len(held), len(held[0])
    power = 2 ** int(log2(n))
    extra = range(power, n)
    if power < n:
        for rank in extra:
            held[rank - power] = [a + b for a, b in zip(held[rank - power], held[rank])]
        network.round([(rank, rank - power, 8 * length) for rank in extra])
    spans = [(0, length)] * power
    distances = [2**k for k in range(int(log2(power)))]
    history = []
    for distance in distances:
        messages, before = [], [list(v) for v in held]
        history.append(list(spans))
        for rank in range(power):
            partner, (start, stop) = rank ^ distance, spans[rank]
            middle = (start + stop) // 2
            kept = (start, middle) if rank < partner else (middle, stop)
            spans[rank] = kept
            for index in range(*kept):
                held[rank][index] = before[rank][index] + before[partner][index]
            messages.append((rank, partner, 8 * (stop - start - (kept[1] - kept[0]))))
        network.round(messages)
    for distance, whole in zip(reversed(distances), reversed(history)):
        messages, before = [], [list(v) for v in held]
        for rank in range(power):
            partner = rank ^ distance
            for index in range(*spans[partner]):
                held[rank][index] = before[partner][index]
            messages.append((partner, rank, 8 * (spans[partner][1] - spans[partner][0])))
        spans = whole
        network.round(messages)
    if power < n:
        for rank in extra:
            held[rank] = list(held[rank - power])
        network.round([(rank - power, rank, 8 * length) for rank in extra])


@pytest.mark.parametrize("n", RANKS)
def test_halving_and_doubling_with_any_number_of_ranks(n):
    held, network = vectors(n), Network()
    expected = total(held)
    halving_doubling_in_rounds(held, network)
    assert held == [expected] * n
    form = cost.halving_doubling(SIZE, n, LINK)
    assert form.steps == network.rounds and form.seconds == pytest.approx(network.seconds, rel=1e-12)
    assert form.worker_bytes == network.busiest()


def run_by_its_rounds(algorithm: Algorithm, n: int) -> Network:
    """The rounds that `strategy=ring` executes, all ranks at once."""
    network = Network()
    for rounds in zip(*(algorithm.rounds(n, rank, SIZE // 8) for rank in range(n)), strict=True):
        sends = [(rank, one.send.peer, 8 * one.send.numel) for rank, one in enumerate(rounds) if one.send]
        network.round(sends)
    return network


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(
    ("algorithm", "form"),
    [
        (RingAllReduce(), cost.ring),
        (HalvingDoubling(), cost.halving_doubling),
        (TreeAllReduce(), cost.binomial_tree),
    ],
    ids=["ring", "halving", "tree"],
)
def test_what_is_executed_takes_what_the_form_says(algorithm, form, n):
    network, expected = run_by_its_rounds(algorithm, n), form(SIZE, n, LINK)
    assert (network.rounds, network.busiest()) == (expected.steps, expected.busiest_bytes)
    assert network.seconds == pytest.approx(expected.seconds, rel=1e-12)


@pytest.mark.parametrize(("n", "group"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_hierarchical_as_it_is_executed(n, group):
    network = run_by_its_rounds(HierarchicalAllReduce(group), n)
    expected: Exchange = cost.hierarchical(SIZE, group, n // group, LINK, LINK)
    assert network.rounds == expected.steps and network.seconds == pytest.approx(expected.seconds, rel=1e-12)


@pytest.mark.parametrize(("group", "num_groups"), [(2, 2), (2, 3), (4, 2), (3, 2), (1, 4), (4, 1)])
def test_hierarchical_is_two_passes_inside_around_a_ring_across(group, num_groups):
    """Run: scatter inside, ring of what each rank holds across, gather inside; two kinds of links."""
    inside, across = Link(1e7, 1e-5), LINK
    n = group * num_groups
    held, network = vectors(n), Network(inside)
    expected = total(held)
    length = len(held[0])
    part = length // group
    for _ in range(group - 1):  # a reduce-scatter: after it rank `r` of a group has the sums of part r
        network.round([(r, r // group * group + (r + 1) % group, 8 * part) for r in range(n)])
    parts = []
    for g in range(num_groups):
        sums = total(held[g * group : (g + 1) * group])
        parts.append([sums[r * part : (r + 1) * part] for r in range(group)])
    rings = [Network(across) for _ in range(group)]
    for r in range(group):
        column = [parts[g][r] for g in range(num_groups)]
        if num_groups > 1:
            ring_in_rounds(column, rings[r])
        for g in range(num_groups):
            parts[g][r] = column[g]
    for _ in range(group - 1):
        network.round([(r, r // group * group + (r + 1) % group, 8 * part) for r in range(n)])
    assert all([number for p in parts[g] for number in p] == expected for g in range(num_groups))
    form = cost.hierarchical(SIZE, group, num_groups, inside, across)
    assert form.steps == network.rounds + rings[0].rounds
    assert form.seconds == pytest.approx(network.seconds + rings[0].seconds, rel=1e-12)
    sent = (max(network.sent.values()) if network.sent else 0) + (rings[0].sent[0] if rings[0].sent else 0)
    assert form.worker_bytes == pytest.approx(sent)


def binary_tree(n: int) -> dict[int, int]:
    """Parent of every node but the root 0, by its lowest set bit: odd nodes are leaves."""
    parents = {}
    for node in range(1, n):
        bit = node & -node
        parent = (node ^ bit) | (bit << 1)
        parents[node] = parent if parent < n else node ^ bit
    return parents


def two_trees_in_pieces(n: int, num_pieces: int) -> int:
    """Rounds of an all-reduce by a binary tree and its mirror (a leaf of one works inside the other), each for half of
    the bytes in pieces; in a round a node sends one piece and receives one, the earliest that is ready."""
    trees = [binary_tree(n), {n - 1 - a: n - 1 - b for a, b in binary_tree(n).items()}]
    waiting = {
        (piece, tree, up, node): None
        for piece in range(num_pieces)
        for up in (1, 0)
        for tree in (0, 1)
        for node in trees[tree]
    }
    done: set[tuple[int, int, int, int]] = set()

    def ready(piece: int, tree: int, up: int, node: int) -> bool:
        """Up: all children have sent theirs. Down: the parent has the sum."""
        parents = trees[tree]
        above = node if up else parents[node]
        if not up and above in parents:
            return (piece, tree, 0, above) in done
        return all((piece, tree, 1, child) in done for child, parent in parents.items() if parent == above)

    rounds = 0
    while waiting:
        sending: set[int] = set()
        receiving: set[int] = set()
        started = []
        for edge in waiting:
            _, tree, up, node = edge
            source, target = (node, trees[tree][node]) if up else (trees[tree][node], node)
            if source not in sending and target not in receiving and ready(*edge):
                sending.add(source)
                receiving.add(target)
                started.append(edge)
        for edge in started:
            del waiting[edge]
        done.update(started)
        rounds += 1
    return rounds


@pytest.mark.parametrize("n", [4, 8, 16])
def test_two_trees_move_twice_the_bytes_through_their_busiest_node(n):
    """Counted edge by edge; served first come first served in pieces, they come within a third of their form."""
    network = Network()
    for parents in (binary_tree(n), {n - 1 - a: n - 1 - b for a, b in binary_tree(n).items()}):
        network.round([(a, b, SIZE / 2) for a, b in parents.items()])
        network.round([(b, a, SIZE / 2) for a, b in parents.items()])
    form = cost.tree(SIZE, n, Link(1e6))
    assert form.busiest_bytes == network.busiest()
    assert two_trees_in_pieces(n, 1) >= form.steps == 2 * log2(n)
    pieces = 40
    seconds = two_trees_in_pieces(n, pieces) * (SIZE / 2 / pieces) / 1e6
    assert form.seconds <= seconds <= 4 / 3 * form.seconds + form.steps * SIZE / 2 / pieces / 1e6


@pytest.mark.parametrize(("num_workers", "num_servers"), [(3, 1), (7, 1), (6, 2), (4, 4), (2, 6), (5, 3)])
def test_servers_push_and_pull_message_by_message(num_workers, num_servers):
    network = Network()
    shard = SIZE / num_servers
    pairs = [(f"w{w}", f"s{s}") for w in range(num_workers) for s in range(num_servers)]
    network.round([(w, s, shard) for w, s in pairs])
    network.round([(s, w, shard) for w, s in pairs])
    form = cost.parameter_server(SIZE, num_workers, num_servers, LINK)
    assert form.seconds == pytest.approx(network.seconds, rel=1e-12) and form.steps == 2
    assert form.worker_bytes == pytest.approx(network.sent["w0"]) == pytest.approx(SIZE)
    assert form.busiest_bytes == pytest.approx(network.busiest())
    both = Network()
    both.round([(w, s, shard) for w, s in pairs] + [(s, w, shard) for w, s in pairs])
    overlapped = both.seconds - LINK.latency_s  # the pull of one shard under the push of the next halves the time
    assert form.seconds - 2 * LINK.latency_s == pytest.approx(2 * overlapped, rel=1e-12)


@pytest.mark.parametrize("n", RANKS)
def test_one_server_takes_2_n_minus_1_d_over_b(n):
    assert cost.parameter_server(SIZE, n - 1, 1, Link(1e6)).seconds == pytest.approx(2 * (n - 1) * SIZE / 1e6)


@pytest.mark.parametrize("n", RANKS)
def test_co_located_servers_move_what_a_ring_moves(n):
    network = Network()
    others = [(a, b) for a in range(n) for b in range(n) if a != b]
    for _ in ("push", "pull"):
        network.round([(a, b, SIZE / n) for a, b in others])
    form = cost.colocated_servers(SIZE, n, LINK)
    assert form.seconds == pytest.approx(network.seconds, rel=1e-12)
    assert form.busiest_bytes == pytest.approx(network.busiest())
    assert form.busiest_bytes == pytest.approx(cost.ring(SIZE, n, LINK).busiest_bytes)


def helped_share(n: int, k: int) -> float:
    """The part of the bytes that k helpers serve when all links are equally busy (BytePS, section 4)."""
    return 2 * k * (n - 1) / (n * n + k * n - 2 * k)


def helped_round(n: int, k: int, share: float) -> float:
    """Bytes of the busiest link when k helpers serve `share` of the weights, push and pull at once."""
    network = Network()
    messages: list[tuple[object, object, float]] = []
    for worker in range(n):
        for helper in range(k):
            messages += [(worker, f"h{helper}", share / k), (f"h{helper}", worker, share / k)]
        for other in range(n):
            if other != worker:
                messages += [(worker, other, (1 - share) / n), (other, worker, (1 - share) / n)]
    network.round(messages)
    return network.busiest()


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (4, 4), (8, 3), (2, 1), (8, 8)])
def test_helpers_serve_the_share_that_a_search_finds_best(n, k):
    found = min((helped_round(n, k, share / 2000), share / 2000) for share in range(2001))
    assert n == 2 or helped_share(n, k) == pytest.approx(found[1], abs=1e-3)  # for 2 workers any share is as good
    assert cost.helped_servers(1.0, n, k, Link(1.0)).seconds == pytest.approx(found[0], rel=2e-3)


def test_helpers_from_none_to_as_many_as_workers_go_from_a_ring_to_half_of_it():
    free = Link(1e6)
    for n in RANKS:
        assert cost.helped_servers(SIZE, n, 0, free).seconds == pytest.approx(cost.ring(SIZE, n, free).seconds)
        assert cost.helped_servers(SIZE, n, n, free).seconds == pytest.approx(SIZE / 1e6)
        assert cost.helped_servers(SIZE, n, 3 * n, free) == cost.helped_servers(SIZE, n, n, free)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("ratio", [0.01, 0.25, 1.0, 4.0, 100.0])
def test_the_best_worker_share_is_what_a_search_over_shares_finds(ratio, overlapped):
    """Samples a second of 1 node of compute second 1, with 2D/B = ratio: e / (1 + ratio x max(1, e/(1-e)))."""

    def rate(share: float) -> float:
        exchange = ratio * max(1.0, share / (1 - share))
        return share / (max(1.0, exchange) if overlapped else 1 + exchange)

    best = max((index / 10_000 for index in range(1, 10_000)), key=rate)
    form = cost.best_worker_share(ratio, overlapped)
    assert rate(form) >= rate(best) * (1 - 1e-9)
    assert form == pytest.approx(best, abs=2e-4) or (overlapped and ratio > 1)  # then every share from 1/2 is as good


def test_where_communication_is_the_bound_half_of_the_nodes_serve():
    assert cost.best_worker_share(1.0) == 0.5 == cost.best_worker_share(50.0, overlapped=True)
    assert cost.best_worker_share(0.25) == pytest.approx(2 / 3) and cost.best_worker_share(0.25, True) == 0.8


@pytest.mark.parametrize("n", [4, 8, 12, 60])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 2.0])
def test_in_whole_nodes_the_best_share_is_beside_the_formula(n, ratio):
    free = Link(2 / ratio)  # 2D/B = ratio with D = 1 and a second of compute
    workers = cost.best_num_workers(1.0, n, free, 1.0)
    assert abs(workers - n * cost.best_worker_share(ratio)) < 1


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("link", [Link(1e6), Link(1e6, 1e-2), Link(1e9, 1e-6), Link(1e4)], ids=str)
def test_the_best_number_of_workers_is_what_trying_all_finds(link, overlapped):
    for n in (2, 3, 7, 16, 61):

        def rate(workers: int, n: int = n) -> float:
            exchange = cost.parameter_server(SIZE, workers, n - workers, link)
            return workers / cost.step_seconds(5e-3, exchange, overlapped)

        found = cost.best_num_workers(SIZE, n, link, 5e-3, overlapped)
        assert rate(found) == pytest.approx(max(map(rate, range(1, n))), rel=1e-12)


def test_on_equal_nodes_servers_never_beat_a_ring_in_bandwidth():
    """n nodes in all: a ring has n workers, servers take nodes away."""
    free = Link(1e6)
    for n in RANKS:
        ring = n / cost.step_seconds(1e-3, cost.ring(SIZE, n, free))
        for servers in range(1, n):
            workers = n - servers
            served = workers / cost.step_seconds(1e-3, cost.parameter_server(SIZE, workers, servers, free))
            assert served < ring or n == 2


def test_one_server_is_as_slow_as_a_ring_for_two_nodes_and_n_times_slower_after():
    free = Link(1e6)
    for n in RANKS:
        ratio = cost.parameter_server(SIZE, n - 1, 1, free).seconds / cost.ring(SIZE, n, free).seconds
        assert ratio == pytest.approx(Fraction(n))


def test_latency_decides_for_small_gradients():
    n = 64
    small, large = 1e3, 1e10
    slow = Link(1e9, 1e-4)
    assert cost.halving_doubling(small, n, slow).seconds < cost.ring(small, n, slow).seconds
    assert cost.tree(small, n, slow).steps == cost.halving_doubling(small, n, slow).steps == 2 * ceil(log2(n))
    assert cost.ring(large, n, slow).seconds < cost.tree(large, n, slow).seconds


def test_every_few_steps_costs_as_much_less():
    form = cost.ring(SIZE, 4, LINK)
    assert form.every(10).seconds == form.seconds / 10 and form.every(10).worker_bytes == form.worker_bytes / 10


@pytest.mark.parametrize(
    "form",
    [
        cost.ring(SIZE, 1, LINK),
        cost.halving_doubling(SIZE, 1, LINK),
        cost.tree(SIZE, 1, LINK),
        cost.colocated_servers(SIZE, 1, LINK),
        cost.helped_servers(SIZE, 1, 1, LINK),
        cost.hierarchical(SIZE, 1, 1, LINK, LINK),
    ],
)
def test_one_rank_alone_exchanges_nothing(form):
    assert form == cost.NOTHING
