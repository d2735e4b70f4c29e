"""Tokens/s over 1 to 8 ranks for each strategy, and what planning and verifying cost over the size of the world.

    python -m benchmarks.scaling                         # about fifteen minutes on two cores
    python -m benchmarks.scaling --strategy ddp,tp --ranks 1,2 --worlds 8,512 --verified 1,2 --name ""

Every cell is one `parallelrun bench` as a user types it. Strong scaling keeps the global batch; weak scaling gives
each rank as many samples as the single rank has. The ideal line is that of one rank times the number of ranks, up to
the cores of this machine: beyond them, ranks share cores and only the loss of rate is a result. Cells that a strategy
refuses (a 2D grid of two ranks by halves, for example) are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.pairs import write
from parallelrun.report import chart
from parallelrun.report.figures import digits

BATCH = 8  # samples a step of one rank, and of all ranks under strong scaling
MODEL = ["model.layers=8", "model.hidden=128", "model.seq=64", "dataset=synthetic"]
STRATEGIES: dict[str, Callable[[int], list[str]]] = {
    "ddp": lambda ranks: ["model=gpt", "strategy=ddp", f"dp={ranks}"],
    "ring": lambda ranks: ["model=gpt", "strategy=ring", f"dp={ranks}"],
    "horovod": lambda ranks: ["model=gpt", "strategy=horovod", f"dp={ranks}"],
    "zero2": lambda ranks: ["model=gpt", "strategy=zero2", f"dp={ranks}"],
    "fsdp": lambda ranks: ["model=gpt", "strategy=fsdp", f"dp={ranks}"],
    "tp": lambda ranks: ["model=gpt", "strategy=tp", f"tp={ranks}"],
    "tp2d": lambda ranks: ["model=gpt", "strategy=tp2d", f"tp={ranks}"],
    "1f1b": lambda ranks: ["model=gpt", "strategy=1f1b", f"pp={ranks}", f"microbatches={BATCH}"],
    "gshard": lambda ranks: ["model=moe_gpt", "model.experts=8", "strategy=gshard", f"ep={ranks}"],
}


def throughput(strategy: str, kind: str, ranks: int, steps: int) -> dict[str, Any] | None:
    """`parallelrun bench` of one cell; None if the plan is refused."""
    batch = BATCH * ranks if kind == "weak" else BATCH
    words = [*STRATEGIES[strategy](ranks), *MODEL, f"global_batch={batch}", f"bench.steps={steps}"]
    document = parallelrun("bench", *words, "--json")
    if document is None:
        return None
    bench = json.loads(document)["bench"]
    return {
        "case": f"{strategy}, {kind}", "degrees": ranks, "strategy": strategy, "kind": kind, "ranks": ranks,
        "tokens_per_s": bench["tokens_per_s"], "median_s": bench["median_s"], "command": " ".join(["bench", *words]),
    }  # fmt: skip


def parallelrun(*words: str) -> str | None:
    """What a command prints, run with one thread a rank in a folder of its own; None if its plan is refused."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        command = [sys.executable, "-m", "parallelrun", *words, f"runs={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ)
    if done.returncode == 2:
        return None
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def planning(world: int) -> dict[str, Any]:
    """Seconds of a whole `plan`, as a user waits for it, of the 1T model on `world` ranks: tp=8, pp=64 and dp."""
    degrees = ["tp=8", "pp=64", f"dp={world // 512}", f"global_batch={world // 8}"]
    return _seconds("plan", world, ["model=gpt_1t", "strategy=ptdp", *degrees])


def verifying(ranks: int) -> dict[str, Any]:
    """Seconds of a whole `verify` under data parallelism."""
    return _seconds("verify", ranks, [*STRATEGIES["ddp"](ranks), *MODEL, f"global_batch={BATCH}"])


def _seconds(verb: str, ranks: int, words: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    if parallelrun(verb, *words) is None:
        raise ValueError(f"{verb} refuses {' '.join(words)}")
    return {"case": verb, "degrees": ranks, "ranks": ranks, "seconds": time.perf_counter() - began}


def picture(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the figure as SVG: strong and weak scaling, and the costs of planning and verifying."""
    title = f"Scaling on {facts['cores']} cores, and the cost of a plan and of a proof"
    figure, panels = chart.panels(title, ["Strong scaling", "Weak scaling", "plan (gpt_1t)", "verify (gpt, ddp)"])
    names = list(dict.fromkeys(row["strategy"] for row in rows if "strategy" in row))
    for axes, kind in zip(panels, ("strong", "weak")):
        cells = [row for row in rows if row.get("kind") == kind]
        for style, name in enumerate(names):
            chart.line(axes, style, points((row for row in cells if row["strategy"] == name), "tokens_per_s"))
        single = [row["tokens_per_s"] for row in cells if row["ranks"] == 1]
        if single:
            ranks = sorted({row["ranks"] for row in cells})
            ideal = [(one, max(single) * min(one, facts["cores"])) for one in ranks]
            chart.line(axes, len(names), ideal, thick=True)
        chart.scale(
            axes, "x", "{:g}".format, log=True, base=2, ticks=sorted({row["ranks"] for row in cells}), label="ranks"
        )
        chart.scale(axes, "y", digits, from_zero=True, label="tokens/s")
    for axes, case in zip(panels[2:], ("plan", "verify")):
        cells = [row for row in rows if row["case"] == case]
        chart.line(axes, len(names) + 1, points(cells, "seconds"))
        chart.scale(axes, "x", digits, log=True, ticks=sorted({row["ranks"] for row in cells}), label="ranks")
        chart.scale(axes, "y", digits, from_zero=True, label="seconds of the command")
    legend = (*names, f"ideal up to {facts['cores']} cores", "seconds")
    notes = (f"torch {facts['torch']}, {facts['date']}; beyond {facts['cores']} ranks, ranks share cores",)
    return chart.svg(figure, legend, notes)


def points(rows: Iterable[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(ranks, value) of rows, by ranks."""
    return sorted((row["ranks"], row[key]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--worlds", default="512,1024,4096,16384,102400", help="multiples of 512")
    parser.add_argument("--verified", default="1,2,4,8")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--name", default="scaling", help="results/<date>-NAME.json and .svg; empty: do not write")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for strategy in arguments.strategy.split(","):
        for kind in ("strong", "weak"):
            for ranks in map(int, arguments.ranks.split(",")):
                row = throughput(strategy, kind, ranks, arguments.steps)
                text = f"{row['tokens_per_s']:10,.0f} tokens/s" if row else "   refused"
                print(f"{strategy:10}{kind:8}{ranks:3} ranks {text}", flush=True)
                rows += [row] if row else []
    for measure, worlds in ((planning, arguments.worlds), (verifying, arguments.verified)):
        for world in filter(None, worlds.split(",")):
            rows.append(measure(int(world)))
            print(f"{rows[-1]['case']:10}{int(world):>11,} ranks {rows[-1]['seconds']:8.2f} s", flush=True)
    if arguments.name:
        path = write(arguments.name, {"command": "python -m benchmarks.scaling"}, rows)
        drawing = path.with_suffix(".svg")
        measured = json.loads(path.read_text())["rows"]
        drawing.write_text(picture(measured, measured[-1]["environment"]))
        print(f"written to {path} and {drawing.name}")


if __name__ == "__main__":
    main()
