"""Draws docs/run.svg: the README's picture, the screen of the main job, from the files of a real run.

python docs/picture.py            # draws it again from docs/run/
python docs/picture.py --run      # runs the main job first, and keeps its files in docs/run/
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from parallelrun.launch.preflight import crowding
from parallelrun.launch.start import starting
from parallelrun.report.progress import ProgressLine
from parallelrun.report.run import FILES, show

COMMAND = ["parallelrun", "model=gpt", "strategy=ptdp", "tp=2", "pp=2"]
WIDTH = 80
HERE = Path(__file__).resolve().parent
KEPT = HERE / "run"
FILES_READ = ("metrics.jsonl", "summary.json", "comm.json")
PICTURE = HERE / "run.svg"


def run() -> None:
    """Run the main job, and keep the files that its screen is drawn from."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([*COMMAND, f"hydra.run.dir={place}/run"], check=True)
        KEPT.mkdir(exist_ok=True)
        for name in FILES_READ:
            shutil.copyfile(Path(place) / "run" / name, KEPT / name)


def draw() -> str:
    """The screen as SVG: what is said at the start, the last progress line, the panel."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=WIDTH, record=True, force_terminal=True, color_system="truecolor", highlight=False,
                          file=nowhere)  # fmt: skip
        summary = json.loads((KEPT / "summary.json").read_text())
        rows = [json.loads(line) for line in (KEPT / "metrics.jsonl").read_text().splitlines()]
        console.print(f"[bold]$ {' '.join(COMMAND)}[/]")
        console.print(starting(summary["world"], summary["dataset"]))
        for note in crowding(summary["world"], round(summary["world"] / summary["ranks_per_core"])):
            console.print(f"note: {note}")
        console.print(ProgressLine(summary["steps"], enabled=False).line(rows[-1], WIDTH))
        with _as_a_run() as directory:
            show(directory, console)
        return console.export_svg(title="parallelrun", unique_id="run")


@contextlib.contextmanager
def _as_a_run():
    """The kept files under the name that a run directory has, relative to where the command was typed."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        directory = Path("runs/gpt-ptdp-tp2pp2/20261122T024500Z-3f1c52")
        (place / directory).mkdir(parents=True)
        for name in FILES:
            if (KEPT / name).exists():
                shutil.copyfile(KEPT / name, place / directory / name)
            elif not name.startswith(("routing", "servers")):
                (place / directory / name).touch()
        os.chdir(place)
        try:
            yield directory
        finally:
            os.chdir(before)


if __name__ == "__main__":
    if "--run" in sys.argv[1:]:
        run()
    PICTURE.write_text(draw())
    print(f"written to {PICTURE}")
