"""The load of experts over a run, read from routing.jsonl: in a terminal with and without colour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from parallelrun.report.records.routing_log import FILE
from parallelrun.report.runs import expert_load

SUMMARY = {"first_max_vio": 2.5, "max_vio": 0.25, "drop_rate": 0.0312, "load_entropy": 0.98}


def layer(name: str, load: list[int]) -> dict:
    return {"layer": name, "load": load, "kept": load, "max_vio": max(load) * len(load) / sum(load) - 1}


def write(directory: Path, steps: list[tuple[int, list[dict]]]) -> Path:
    lines = [json.dumps({"schema": 1, "step": step, "layers": layers}) for step, layers in steps]
    (directory / FILE).write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Expert 0 takes all of 4 x 10 assignments in the first half, in the second half they are even."""
    skewed, even = layer("layers.1.moe", [40, 0, 0, 0]), layer("layers.1.moe", [10, 10, 10, 10])
    return write(tmp_path, [(step, [skewed if step <= 10 else even]) for step in range(1, 21)])


def drawn(directory: Path, width: int = 120, **console: object) -> str:
    screen = Console(width=width, record=True, file=open("/dev/null", "w"), **console)  # noqa: SIM115
    screen.print(expert_load.panel(directory, SUMMARY, screen))
    return screen.export_text(styles="color_system" in console)


def test_a_cell_is_the_load_over_the_mean_load(run: Path) -> None:
    maps = expert_load.read(run, columns=4)
    assert maps is not None and (maps.first, maps.last, maps.num_layers) == (1, 20, 1)
    (one,) = maps.layers
    assert one.cells == ((4.0, 4.0, 1.0, 1.0), *[(0.0, 0.0, 1.0, 1.0)] * 3)


def test_without_a_terminal_the_map_is_drawn_in_characters(run: Path) -> None:
    text = drawn(run)
    assert "MaxVio 2.50 -> 0.25" in text and "3.1% of assignments dropped" in text and "layers.1.moe" in text
    first, second = text.splitlines()[2:4]
    assert first.strip() == f"0 {20 * '@'}{20 * '+'}" and second.rstrip() == f"1 {20 * ' '}{20 * '+'}"
    assert text.splitlines()[6].split() == ["1", "20"] and text.isascii()  # the steps


def test_on_a_terminal_it_has_colours_but_not_with_no_color(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = drawn(run, force_terminal=True, color_system="truecolor")
    assert "\x1b[48;2;" in coloured and "@" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = drawn(run, force_terminal=True, color_system="truecolor")
    assert "\x1b[48;2;" not in plain and "0 " in plain and "@@@@@@@@@@++++++++++" in plain


def test_a_large_model_and_a_long_run_are_binned(tmp_path: Path) -> None:
    load = [30] * 64 + [10] * 64
    steps = [(step, [layer(f"layers.{i}.moe", load) for i in range(9)]) for step in range(1, 301)]
    maps = expert_load.read(write(tmp_path, steps), columns=40)
    assert maps is not None and [one.layer for one in maps.layers] == [f"layers.{i}.moe" for i in (0, 3, 5, 8)]
    for one in maps.layers:
        assert len(one.cells) == 16 and {len(row) for row in one.cells} == {40}
        assert one.cells[0] == (1.5,) * 40 and one.cells[15] == (0.5,) * 40
    text = drawn(tmp_path)
    assert "4 of 9 layers" in text and "  0-7 " in text and "120-127 " in text
    assert len(text.splitlines()) < 50 and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_it_fits_the_screen(tmp_path: Path, width: int) -> None:
    steps = [(step, [layer(f"layers.{i}.moe", [step, 100]) for i in (1, 3)]) for step in range(1, 301)]
    lines = drawn(write(tmp_path, steps), width - 4).splitlines()  # a panel's frame takes four
    assert max(map(len, lines)) <= width - 4
    assert sum("layers.1.moe" in line and "layers.3.moe" in line for line in lines) == (1 if width >= 120 else 0)


def test_steps_that_were_not_written_are_blank_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    even = [layer("layers.1.moe", [5, 5])]
    write(tmp_path, [(1, even), (2, even), (9, even), (10, even)])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 11, "layers": [{"la')
    maps = expert_load.read(tmp_path, columns=4)
    assert maps is not None and maps.last == 10
    assert maps.layers[0].cells[0] == (1.0, None, None, 1.0)
    assert f"0 +++{6 * ' '}+++" in drawn(tmp_path)


def test_a_run_of_one_step_and_a_layer_that_nothing_reached(tmp_path: Path) -> None:
    write(tmp_path, [(7, [{**layer("layers.1.moe", [1, 1]), "load": [0, 0], "max_vio": 0.0}])])
    maps = expert_load.read(tmp_path, columns=40)
    assert maps is not None and maps.layers[0].cells == ((0.0,), (0.0,))
    assert "layers.1.moe" in drawn(tmp_path)


def test_without_experts_there_is_nothing(tmp_path: Path) -> None:
    assert expert_load.panel(tmp_path, {}, Console()) is None
    (tmp_path / FILE).write_text("")
    assert expert_load.read(tmp_path, 10) is None


def test_colours_say_less_and_more_than_even() -> None:
    def parts(value: float) -> tuple[int, ...]:
        text = expert_load.heat_colour(value)
        return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))

    red, _, blue = parts(0.0)
    assert blue > red
    red, _, blue = parts(2.0)
    assert red > blue
    assert min(parts(1.0)) > 0xE0 and parts(5.0) == parts(2.0)
