"""Ring all-reduce against a parameter server at equal nodes, n = 2..8: bytes counted, seconds measured, one figure.

    python -m benchmarks.crossover                       # about two minutes on two cores
    python -m benchmarks.crossover --nodes 2,3,4 --repeats 5 --name ""

Nodes are ranks. Under the ring all n are workers; under `ps` one, or half of them, are servers that own equal parts
of the numbers: workers push theirs, servers add them up and give the sum back. So the exchange alone is compared: one
step's gradients there and the result back. bytes: of the node with most to do, whichever it is, by our counter. Where
every node has a port of its own that is what takes the time; on one machine it is the sum over all nodes. From both
figures and latency follows the crossover: the size below which the server's two messages beat the ring's 2(n-1).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections import Counter
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pairs import RESULTS, environment, on_ranks
from parallelrun.distributed import comm
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Group, Mesh, build_mesh
from parallelrun.distributed.sequences import Lane
from parallelrun.report import chart
from parallelrun.report.figures import bytes_text, digits
from parallelrun.strategies.data.common.allreduce.rounds import ring as ring_rounds
from parallelrun.strategies.data.common.allreduce.rounds import segments
from parallelrun.strategies.data.common.allreduce.runtime import all_reduce
from tests.plans import tiny_plan

SIZES = (2**10, 2**14, 2**18, 2**24)  # bytes of gradients
LARGE, SMALL = SIZES[-1], SIZES[1]
SYSTEMS = ("ring", "ps, 1 server", "ps, n/2 servers")
BYTES_PER_S, LATENCY_S = 3.125e9, 30e-6  # cluster=ethernet_25g


def num_servers(system: str, nodes: int) -> int:
    """Nodes that serve; the last ones."""
    return {"ring": 0, "ps, 1 server": 1}.get(system, nodes // 2)


def serve(tensor: Tensor, group: Group, servers: int) -> None:
    """A parameter server's step: every member that is no server gets the sum of what those members hold."""
    workers = group.size - servers
    parts = segments(0, tensor.numel(), servers)
    if group.index < workers:
        views = [(workers + number, tensor[start:stop]) for number, (start, stop) in enumerate(parts)]
        works = comm.exchange([(part.clone(), server) for server, part in views], [], group, "push")
        works += comm.exchange([], [(part, server) for server, part in views], group, "pull")
    else:
        start, stop = parts[group.index - workers]
        pushed = tensor.new_empty(workers, stop - start)
        for work in comm.exchange([], [(pushed[worker], worker) for worker in range(workers)], group, "push"):
            work.wait()
        total = pushed.sum(0)
        works = comm.exchange([(total, worker) for worker in range(workers)], [], group, "pull")
    for work in works:
        work.wait()


def _check_sum(system: str, numel: int, group: Group) -> None:
    """One exchange of numbers that everybody can check."""
    workers = group.size - num_servers(system, group.size)
    tensor = torch.full((numel,), float(group.index + 1))
    _run(system, tensor, group)
    if group.index < workers:
        assert torch.equal(tensor, torch.full((numel,), workers * (workers + 1) / 2)), f"{system}: a wrong sum"


def _run(system: str, tensor: Tensor, group: Group) -> None:
    if system == "ring":
        all_reduce(tensor, group, "gradients", ring_rounds(range(group.size), group.index, (0, tensor.numel()))).wait()
    else:
        serve(tensor, group, num_servers(system, group.size))


def _busiest_bytes(system: str, numel: int, group: Group, mesh: Mesh) -> int:
    """Bytes that the node with most to do sends, or receives if that is more, as counted."""
    moved: Counter[bool] = Counter()

    def note(lane: Lane, what: str) -> None:
        moved[lane.ranks[0] == mesh.rank] += int(what.partition("(")[2].split()[0])

    with CommunicationCounter(mesh, note):
        _check_sum(system, numel, group)
    return int(_largest(max(moved.values()), group))


def _largest(value: float, group: Group) -> float:
    """The largest of the members' values."""
    tensor = torch.tensor(value, dtype=torch.float64)
    comm.all_reduce(tensor, group, "control", op="max")
    return float(tensor)


def _seconds_of(system: str, tensor: Tensor, group: Group) -> float:
    """One exchange, the slowest member's."""
    dist.barrier(group.process_group)
    began = time.perf_counter()
    _run(system, tensor, group)
    return _largest(time.perf_counter() - began, group)


def _measure(node_counts: list[int], repeats: int) -> dict[str, Any]:
    """One rank: the first n ranks are n nodes, the others wait. Systems and sizes take turns on the same machine."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = build_mesh(tiny_plan(dp=world, global_batch=world), torch.device("cpu"))
    tensors = {size: torch.zeros(size // 4) for size in SIZES}
    rows = []
    for nodes in node_counts:
        group = Group("dp", tuple(range(nodes)), rank, dist.new_group(list(range(nodes))))
        times: dict[tuple[str, int], list[float]] = {(system, size): [] for system in SYSTEMS for size in SIZES}
        if rank < nodes:
            counted = {cell: _busiest_bytes(cell[0], cell[1] // 4, group, mesh) for cell in times}
            for number in range(repeats * len(times)):
                system, size = list(times)[number % len(times)]
                times[system, size].append(_seconds_of(system, tensors[size], group))
            for (system, size), taken in times.items():
                row = {"nodes": nodes, "system": system, "bytes": size, "seconds": statistics.median(taken)}
                rows.append({**row, "busiest_bytes": counted[system, size]})
        dist.barrier()
    return {"rows": rows}


def predicted(system: str, nodes: int, size: int) -> float:
    """Seconds of the exchange by the closed forms, on cluster=ethernet_25g."""
    servers = num_servers(system, nodes)
    if not servers:
        steps, sent = 2 * (nodes - 1), 2 * (nodes - 1) / nodes * size
    else:
        steps, sent = 2, 2 * max(1.0, (nodes - servers) / servers) * size
    return steps * LATENCY_S + sent / BYTES_PER_S


def crossover_bytes(ratios: dict[int, float]) -> float:
    """The size at which the ring becomes faster than one server, between two sizes on a line of logarithms; 0: it is
    at all sizes, infinite: at none. ratios: seconds of the ring / seconds of the server, by ascending size."""
    for (size, ratio), (next_size, next_ratio) in pairwise(ratios.items()):
        if ratio > 1 >= next_ratio:
            return size * (next_size / size) ** ((ratio - 1) / (ratio - next_ratio))
    return float("inf") if list(ratios.values())[-1] > 1 else 0.0


def crossovers(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(nodes, bytes) of the crossover, as measured and predicted, where there is one."""
    found: dict[str, list[tuple[int, float]]] = {"measured": [], "ethernet_25g": []}
    fine = tuple(round(2 ** (power / 8)) for power in range(8 * 6, 8 * 28))
    for nodes in sorted({row["nodes"] for row in rows}):
        timed = {(row["system"], row["bytes"]): row["seconds"] for row in rows if row["nodes"] == nodes}
        at = {
            "measured": crossover_bytes({size: timed["ring", size] / timed["ps, 1 server", size] for size in SIZES}),
            "ethernet_25g": crossover_bytes(
                {size: predicted("ring", nodes, size) / predicted("ps, 1 server", nodes, size) for size in fine}
            ),
        }
        for name, size in at.items():
            if 0 < size < float("inf"):
                found[name].append((nodes, size))
    return found


def read_back(path: Path) -> list[dict[str, Any]]:
    """The rows that `_write` wrote as CSV."""
    kinds = {"nodes": int, "bytes": int, "busiest_bytes": int, "seconds": float, "foretold_25g_s": float}
    with path.open(newline="") as file:
        return [{key: kinds.get(key, str)(value) for key, value in row.items()} for row in csv.DictReader(file)]


def picture(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the figure as SVG. facts: of `environment`, where the rows were measured."""
    shown = (
        (f"The busiest node, {bytes_text(LARGE)} (counted)", LARGE, "busiest_bytes", "MiB sent or received"),
        (f"Time, {bytes_text(LARGE)} (measured)", LARGE, "seconds", "median of all nodes' slowest"),
        (f"Time, {bytes_text(SMALL)} (measured)", SMALL, "seconds", "median of all nodes' slowest"),
    )
    title = "Ring all-reduce against a parameter server, equal nodes"
    figure, panels = chart.panels(title, [*(name for name, *_ in shown), "Below: one server is faster"])
    for axes, (_, size, key, label) in zip(panels, shown):
        unit = 2**20 if key == "busiest_bytes" else 1
        for style, name in enumerate(SYSTEMS):
            alike = [row for row in rows if (row["system"], row["bytes"]) == (name, size)]
            chart.line(axes, style, [(row["nodes"], row[key] / unit) for row in alike])
        chart.scale(axes, "y", digits if unit > 1 else _seconds, label=label)
    for style, points in enumerate((crossovers(rows)["ethernet_25g"], crossovers(rows)["measured"]), len(SYSTEMS)):
        chart.line(panels[-1], style, points)
    chart.scale(panels[-1], "y", bytes_text, log=True, base=2, label="bytes of gradients")
    for axes in panels:
        chart.scale(axes, "x", digits, ticks=sorted({row["nodes"] for row in rows}), label="nodes")
    legend = (*SYSTEMS, "crossover, closed form (25 Gb/s, 30 us)", "crossover, measured here")
    notes = (
        f"torch {facts['torch']}, gloo over loopback, {facts['cores']} cores shared by all nodes, {facts['date']}: "
        "measured time follows the bytes that all nodes send together, which are the same for all systems; with "
        "network ports of their own, nodes would show the busiest node's bytes.",
    )
    return chart.svg(figure, legend, notes)


def _seconds(value: float, significant: int = 3) -> str:
    return f"{digits(value * 1e3, significant)} ms"


def _write(name: str, rows: list[dict[str, Any]]) -> None:
    stem = RESULTS / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}"
    RESULTS.mkdir(exist_ok=True)
    with Path(f"{stem}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    facts = environment()
    Path(f"{stem}.json").write_text(json.dumps({"environment": facts}) + "\n")
    Path(f"{stem}.svg").write_text(picture(rows, facts))
    print(f"written to {stem}.csv, .json and .svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,3,4,5,6,7,8")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--name", default="crossover", help="results/<date>-NAME.csv and .svg; empty: do not write")
    arguments = parser.parse_args()
    node_counts = [int(nodes) for nodes in arguments.nodes.split(",")]
    measured = on_ranks(max(node_counts), _measure, node_counts, arguments.repeats)["rows"]
    rows = [{**row, "foretold_25g_s": predicted(row["system"], row["nodes"], row["bytes"])} for row in measured]
    for row in rows:
        if row["bytes"] in (SMALL, LARGE):
            text = f"{row['seconds'] * 1e3:9.2f} ms, busiest node {bytes_text(row['busiest_bytes'])}"
            print(f"{row['nodes']} nodes  {row['system']:16}{bytes_text(row['bytes']):>8}{text}")
    for name, points in crossovers(rows).items():
        print(f"crossover, {name}:", ", ".join(f"n={n} {bytes_text(size)}" for n, size in points) or "none")
    if arguments.name:
        _write(arguments.name, rows)


if __name__ == "__main__":
    main()
