"""The screen and the document of a search: the best plans side by side, and figures that add up."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.search.result import Found, Removed, Search
from parallelrun.report.plans import search as report
from parallelrun.report.plans import waterfall
from tests.unit.config.test_presets import composed


def time(**parts: float) -> StepTime:
    total = sum(parts.values())
    return StepTime(
        total, 0.85 * total, 1.2 * total, 1000 / total, 0.4, {k.replace("_", " "): v for k, v in parts.items()}
    )


def found(overrides: str, gib: float = 20.0, fits: str = "yes", reason: str = "", **parts: float) -> Found:
    predicted = time(**parts) if parts else None
    return Found(tuple(overrides.split()), predicted, round(gib * 2**30), fits, 8000.0 if parts else None, reason)


FIRST = found("pp=1 dp=4 tp=2", products=0.9, tensor_communication=0.2, data_communication=0.034)
ALIKE = found(
    "pp=1 dp=4 tp=2 strategy.data.kind=zero1", products=0.9, tensor_communication=0.2, data_communication=0.04
)
SECOND = found("pp=2 dp=4 tp=1 schedule=gpipe", 30.0, products=0.9, bubble=0.5, data_communication=0.034)
THIRD = found("pp=1 dp=2 tp=4", 12.0, products=1.1, tensor_communication=0.6)
NEAREST = found("pp=1 dp=8 tp=1", 80.0, "no", products=0.9, data_communication=0.1)
UNPRICED = found("pp=1 dp=8 tp=1 strategy.data.kind=other", reason="the time of other is not predicted")
SEARCH = Search(
    8, 48, 500, 123, (FIRST, ALIKE, SECOND, THIRD), NEAREST, (UNPRICED,), {UNPRICED.reason: 7},
    (Removed("memory", 377, "pp=1"), Removed("tp", 40, "tp=5 does not divide 12 heads", "tp=4")), (2, 3),
)  # fmt: skip


@cache
def config() -> Config:
    return composed("model=gpt2_124m", "cluster=a100_dgx", "precision=bf16", "cluster.memory_gb=80").config


def screen(search: Search = SEARCH, width: int = 120, terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, no_color=True, color_system=None)
    report.show(search, config(), "parallelrun model=gpt2_124m tp=2", console)
    return console.file.getvalue()


def line(label: str, text: str) -> str:
    (one,) = [row for row in map(str.strip, text.replace("│", "").splitlines()) if row.startswith(label)]
    return one.removeprefix(label)


def test_the_best_plans_differ_in_degrees_and_stand_side_by_side():
    assert report.side_by_side(SEARCH.best) == [FIRST, SECOND, THIRD]
    text = screen()
    assert line("pp ", text).split() == ["1", "2", "1"] and line("tp ", text).split() == ["2", "1", "4"]
    assert line("schedule", text).split() == ["-", "gpipe", "-"]
    assert line("nearly as fast", text).strip() == "data=zero1 (+0.5%)"
    assert "500 legal plans in bf16; 123 of them fit the 74.5 GiB of a device" in text
    assert "on 8 devices of a100_dgx, 9.07 k tokens a step (48 samples of 189)" in text and "ties" not in text
    assert "7 plans (the time of other is not predicted), such as pp=1 dp=8 tp=1 strategy.data.kind=other" in text


def test_three_plans_are_shown_even_if_their_degrees_are_the_same():
    assert report.side_by_side([FIRST, ALIKE, SECOND]) == [FIRST, ALIKE, SECOND]
    assert report.side_by_side([FIRST]) == [FIRST]


def test_a_variant_that_leaves_a_setting_out_says_so():
    first = found("pp=1 dp=4 tp=2 strategy.data.kind=fsdp strategy.data.reshard_after_forward=false", products=1.0)
    other = found("pp=1 dp=4 tp=2 strategy.data.kind=fsdp", products=1.001)
    shown = screen(Search(8, 48, 2, 2, (first, SECOND, THIRD, FIRST, other)))
    assert line("nearly as fast", shown).strip() == "without reshard_after_forward=false (+0.1%)"


def test_every_column_adds_up_as_printed():
    rows = [row.strip("│ ") for row in screen().splitlines()]
    begin, end = (
        next(i for i, row in enumerate(rows) if row.startswith(word)) for word in ("parts of a step", "step ")
    )
    columns = list(zip(*(re.findall(r"(\d+\.\d+|-)(?= |$)", row) for row in rows[begin + 1 : end + 1])))
    assert len(columns) == 3
    for *parts, total in columns:
        assert round(sum(float(part) for part in parts if part != "-"), 3) == float(total)
    assert [column[-1] for column in columns] == ["1.134", "1.434", "1.700"]


@pytest.mark.parametrize(
    "values", [[0.3333, 0.3333, 0.3333], [0.0004] * 7, [1.0, 0.0], [2 / 3, 1 / 6, 1 / 6], [5.55555]]
)
@pytest.mark.parametrize("num_digits", [0, 1, 3])
def test_rounded_parts_add_up_to_the_rounded_sum(values, num_digits):
    parts = waterfall.rounded(values, num_digits)
    assert round(sum(parts), 6) == round(sum(values), num_digits)
    assert all(abs(part - value) < 10.0**-num_digits for part, value in zip(parts, values))


def test_the_reason_names_the_differences_by_size_and_they_add_up():
    reason = waterfall.why(FIRST.time, SECOND.time)
    assert reason == "300 ms faster (bubble -500 ms, tensor communication +200 ms)"
    assert waterfall.why(SECOND.time, FIRST.time) == "300 ms slower (bubble +500 ms, tensor communication -200 ms)"
    assert waterfall.why(FIRST.time, FIRST.time) == "equally fast"
    many = time(**{f"part_{number}": 1.0 + number for number in range(8)})
    few = time(**{f"part_{number}": 1.0 for number in range(8)})
    gained, _, listed = waterfall.why(few, many).removesuffix(")").partition(" s faster (")
    assert listed.endswith("others -6.0 s") and "part 7 -7.0 s, part 6 -6.0 s" in listed
    assert sum(float(part.split()[-2]) for part in listed.split(", ")) == -float(gained) == -28.0


def test_the_plan_that_is_too_large_says_by_how_much():
    text = screen()
    assert "pp=1 dp=8 tp=1 would be 134 ms faster; it needs 80.0 GiB, 5.5 GiB more than a device has" in text
    close = found("pp=1 dp=8 tp=1", 70.0, "unknown", products=0.9)
    assert "so close to all that it may not fit" in screen(Search(8, 48, 2, 1, (FIRST,), close))
    assert "too large" not in screen(Search(8, 48, 2, 1, (FIRST,)))


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("terminal", [False, True])
def test_no_line_is_wider_than_the_console(width, terminal):
    lines = screen(width=width, terminal=terminal).splitlines()
    assert max(map(len, lines)) <= width or not terminal
    assert len(lines) <= 40 and not any("…" in text for text in lines)


@pytest.mark.parametrize("width", [20, 60])
def test_a_bar_begins_where_the_one_before_ends(width):
    console = Console(file=io.StringIO(), width=120)
    console.print(waterfall.bars(time(products=2.0, bubble=1.0, host=1.0), width))
    *parts, total = [row for row in console.file.getvalue().splitlines()[1:]]
    first = total.index("█")
    assert [row.index("█") - first for row in parts] == [0, width // 2, 3 * width // 4]
    assert [row.count("█") for row in (*parts, total)] == [width // 2, width // 4, width // 4, width]
    assert [row.split()[1:3] for row in parts] == [["2.000", "50%"], ["1.000", "25%"], ["1.000", "25%"]]


def test_the_document_has_the_fields_of_the_interface():
    document = report.document(SEARCH)
    assert (document["considered"], document["fitting"], document["best_rank"], document["rank"]) == (500, 123, 2, 3)
    assert [one["overrides"] for one in document["best"]] == [list(one.overrides) for one in (FIRST, ALIKE, SECOND)]
    for one in document["best"]:
        assert sum(one["parts"].values()) == pytest.approx(one["step_s"])
    assert document["best"][0]["heaviest_gib"] == 20.0 and document["nearest"]["fits"] == "no"
    assert document["unpriced"] == [{"overrides": list(UNPRICED.overrides), "reason": UNPRICED.reason, "plans": 7}]
    assert document["removed"][0] == {"rule": "memory", "candidates": 377, "example": "pp=1"}


def test_of_a_large_space_the_plans_that_bounds_leave_are_counted() -> None:
    assert "500 legal plans in bf16; 123 of them fit the 74.5 GiB" in screen()
    bounded = replace(SEARCH, is_counted=False, priced=4)
    assert "; bounds of their time and memory rule out all but 4, which fit the 74.5 GiB" in screen(bounded)
    assert report.document(bounded)["fitting_at_least"] == 4 and report.document(SEARCH)["fitting_at_least"] == 123
    (_, rank), *_ = report.rank_rows(bounded, time(products=9.0), "yes")
    assert str(rank).startswith("2 to 3 of at most 123 plans that fit, ")


def test_plans_that_no_prediction_tells_apart_tie_and_the_first_stays_first() -> None:
    faster = found("pp=2 dp=2 tp=2", products=0.9, tensor_communication=0.2, data_communication=0.02)
    text = screen(replace(SEARCH, best=(FIRST, faster, SECOND)))
    assert "plans 1 and 2 are within 2%, which no prediction tells apart; plan 1 is the simplest" in text
    assert "plan 1 against plan 2: 14.0 ms slower (" in text and "plan 1 beats plan 3: 300 ms faster (" in text
    assert line("dp ", text).split() == ["4", "2", "4"]
    both = screen(replace(SEARCH, best=(FIRST, faster, replace(FIRST, overrides=("pp=1", "dp=4", "tp=1", "cp=2")))))
    assert "plans 1, 2 and 3 are within 2%" in both
