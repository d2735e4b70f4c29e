"""Cost of combining the gradients of a data axis by each classic algorithm, in closed form. Torch-free, pure.

The model: a message takes `latency_s`, then its bytes at `bytes_per_s`; every node sends and receives at that rate at
once (full duplex), and links share nothing. D: bytes of the gradients, and of the weights, which are as many. What is
left out: adding the numbers up, the incast of many workers at one server, and buckets (each has the latency anew).
Sources: Patarasuk and Yuan 2009 (ring), Thakur et al. 2005 (halving-doubling), Sanders et al. 2009 (two trees), Li et
al. 2014 (parameter server), Jiang et al. 2020 (BytePS). Tests run every algorithm step by step against these forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, sqrt
from operator import add

# The names of the exchanges that `data_axis` compares.
RING, HALVING, TREES, HIERARCHICAL = "ring", "halving-doubling", "two trees", "hierarchical"
BINOMIAL = "binomial tree"
OWN = "own settings"
SHARDED, SCATTERED_AGAIN = "reduce-scatter + gather", "gradients scattered again"
GATHERED_AGAIN, HSDP = "weights gathered again", "shards inside groups"
ONE_SERVER, SERVERS, BEST, COLOCATED, HELPED = "one server", "servers", "best share serves", "co-located", "helped"


@dataclass(frozen=True)
class Link:
    """The network of a node: bytes per second in each direction, and seconds until a message's first byte."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """One step's combining. steps: messages one after the other. worker_bytes: what the busiest worker sends.
    busiest_bytes: what the node with most to do sends, or receives if that is more (a server; else a worker)."""

    steps: float
    worker_bytes: float
    busiest_bytes: float
    seconds: float

    def __add__(self, then: Exchange) -> Exchange:
        """One after the other, by the same nodes."""
        return Exchange(*map(add, vars(self).values(), vars(then).values()))

    def every(self, num_steps: int) -> Exchange:
        """This exchange once in `num_steps` steps, on average (local SGD, DiLoCo)."""
        return Exchange(*(figure / num_steps for figure in vars(self).values()))


NOTHING = Exchange(0, 0.0, 0.0, 0.0)


def _exchange(
    n: int, link: Link, steps: float, sent: float, busiest: float | None = None, passed: float | None = None
) -> Exchange:
    """The exchange of n nodes. sent: by a worker. busiest: through the busiest node. passed: one after the other
    through a link. The latter two are as `sent` where they are not given."""
    if n == 1:
        return NOTHING
    seconds = steps * link.latency_s + (sent if passed is None else passed) / link.bytes_per_s
    return Exchange(steps, sent, sent if busiest is None else busiest, seconds)


def ring(size: float, n: int, link: Link) -> Exchange:
    """All-reduce of `size` bytes over n ranks by a ring: 2(n-1) latencies and 2(n-1)/n of the bytes, whatever n."""
    return sharded(size, n, link, passes=2)


def sharded(size: float, n: int, link: Link, passes: int) -> Exchange:
    """`passes` reduce-scatters or all-gathers by rings: an all-reduce and ZeRO are 2; FSDP gathers once more."""
    return _exchange(n, link, passes * (n - 1), passes * (n - 1) / n * size)


def halving_doubling(size: float, n: int, link: Link) -> Exchange:
    """All-reduce by recursive halving and doubling: 2 log2 n latencies. Ranks above the largest power of two hand their
    numbers to a partner first and get the sum last: two more messages of all the bytes."""
    power = 2 ** int(log2(n))
    folded = power < n
    sent = (2 * (power - 1) / power + folded) * size
    return _exchange(n, link, 2 * int(log2(n)) + 2 * folded, sent, passed=sent + folded * size)


def tree(size: float, n: int, link: Link) -> Exchange:
    """All-reduce by two binary trees, each for half of the bytes, in many small pieces: 2 log2 n latencies and twice
    the bytes. A bound: pieces that are not small take longer."""
    return _exchange(n, link, 2 * ceil(log2(n)), 2.0 * size)


def binomial_tree(size: float, n: int, link: Link) -> Exchange:
    """All-reduce up a binomial tree to one rank and down again, whole messages: that rank passes log2 n times the bytes
    each way."""
    rounds = ceil(log2(n))
    return _exchange(n, link, 2 * rounds, size, busiest=rounds * size, passed=2 * rounds * size)


def hierarchical(size: float, group: int, num_groups: int, inside: Link, across: Link) -> Exchange:
    """Reduce-scatter inside groups, a ring across them with each rank's part, all-gather inside.

    Every rank has its own link across, as in Horovod's "torus" form."""
    return ring(size, group, inside) + ring(size / group, num_groups, across)


def parameter_server(size: float, num_workers: int, num_servers: int, link: Link) -> Exchange:
    """Workers push gradients to and pull weights from servers that hold equal shards: 2 max(1, n_w/n_p) of the bytes.

    The pull of one shard under the push of the next would halve the time."""
    busiest = max(1.0, num_workers / num_servers) * size
    return _exchange(num_workers + num_servers, link, 2, size, busiest, passed=2 * busiest)


def colocated_servers(size: float, n: int, link: Link) -> Exchange:
    """Every node a worker and the server of 1/n of the weights: the bytes of a ring in two messages."""
    return _exchange(n, link, 2, 2 * (n - 1) / n * size)


def helped_servers(size: float, n: int, num_helpers: int, link: Link) -> Exchange:
    """Co-located servers helped by k nodes without GPUs, pushes and pulls under each other: 2n(n-1)/(n^2 + kn - 2k) of
    the bytes: the ring's for k=0, half of that for k=n; more helpers help no more (BytePS, section 4)."""
    k = min(num_helpers, n)
    return _exchange(n, link, 2, 2 * n * (n - 1) / max(1, n * n + k * n - 2 * k) * size)


def best_worker_share(ratio: float, overlapped: bool = False) -> float:
    """e*: which part of the nodes should be workers, the others servers, for most samples a second.

    ratio: 2D / (B x seconds a worker computes in a step). Never below a half: further servers would find no work, as
    the workers' own links are full. Exact for shares of any size and no latency."""
    return max(0.5, 1 / (1 + (ratio if overlapped else sqrt(ratio))))


def best_num_workers(size: float, n: int, link: Link, compute_s: float, overlapped: bool = False) -> int:
    """The number of workers among n >= 2 nodes for most samples a second: `best_worker_share` in whole nodes, with
    latency. The rate rises up to the best number and falls after it, so it is found by bisection."""

    def rate(num_workers: int) -> float:
        exchange = parameter_server(size, num_workers, n - num_workers, link)
        return num_workers / step_seconds(compute_s, exchange, overlapped)

    low, high = 1, n - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if rate(middle + 1) > rate(middle) else (low, middle)
    return low


def step_seconds(compute_s: float, exchange: Exchange, overlapped: bool = False) -> float:
    """A step that computes, then exchanges; overlapped: as if all of the one were hidden under the other."""
    return max(compute_s, exchange.seconds) if overlapped else compute_s + exchange.seconds
