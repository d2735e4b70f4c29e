"""The data axis of a plan under every way: what is chosen, what it costs, how it is shown, drawn and written."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from rich.console import Console

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.cli import main as program
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.facts.document import document
from parallelrun.planner.predict import data_axis, prediction
from parallelrun.planner.predict import data_cost as forms
from parallelrun.planner.predict.cluster_cost import Cost
from parallelrun.planner.predict.data_axis import DataAxis, StrategyCost, costs, drawn_nodes
from parallelrun.planner.predict.data_cost import Link
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.figures import digits
from parallelrun.report.plans.data_axis import CSV_COLUMNS, panel, to_csv, to_svg, write
from parallelrun.report.plans.plan import show
from tests.plans import tiny_config, tiny_plan

DGX = {"cluster.gpus_per_node": 4, "cluster.intra_gb_s": 100.0, "cluster.inter_gb_s": 10.0, "cluster.latency_us": 5.0}
ETHERNET = {
    "cluster.gpus_per_node": 1,
    "cluster.inter_gb_s": 3.0,
    "cluster.intra_gb_s": 12.0,
    "cluster.latency_us": 30.0,
}
PS = {"strategy.data.kind": "ps"}
FSDP = {"strategy.data.kind": "fsdp"}


def computing(seconds: float | None) -> Cost:
    """A step of which nothing else is known."""
    return Cost(0.0, 0.0, seconds, None)


def found(overrides: dict[str, Any], compute_s: float | None = 1e-3) -> DataAxis:
    config = tiny_config(overrides)
    known = costs(resolve(config), config.cluster, computing(compute_s))
    assert known is not None
    return known


def strategy(axis: DataAxis, name: str) -> StrategyCost:
    return next(one for one in axis.strategies if one.name == name)


CHOSEN = [
    ({"strategy.data.kind": "ddp"}, forms.RING),
    ({"strategy.data.kind": "zero1"}, forms.SHARDED),
    ({"strategy.data.kind": "zero2"}, forms.SHARDED),
    ({"strategy.data.kind": "fsdp"}, forms.GATHERED_AGAIN),
    ({"strategy.data.kind": "fsdp", "strategy.data.reshard_after_forward": False}, forms.SHARDED),
    ({"strategy.data.kind": "fsdp", "strategy.data.shard": 2}, forms.HSDP),
    ({"strategy.data.kind": "ring"}, forms.RING),
    ({"strategy.data.kind": "horovod"}, forms.RING),
    ({"strategy.data.kind": "zero2", "microbatches": 2}, forms.SCATTERED_AGAIN),
    ({"strategy.data.kind": "ring", "strategy.data.algorithm": "halving_doubling"}, forms.HALVING),
    ({"strategy.data.kind": "ring", "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2},
     forms.HIERARCHICAL),
    (PS, forms.ONE_SERVER),
    ({**PS, "servers": 2}, forms.SERVERS),
    ({**PS, "consistency": "async"}, forms.ONE_SERVER),
    ({"strategy.data.kind": "local_sgd", "strategy.data.sync_every": 4}, forms.OWN),
    ({"strategy.data.kind": "diloco"}, forms.OWN),
    ({"strategy.data.kind": "ddp", "strategy.data.compression": "fp16"}, forms.OWN),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "name"), CHOSEN, ids=[f"{i}-{name}" for i, (_, name) in enumerate(CHOSEN)])
def test_the_plans_own_way_is_marked(overrides, name):
    axis = found({"dp": 4, **overrides})
    assert axis.chosen is not None and axis.chosen.name == name and axis.chosen.here is not None
    assert [one.chosen for one in axis.strategies].count(True) == 1
    assert axis.workers == 4 and axis.nodes == 4 + axis.servers == axis.chosen.here.nodes


@pytest.mark.parametrize(
    "overrides",
    [
        {"strategy.data.kind": "ddp"},
        {"strategy.data.kind": "zero1"},
        {"strategy.data.kind": "zero2"},
        {"strategy.data.kind": "fsdp"},
        {"strategy.data.kind": "fsdp", "strategy.data.reshard_after_forward": False},
        {"strategy.data.kind": "fsdp", "strategy.data.shard": 2},
        {"strategy.data.kind": "ring"},
        {"strategy.data.kind": "ring", "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2},
        {"strategy.data.kind": "ring", "strategy.data.algorithm": "halving_doubling"},
        {"strategy.data.kind": "ddp", "strategy.data.compression": "fp16"},
        {"strategy.data.kind": "ring", "strategy.data.compression": "fp16"},
        {"strategy.data.kind": "horovod"},
        {"strategy.data.kind": "zero2", "microbatches": 2},
        {"strategy.data.kind": "fsdp", "microbatches": 2},
        {"strategy.data.kind": "fsdp", "microbatches": 2, "strategy.data.reduce_each_microbatch": False},
        {"strategy.data.kind": "fsdp", "microbatches": 2, "strategy.data.reshard_after_forward": False},
        {"strategy.data.kind": "fsdp", "microbatches": 2, "strategy.data.shard": 2},
        {"strategy.data.kind": "ddp", "strategy.data.compression": "powersgd"},
        {"strategy.data.kind": "local_sgd", "strategy.data.sync_every": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("other", [{}, {"tp": 2}, {"pp": 2, "model.tied_embeddings": False}], ids=str)
def test_what_a_worker_sends_is_what_the_account_predicts_to_the_byte(overrides, other):
    """The closed form beside `account`, which every run is counted against: equal but for padding and root units."""
    config = tiny_config({"dp": 4, "model.hidden": 64, "model.layers": 4, **overrides, **other})
    plan = resolve(config)
    axis = costs(plan, config.cluster, computing(None))
    assert axis is not None and axis.chosen is not None and axis.chosen.here is not None
    sent = 0.0
    for pp_rank in range(plan.mesh.size("pp")):
        rows = prediction.collectives(plan, plan.mesh.rank(pp=pp_rank))
        own = [row for row in rows if row.axis.startswith("dp") and row.purpose not in ("partial", "control")]
        sent = max(sent, sum(prediction.wire_bytes(row, prediction.group_size(plan, row.axis)) for row in own))
    sent /= plan.data.sync_every
    resharded = plan.data.exchange_form(plan).gathers_again  # FSDP2 keeps its root gathered: a gather less
    assert axis.chosen.here.exchange.worker_bytes == pytest.approx(sent, rel=0.25 if resharded else 0.002)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_and_workers_send_what_the_account_predicts(servers):
    """Equal shards in the form; the plan's own may be uneven, which `plan` shows beside."""
    config = tiny_config({"dp": 4, **PS, "servers": servers, "strategy.data.shard_min_kb": 0.1})
    plan = resolve(config)
    axis = costs(plan, config.cluster, computing(None))
    assert axis is not None and axis.chosen is not None and axis.chosen.here is not None

    def sent(rank: int) -> int:
        rows = prediction.collectives(plan, rank)
        return sum(row.payload_bytes for row in rows if row.purpose in ("push", "pull") and row.operation == "send")

    exchange = axis.chosen.here.exchange
    assert exchange.worker_bytes == sent(0) == axis.gradient_bytes
    on_servers = [sent(plan.num_workers + server) for server in range(servers)]
    assert sum(on_servers) / servers == pytest.approx(exchange.busiest_bytes)
    assert max(on_servers) <= 1.1 * exchange.busiest_bytes


def test_fp16_halves_what_a_ring_sends():
    whole, half = (found({"dp": 4, "strategy.data.compression": kind}).chosen for kind in ("none", "fp16"))
    assert whole and half and whole.here and half.here
    assert half.here.exchange.worker_bytes == whole.here.exchange.worker_bytes / 2


def test_equal_nodes_means_that_servers_take_workers_places():
    axis = found({"dp": 6, "global_batch": 12, **PS, "servers": 2, **ETHERNET})
    assert (axis.nodes, axis.workers, axis.servers) == (8, 6, 2)
    here = {one.name: (one.here.workers, one.here.servers) for one in axis.strategies if one.here}
    assert here[forms.RING] == (8, 0) and here[forms.ONE_SERVER] == (7, 1)
    assert here[forms.SERVERS] == (6, 2) and sum(here[forms.BEST]) == 8


def test_the_best_share_is_the_closed_form_of_this_plans_numbers():
    axis = found({"dp": 6, "global_batch": 12, **PS, "servers": 2, **ETHERNET}, compute_s=1e-3)
    link = Link(3e9, 30e-6)
    assert axis.best is not None
    assert axis.best.ratio == pytest.approx(2 * axis.gradient_bytes / (3e9 * 1e-3))
    assert axis.best.share == pytest.approx(1 / (1 + axis.best.ratio**0.5))
    assert axis.best.share_overlapped == pytest.approx(1 / (1 + axis.best.ratio))
    assert axis.best.workers == forms.best_num_workers(axis.gradient_bytes, 8, link, 1e-3)
    best = strategy(axis, forms.BEST).here
    assert best is not None and best.workers == axis.best.workers and best.samples_per_s is not None
    others = [strategy(axis, name).here for name in (forms.ONE_SERVER, forms.SERVERS)]
    assert all(best.samples_per_s[0] >= other.samples_per_s[0] for other in others if other and other.samples_per_s)


def test_what_is_not_trained_is_not_combined():
    """BatchNorm's running statistics are frozen parameters."""
    config = tiny_config({"dp": 2, "model.name": "resnet", "model.vocab": None, "dataset.name": "digits"})
    plan = resolve(config)
    assert plan.spec.num_frozen
    assert data_axis.gradient_bytes(plan) == 4 * (plan.spec.num_parameters - plan.spec.num_frozen)


def test_samples_a_second_are_of_workers_that_keep_their_batch():
    axis = found({"dp": 4, "global_batch": 8, **ETHERNET}, compute_s=2e-3)
    point = strategy(axis, forms.RING).here
    assert point is not None and axis.worker_batch == 2
    seconds = point.exchange.seconds
    assert point.samples_per_s == pytest.approx((8 / (2e-3 + seconds), 8 / max(2e-3, seconds)))


def test_links_are_those_inside_a_host_until_a_group_leaves_it():
    axis = found({"dp": 8, **DGX})
    ring = {point.nodes: point.exchange.seconds for point in strategy(axis, forms.RING).curve}
    size = axis.gradient_bytes
    assert ring[4] == pytest.approx(forms.ring(size, 4, Link(100e9, 5e-6)).seconds)
    assert ring[5] == pytest.approx(forms.ring(size, 5, Link(10e9, 5e-6)).seconds)
    grouped = {point.nodes: point.exchange.seconds for point in strategy(axis, forms.HIERARCHICAL).curve}
    assert set(grouped) == {8, 12, 16}
    assert grouped[8] == pytest.approx(forms.hierarchical(size, 4, 2, Link(100e9, 5e-6), Link(10e9, 5e-6)).seconds)
    assert grouped[8] < ring[8]


def test_tensor_ranks_between_two_of_a_group_leave_it_fewer_places_in_a_host():
    assert found({"dp": 4, "tp": 2, **DGX}).fabric.per_host == 2
    assert found({"dp": 2, "tp": 4, **DGX}).fabric.per_host == 1


def test_without_rates_times_are_multiples_of_sending_everything_once():
    axis = found({"dp": 4})
    assert axis.fabric.unit == "D/B" and axis.best is None and axis.compute_s is None
    times = {one.name: one.here.exchange.seconds for one in axis.strategies if one.here}
    assert times[forms.RING] == 1.5 and times[forms.ONE_SERVER] == 6 and times[forms.TREES] == 2
    assert times[forms.BEST] == 2 and times[forms.COLOCATED] == 1.5
    assert all(one.here.samples_per_s is None for one in axis.strategies if one.here)


def test_a_rate_that_is_not_given_is_not_needed_or_ends_the_curves():
    inside = {"cluster.gpus_per_node": 4, "cluster.intra_gb_s": 100.0}
    axis = found({"dp": 4, **inside})
    assert axis.fabric.unit == "s" and max(point.nodes for one in axis.strategies for point in one.curve) == 4
    assert found({"dp": 8, **inside}).fabric.unit == "D/B"


def test_one_rank_has_nothing_to_combine():
    config = tiny_config(dp=1, tp=2)
    assert costs(resolve(config), config.cluster, computing(1.0)) is None


def test_one_server_for_one_worker_is_an_axis_of_two_nodes():
    axis = found({"dp": 1, **PS})
    assert axis.nodes == 2 and axis.chosen is not None and axis.chosen.here is not None
    assert axis.chosen.here.exchange.busiest_bytes == axis.gradient_bytes


@pytest.mark.parametrize(
    ("nodes", "last", "count"), [(2, 8, 7), (8, 16, 15), (32, 64, 63), (48, 96, 8), (1024, 2048, 11)]
)
def test_curves_reach_to_twice_the_nodes(nodes, last, count):
    drawn = drawn_nodes(nodes)
    assert drawn[0] == 2 and drawn[-1] == last and len(drawn) == count and nodes in drawn and drawn == sorted(drawn)


SHOWN = [
    {"dp": 4},
    {"dp": 8, **DGX},
    {"dp": 6, "global_batch": 12, **PS, "servers": 2, **ETHERNET},
    {"dp": 2, **ETHERNET},
]


def shown(axis: DataAxis, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(panel(axis))
    return file.getvalue()


@pytest.mark.parametrize("width", [76, 100, 116])
@pytest.mark.parametrize("overrides", SHOWN, ids=str)
def test_on_screen_a_line_per_way_and_none_is_too_wide(overrides, width):
    axis = found(overrides)
    lines = shown(axis, width).splitlines()
    assert max(map(len, lines)) <= width
    table = lines[: next(index for index, line in enumerate(lines) if line.startswith("time to combine"))]
    rows = table.index(next(line for line in table if line.startswith("strategy")))
    table = table[rows + 1 :]
    for one in axis.strategies:
        if one.here:
            assert sum(line[2:].split("  ")[0] == one.label for line in table) == 1
    assert axis.chosen is not None and any(line.startswith(f"* {axis.chosen.label} ") for line in lines)
    assert ("best worker share" in "\n".join(lines)) == (axis.best is not None)


def test_the_time_of_one_server_grows_with_the_nodes_and_that_of_a_ring_stays_flat():
    lines = shown(found({"dp": 8}), 100).splitlines()
    below = lines[next(index for index, line in enumerate(lines) if line.startswith("nodes")) :]
    assert [int(word) for word in below[0].split()[1:]] == [2, 4, 8, 16]
    times = {
        name: [float(word) for line in below if line[2:].startswith(name) for word in re.findall(r"([\d.]+) D/B", line)]
        for name in ("ring all-reduce", "ps, 1 server")
    }
    assert times == {"ring all-reduce": [1.0, 1.5, 1.75, 1.88], "ps, 1 server": [2.0, 6.0, 14.0, 30.0]}


def test_without_matplotlib_a_picture_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for verb in ("plan", "explain"):
        assert program.main([verb, "model=gpt", "strategy=ddp", "dp=2", "plot=x"]) == 3
        assert "pip install 'parallelrun[plots]'" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("overrides", SHOWN, ids=str)
def test_the_picture_has_a_line_per_way_and_the_csv_its_numbers(overrides):
    axis = found(overrides)
    root = ElementTree.fromstring(to_svg(axis, "a <title> & more"))
    texts = [node.text for node in root.iter() if node.text]
    drawn = [one for one in axis.strategies if one.chosen or one.name in (forms.RING, forms.ONE_SERVER, forms.BEST)]
    assert all(one.label in texts for one in drawn) and "a <title> & more" in texts
    rows = list(csv.DictReader(io.StringIO(to_csv(axis))))
    assert tuple(rows[0]) == CSV_COLUMNS and len(rows) == sum(len(one.curve) for one in axis.strategies)
    for one in axis.strategies:
        own = [row for row in rows if row["way"] == one.label]
        assert [float(row["time"]) for row in own] == [point.exchange.seconds for point in one.curve]
        assert {row["unit"] for row in own} <= {axis.fabric.unit}


def test_the_document_carries_all_of_it():
    config = tiny_config({"dp": 4, **PS, "servers": 2, **ETHERNET, "cluster.peak_tflops": 1.0})
    plain = json.loads(json.dumps(document(resolve(config), config), allow_nan=False))["data_axis"]
    assert plain["nodes"] == 6 and plain["best"]["workers"] >= 3 and plain["fabric"]["unit"] == "s"
    assert "strategies" not in plain and [one["chosen"] for one in plain["ways"]].count(True) == 1
    assert {"nodes", "workers", "servers", "exchange", "samples_per_s"} == set(plain["ways"][0]["curve"][0])


@pytest.mark.parametrize(
    "overrides", [{"dp": 4}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 4, **PS, "servers": 2}, {"dp": 8, **FSDP},
                  {"dp": 4, "model.experts": 4, "model.expert_period": 2, "ep": 2}], ids=str,
)  # fmt: skip
def test_a_plan_has_one_rate_of_samples(overrides):
    """What the data axis says of the plan's own way is what the cost of a step says, of all axes together."""
    config = tiny_config({**DGX, "cluster.peak_tflops": 1e-3, **overrides})
    plan = resolve(config)
    known = document(plan, config)
    own = next(one for one in known["data_axis"]["ways"] if one["chosen"])["here"]["samples_per_s"]
    cost, samples = known["cost"], plan.batch.global_batch
    step = cost["compute_s"] + cost["communication_s"], max(cost["compute_s"], cost["communication_s"])
    assert own == pytest.approx([samples / step[0], samples / step[1]])
    screen = Console(width=200, file=io.StringIO())
    show(plan, config, screen)
    (said,) = re.findall(r"(\S+ to \S+) samples/s", screen.file.getvalue())
    assert said == f"{digits(samples / step[0])} to {digits(samples / step[1])}"


def test_another_way_keeps_what_other_axes_send():
    config = tiny_config({**DGX, "cluster.peak_tflops": 1e-3, "dp": 2, "tp": 4})
    plan = resolve(config)
    known = document(plan, config)
    other = next(one for one in known["data_axis"]["ways"] if one["name"] == forms.COLOCATED)["here"]
    beside = known["cost"]["communication_s"] - known["cost"]["data_s"]
    assert beside > known["cost"]["data_s"], "tensor parallelism sends most here"
    seconds = known["cost"]["compute_s"] + beside + other["exchange"]["seconds"]
    assert other["samples_per_s"][0] == pytest.approx(plan.batch.global_batch / seconds)


def test_a_collective_leaves_a_host_by_all_its_ports_and_a_message_by_one():
    fabric = found({"dp": 8, **DGX}).fabric
    rates = {n: fabric.pooled(n).bytes_per_s for n in (4, 5, 6, 8, 16)}
    assert rates == {4: 100e9, 5: 10e9, 6: 20e9, 8: 40e9, 16: 40e9} and fabric.between(8).bytes_per_s == 10e9
    size = found({"dp": 8, **DGX}).gradient_bytes
    native, written = (
        strategy(found({"dp": 8, **DGX, **kind}), forms.RING) for kind in ({}, {"strategy.data.kind": "ring"})
    )
    assert native.here and native.here.exchange.seconds == pytest.approx(forms.ring(size, 8, Link(40e9, 5e-6)).seconds)
    assert written.here and written.here.exchange.seconds == pytest.approx(
        forms.ring(size, 8, Link(10e9, 5e-6)).seconds
    )


def test_a_place_that_cannot_be_written_to_is_said(tmp_path):
    with pytest.raises(EnvironmentProblem, match="plot="):
        write(found({"dp": 2}), "title", str(tmp_path / "missing" / "name"))


COMMAND = "plan model=gpt strategy=ddp dp=4 cluster=ethernet_25g"


@pytest.mark.parametrize("name", ["costs", "costs.svg", "costs.csv"])
def test_plot_writes_the_picture_and_its_numbers_and_nothing_else_does(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(COMMAND.split()) == 0 and not list(tmp_path.iterdir())
    assert program.main([*COMMAND.split(), f"plot={name}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.csv", "costs.svg"]
    assert "written: costs.svg" in capsys.readouterr().out


def test_each_point_of_a_sweep_has_its_own_picture(tmp_path, monkeypatch, capsys, composed_once):
    monkeypatch.chdir(tmp_path)
    line = "plan -m --json model=gpt strategy=ddp,ps world=4 plot=costs"
    assert program.main(line.split()) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == ["costs-0", "costs-1"]
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["data_axis"]["servers"] for point in points] == [0, 1]


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("plan model=gpt strategy=single plot=x", 2, "one rank has none to combine"),
        ("plan model=gpt strategy=ddp dp=2 plot=missing/x", 3, "a writable folder"),
        ("model=gpt strategy=ddp dp=2 plot=x", 2, "read by plan and explain only"),
    ],
)
def test_a_plot_that_cannot_be_is_refused(line, code, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(line.split()) == code
    assert text in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_classic_question_of_the_issue_is_answered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "plan model=vgg16 strategy=ps dp=6 servers=2 cluster=ethernet_25g detail=data_axis"
    assert program.main(line.split()) == 0
    out = capsys.readouterr().out
    assert "8 nodes (6 workers, 2 servers)" in out and "* ps, 2 servers" in out
    assert "best worker share e* = 0.50 without overlap: 4 workers + 4 servers" in out  # VGG's weights: all traffic


@pytest.mark.parametrize(
    ("cluster", "per_node", "inside", "across"),
    [("ethernet_25g", 1, 12.0, 3.125), ("a100_dgx", 8, 300.0, 25.0), ("h100_dgx", 8, 450.0, 50.0)],
)
def test_the_presets_of_clusters(cluster, per_node, inside, across):
    from parallelrun.config import compose
    from parallelrun.config.overrides import read

    parsed, problems = read([f"cluster={cluster}"], False, "here")
    assert not problems
    known = compose.compose_once(compose.prepare(parsed, (), "plan", False))[0].config.cluster
    assert (known.gpus_per_node, known.intra_gb_s, known.inter_gb_s) == (per_node, inside, across)
    assert known.peak_tflops and known.memory_gb and known.latency_us


def test_experts_that_ep_spreads_are_combined_beside() -> None:
    spread = {"model.experts": 4, "model.expert_period": 2, "dp": 4, "ep": 2}
    found = costs(tiny_plan(spread), Config().cluster, computing(None))
    alone = costs(tiny_plan({**spread, "ep": 4}), Config().cluster, computing(None))
    together = costs(tiny_plan({**spread, "ep": 1}), Config().cluster, computing(None))
    assert found is not None and alone is not None and together is not None
    experts = 2 * 4 * 2 * 64 * 16 * 4  # layers x experts x (up, down) x (ffn x hidden) x bytes
    assert found.expert_bytes == experts // 2 and alone.expert_bytes == together.expert_bytes == 0
    assert found.gradient_bytes == alone.gradient_bytes == together.gradient_bytes - experts
