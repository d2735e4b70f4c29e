"""Draws docs/run.svg, the picture in the README: the screen of an example run, drawn from the files of a real one.

python docs/picture.py            # draw it from the files in docs/run/
python docs/picture.py --run      # first run the example and store its files in docs/run/
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

from parallelrun.launch.entry.start import starting
from parallelrun.launch.host.preflight import crowding
from parallelrun.report.progress import ProgressLine
from parallelrun.report.runs.final_panel import FILES, show

COMMAND = ["parallelrun", "model=gpt", "strategy=ptdp", "tp=2", "pp=2"]
WIDTH = 80
HERE = Path(__file__).resolve().parent
STORED = HERE / "run"
FILES_READ = ("metrics.jsonl", "summary.json", "comm.json")
PICTURE = HERE / "run.svg"


def run() -> None:
    """Run the example, and store the files from which its screen is drawn."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*COMMAND, f"hydra.run.dir={folder}/run"], check=True)
        STORED.mkdir(exist_ok=True)
        for name in FILES_READ:
            shutil.copyfile(Path(folder) / "run" / name, STORED / name)


def draw() -> str:
    """Return the screen as SVG: the lines at the start, the last progress line and the final panel."""
    with open(os.devnull, "w") as null:
        console = Console(width=WIDTH, record=True, force_terminal=True, color_system="truecolor", highlight=False,
                          file=null)  # fmt: skip
        summary = json.loads((STORED / "summary.json").read_text())
        rows = [json.loads(line) for line in (STORED / "metrics.jsonl").read_text().splitlines()]
        console.print(f"[bold]$ {' '.join(COMMAND)}[/]")
        console.print(starting(summary["world"], summary["dataset"]))
        for note in crowding(summary["world"], round(summary["world"] / summary["ranks_per_core"])):
            console.print(f"note: {note}")
        console.print(ProgressLine(summary["steps"], enabled=False).line(rows[-1], WIDTH))
        with _run_directory() as directory:
            show(directory, console)
        return console.export_svg(title="parallelrun", unique_id="run")


@contextlib.contextmanager
def _run_directory():
    """Copy the stored files to a temporary run directory, and yield its path relative to the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path("runs/gpt-ptdp-tp2pp2/20261122T024500Z-3f1c52")
        (folder / directory).mkdir(parents=True)
        for name in FILES:
            if (STORED / name).exists():
                shutil.copyfile(STORED / name, folder / directory / name)
            elif not name.startswith(("routing", "servers")):
                (folder / directory / name).touch()
        os.chdir(folder)
        try:
            yield directory
        finally:
            os.chdir(before)


if __name__ == "__main__":
    if "--run" in sys.argv[1:]:
        run()
    PICTURE.write_text(draw())
    print(f"written to {PICTURE}")
