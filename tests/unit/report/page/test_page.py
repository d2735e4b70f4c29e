"""The HTML page of runs: sections, offline, escaped, the same for the same runs; its charts' coordinates."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise, product

import pytest

from parallelrun.base.errors import ParallelrunError
from parallelrun.base.records import append_jsonl, write_json
from parallelrun.cli.main import main
from parallelrun.report.page import charts
from parallelrun.report.page.charts import ChartLine, GanttCell
from parallelrun.report.page.document import page
from parallelrun.report.records.read import read
from tests.run_files import write_run

VOID = {"meta", "br", "link", "img", "input"}
SVG_LEAVES = {"line", "rect", "polyline", "polygon", "circle"}


class Outline(HTMLParser):
    """Checks that tags are balanced; collects ids, headings' texts, links and elements that scroll."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_startendtag(self, tag, attributes):
        assert tag in SVG_LEAVES
        self.attributes.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def full_run(directory, **options):
    """A run with traffic, memory, times by part and experts."""
    times = {"compute_s": 0.3, "comm_exposed_s": 0.1, "bubble_s": 0.05, "data_s": 0.01, "device": "cpu"}
    write_run(directory, **{**times, **options})
    rows = [{"axis": axis, "operation": "all_reduce", "purpose": "gradients", "calls": 1, "payload_bytes": 2**20,
             "predicted_calls": 1, "predicted_payload_bytes": 2**20, "wire_bytes": 2**21}
            for axis in ("dp", "tp")]  # fmt: skip
    write_json(directory / "comm.json", {"rows": [*rows, {"operation": "recv"}]})
    parts = {"weights": 10, "gradients": 10, "optimizer": 20, "activations": 5, "temporary": 1, "total": 46}
    write_json(directory / "plan.json", {"memory": {"per_position": [parts]}})
    for step in (1, 2):
        layer = {"layer": "layers.1.moe", "load": [3, 1], "kept": [3, 1], "max_vio": 0.5}
        append_jsonl(directory / "routing.jsonl", {"step": step, "layers": [layer]})
    return directory


def test_a_page_has_a_section_for_what_was_recorded(tmp_path):
    outline = Outline(page([read(full_run(tmp_path / "gpt" / "20260101T000000Z-aaaaaa"))], "one run"))
    assert outline.ids == ["results", "training", "time", "communication", "experts", "memory", "configuration"]
    links = [found["href"] for tag, found in outline.attributes if tag == "a"]
    assert links == ["#results", *(f"#{name}" for name in outline.ids)]


def test_a_page_of_a_run_that_failed_at_once(tmp_path):
    text = page([read(write_run(tmp_path / "a", losses=(), state="failed"))], "failed")
    assert Outline(text).ids == ["results", "training", "configuration"] and "No step was recorded" in text


def test_several_runs_are_compared_and_replicates_have_a_band(tmp_path):
    runs = [read(full_run(tmp_path / f"{seed}", losses=(5.0 + seed, 4.0), config={"seed": seed})) for seed in (1, 2)]
    other = read(full_run(tmp_path / "other", config={"optimizer.lr": 0.1}))
    text = page([*runs, other], "several")
    outline = Outline(text)
    assert "differences" in outline.ids and "<td>optimizer.lr</td>" in text
    assert "A " in text and "(2 seeds)" in text and "2 ±1.4" not in text
    assert sum(found.get("class") == "band f0" for _, found in outline.attributes) == 2  # losses, tokens/s
    assert "losses of A and B: part at step 1" in text


def test_nothing_is_loaded_and_nothing_is_run(tmp_path):
    text = page([read(full_run(tmp_path / "a"))], "offline")
    tags = {tag for tag, _ in Outline(text).attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bon\w+=", text)


def test_texts_from_files_are_escaped(tmp_path):
    evil = '<script>alert("x")</script>&'
    directory = full_run(tmp_path / "<i>&" / "<b>&", config={"model.name": evil, "optimizer.lr": evil})
    (directory / "routing.jsonl").unlink()
    append_jsonl(directory / "routing.jsonl", {"step": 3, "layers": [
        {"layer": evil, "load": [3, 1], "kept": [3, 1], "max_vio": 0.5}]})  # fmt: skip
    write_json(directory / "manifest.json", {"argv": [evil], "hosts": [evil]})
    write_json(directory / "status.json", {"state": evil})
    rows = [{"axis": evil, "operation": evil, "purpose": evil, "calls": 1, "payload_bytes": 1,
             "predicted_calls": 1, "predicted_payload_bytes": 2, "wire_bytes": 1}]  # fmt: skip
    write_json(directory / "comm.json", {"rows": rows})
    other = read(full_run(tmp_path / "b"))
    text = page([read(directory), other], evil)
    assert not re.search("<script|<b>|<i>", text) and text.count("&lt;script&gt;") >= 8
    Outline(text)


def test_the_same_runs_give_the_same_page(tmp_path):
    runs = [read(full_run(tmp_path / "a")), read(full_run(tmp_path / "b", config={"dp": 4}))]
    assert page(runs, "twice") == page(runs, "twice")


def test_whatever_scrolls_is_reached_by_the_keyboard(tmp_path):
    for tag, found in Outline(page([read(full_run(tmp_path / "a"))], "keys")).attributes:
        if tag == "pre" or found.get("class") in ("wide", "big"):
            assert found["tabindex"] == "0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("comm.json", '{"rows": [{"operation": "send"}]}'),
        ("comm.json", "{"),
        ("schedule.json", '{"step": 2, "ranks": [{"pp": 0, "actions": [{"kind": "F"}]}]}'),
        ("schedule.json", '{"step": 2, "ranks": []}'),
        ("plan.json", '{"memory": {"per_position": [{"weights": 1}]}}'),
        ("routing.jsonl", '{"schema": 1, "step": 1, "layers": [{"layer": "a"}]}\n'),
    ],
)
def test_a_broken_file_is_named_and_no_page_is_written(tmp_path, capsys, name, text):
    directory = full_run(tmp_path / "a", config={"pp": 2})
    (directory / name).write_text(text)
    with pytest.raises(ParallelrunError) as caught:
        page([read(directory)], "broken")
    assert caught.value.exit_code == 4 and name in caught.value.problems[0].where
    assert main(["report", str(directory)]) == 4
    assert name in capsys.readouterr().err and not (directory / "report.html").exists()


def test_the_measured_schedule_stands_below_the_predicted_one(tmp_path):
    directory = full_run(tmp_path / "a", config={"pp": 2}, bubble_predicted=0.25, bubble_measured=0.5)
    assert "recorded no times of single actions" in page([read(directory)], "failed before its end")
    actions = [{"kind": kind, "stage": 0, "microbatch": 77, "begin_s": begin, "end_s": begin + 0.25}
               for kind, begin in (("F", 0.0), ("B", 0.75))]  # fmt: skip
    write_json(directory / "schedule.json", {"step": 4, "ranks": [{"pp": 0, "actions": actions}]})
    text = page([read(directory)], "measured")
    assert "<figcaption>measured schedule of step 4, 1 s</figcaption>" in text
    assert text.count("of microbatch 77</title>") == 2 and "25.0% predicted, 50.0% measured" in text
    Outline(text)


def test_the_command_writes_the_page_where_it_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "runs" / "sweep-20260101T000000Z-aaaaaa"
    for point in ("000-ddp-dp2", "001-tp-tp2"):
        full_run(sweep / point, config={"strategy.name": point})
    (sweep / "results.jsonl").write_text("")
    assert main(["report", sweep.name]) == 0 and (sweep / "report.html").is_file()
    assert main(["report", str(sweep / "000-ddp-dp2")]) == 0 and (sweep / "000-ddp-dp2" / "report.html").is_file()
    assert main(["report", "000-ddp-dp2", "001-tp-tp2"]) == 0 and (tmp_path / "report.html").is_file()
    assert main(["report", sweep.name, "--to", "page.html"]) == 0 and (tmp_path / "page.html").is_file()
    assert capsys.readouterr().out.splitlines()[-1] == "page.html"
    assert main(["report", sweep.name, "--to", "runs"]) == 2
    assert main(["report", sweep.name, "--to", "nowhere/page.html"]) == 3
    assert main(["report", "nothing"]) == 2


def test_the_points_of_a_sweep_are_named_by_what_was_swept(tmp_path):
    sweep = tmp_path / "mine"
    for number, (strategy, lr, seed) in enumerate(product(("ddp", "zero1"), ("0.1", "0.2"), (1, 2))):
        folder = f"{number:03d}-{strategy}-dp2"
        full_run(sweep / folder, config={"strategy.name": strategy, "optimizer.lr": float(lr), "seed": seed})
        words = ["dp=2", f"strategy={strategy}", f"optimizer.lr={lr}", f"seed={seed}"]
        append_jsonl(sweep / "results.jsonl", {"point": number, "directory": folder, "overrides": words})
    runs = [read(path) for path in sorted(sweep.iterdir()) if path.is_dir()]
    names = re.findall(r"<tr><td>([A-Z] [^<]*)</td><td>done", page(runs, "sweep"))
    assert names == ["A ddp lr=0.1 (2 seeds)", "B ddp lr=0.2 (2 seeds)", "C zero1 lr=0.1 (2 seeds)",
                     "D zero1 lr=0.2 (2 seeds)"]  # fmt: skip
    names = re.findall(r"<tr><td>([A-Z] [^<]*)</td><td>done", page(runs[::2], "without replicates"))
    assert names[0] == "A ddp lr=0.1 seed=1"


def test_many_runs_are_compared_in_three_columns(tmp_path):
    runs = [read(full_run(tmp_path / f"{n}", config={"dp": 2 + n % 2, "steps": n})) for n in (4, 5, 6, 7, 8)]
    assert "<td>dp</td><td>2</td><td>A C E</td></tr><tr><td></td><td>3</td><td>B D</td>" in page(runs, "many")


def test_the_traffic_of_all_ranks_is_added_and_compared(tmp_path):
    directory = full_run(tmp_path / "a" / "1")
    row = {"operation": "send", "calls": 2, "predicted_calls": 2, "payload_bytes": 2**20, "wire_bytes": 2**20}
    purposes = (("activations", 2**20, None), ("activations", 2**20, None), ("gradients", 2**10, None),
                ("experts", 2**10, 2**21))  # fmt: skip
    rows = [{**row, "axis": "pp", "purpose": purpose, "predicted_payload_bytes": predicted,
             "predicted_most_bytes": most} for purpose, predicted, most in purposes]  # fmt: skip
    write_json(directory / "comm.json", {"rows": [*rows, {**rows[0], "operation": "recv", "payload_bytes": 0}]})
    text = page([read(directory)], "traffic")
    lines = [re.findall("<td[^>]*>([^<]*)</td>", line) for line in re.findall("<tr><td>pp</td>.*?</tr>", text)]
    assert lines == [
        ["pp", "send", "activations", "4", "2 MiB", "2 MiB", "2 MiB", "yes"],
        ["pp", "send", "experts", "2", "1 MiB", "1 KiB", "1 MiB", "yes"],  # within its bound
        ["pp", "send", "gradients", "2", "1 MiB", "1 KiB", "1 MiB", "no"],
    ]
    assert "pp 4 MiB</title>" in text


def test_the_predicted_memory_is_that_of_the_largest_rank(tmp_path):
    directory = full_run(tmp_path / "a" / "1")
    parts = [{"weights": size, "total": size} for size in (10, 40, 20)]
    write_json(directory / "plan.json", {"memory": {"per_position": parts}})
    assert "weights 40 B</title>" in page([read(directory)], "memory")


def coordinates(figure: str, tag: str = "polyline") -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<{tag} [^>]*points="([^"]*)"', figure)
    return [[tuple(map(float, pair.split(","))) for pair in one.split()] for one in found]


def test_wide_numbers_get_a_logarithmic_axis_and_others_an_even_one():
    decades = [(float(step), 10.0**step) for step in range(4)]
    figure = charts.line_chart("loss", [ChartLine("a", 0, decades)])
    (points,) = coordinates(figure)
    gaps = [before[1] - after[1] for before, after in pairwise(points)]
    assert "(logarithmic)" in figure and max(gaps) - min(gaps) < 0.2
    assert "logarithmic" not in charts.line_chart("loss", [ChartLine("a", 0, [(0.0, 0.0), (1.0, 1000.0)])])


LINES = [
    [(1.0, 2.0)],
    [(1.0, 0.0), (2.0, 0.0)],
    [(1.0, -1e-9), (2.0, 1e-9)],
    [(1.0, 1e12), (10000.0, 2e12)],
    [(float(number), number % 7) for number in range(5000)],
]


@pytest.mark.parametrize("points", LINES)
def test_every_point_is_inside_the_figure(points):
    figure = charts.line_chart("loss", [ChartLine("a", 3, points, [0.0] * len(points))])
    found = [pair for line in coordinates(figure) for pair in line]
    assert len(found) <= charts.MOST_POINTS and "nan" not in figure
    assert all(0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in found)


def test_a_band_has_the_width_of_the_deviation():
    figure = charts.line_chart("loss", [ChartLine("a", 0, [(0.0, 0.0), (1.0, 1.0)], [0.5, 0.25])])
    (band,) = coordinates(figure, "polygon")
    height = charts.HEIGHT - charts._BOTTOM - charts._TOP  # from -0.5 to 1.5
    assert band[3][1] - band[0][1] == pytest.approx(height / 2, abs=0.2)  # twice the deviation of the first point
    assert band[2][1] - band[1][1] == pytest.approx(height / 4, abs=0.2)
    assert all(charts._TOP <= y <= charts._TOP + height for _, y in band)


def ticks(figure: str) -> tuple[list[str], list[str]]:
    """The texts of a chart's vertical and horizontal axis."""
    found = re.findall(r'<text class="tick"[^>]*text-anchor="(\w+)">([^<]*)<', figure)
    return [text for anchor, text in found if anchor == "end"], [text for anchor, text in found if anchor == "middle"]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (4.3810, 4.3820, ["4.381", "4.3812", "4.3814", "4.3816", "4.3818", "4.382"]),
        (5.4, 5.6, ["5.4", "5.45", "5.5", "5.55", "5.6"]),
        (1e-5, 1.001e-5, ["0", "2e-09", "4e-09", "6e-09", "8e-09", "1e-08"]),  # the title has the rest
        (123400.0, 123480.0, ["123.4k", "123.42k", "123.44k", "123.46k", "123.48k"]),
    ],
)
def test_ticks_are_told_apart_and_exact(low, high, wanted):
    figure = charts.line_chart("loss", [ChartLine("a", 0, [(1.0, low), (2.0, high)])])
    assert ticks(figure)[0] == wanted
    assert ("loss - 1e-05" in figure) == (wanted[0] == "0")


def test_late_steps_are_told_apart():
    figure = charts.line_chart("loss", [ChartLine("a", 0, [(1e6 + step, float(step)) for step in range(11)])])
    assert ticks(figure)[1] == ["0", "2", "4", "6", "8", "10", "step - 1000000"]


def test_lines_that_differ_by_more_than_rounding_are_drawn_apart():
    lines = [ChartLine("a", 0, [(0.0, 4.381), (1.0, 4.38)]), ChartLine("b", 1, [(0.0, 4.381), (1.0, 4.3806)])]
    first, second = coordinates(charts.line_chart("loss", lines))
    assert first[1][1] - second[1][1] > 50


def test_bars_are_as_long_as_their_values():
    figure = charts.stacked_bars("t", [("a", [1.0, 3.0]), ("b", [2.0, 0.0])], ["x", "y"], str)
    bars = re.findall(r'class="bar f\d" x="([\d.]+)" y="\d+" width="([\d.]+)"', figure)
    starts, widths = zip(*((float(start), float(width)) for start, width in bars))
    assert starts[1] == pytest.approx(starts[0] + widths[0], abs=0.2)  # where the part before it ends
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-3) and widths[2] == pytest.approx(2 * widths[0], rel=1e-3)
    assert len(widths) == 3 and charts.stacked_bars("t", [("a", [0.0])], ["x"], str) == ""


def test_a_gantt_chart_has_a_cell_for_every_action():
    cells = [GanttCell(0, 0, 0.0, 1.0, "0"), GanttCell(1, 1, 2.0, 4.0, "0")]
    figure = charts.gantt("schedule", cells, ["forward", "backward"])
    places = [
        (float(x), float(width))
        for x, width in re.findall(r'class="bar k\d" x="([\d.]+)" y="\d+" width="([\d.]+)"', figure)
    ]
    assert places[1][1] == pytest.approx(2 * places[0][1], rel=1e-3)
    assert places[1][0] - places[0][0] == pytest.approx(2 * places[0][1], rel=1e-3)
