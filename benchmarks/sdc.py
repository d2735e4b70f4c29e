"""Silent data corruption: are wrong bits found, the rank named, the steps undone, and what does looking cost?

`python -m benchmarks.sdc --cases 500` plants faults of seeds 0, 1, ... in real trainings of one to four ranks, and
prints a table; `--plans tp3d,tp25d --cases 12` does so on grids of 8 ranks. `python -m benchmarks.sdc --cost` measures
the processor time of what `sdc.every=50` adds to a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from parallelrun.base.context import WorkerContext
from parallelrun.training.corruption.watch import CorruptionWatch
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.corruption import (
    ACTIVATIONS,
    BASE,
    FLIP,
    GRADIENTS,
    PLANS,
    SEVERAL,
    STUCK,
    SUMS,
    WEIGHTS,
    Case,
    Outcome,
    Result,
    draw,
    judge,
    run,
    run_all,
)
from tests.plans import tiny_config, tiny_plan
from tests.pool import run_ranks

TOGETHER = 12  # cases in the same processes: to start them takes longer than a case
EVERY = 50
DOCS = Path(__file__).parent.parent / "docs" / "measured.md"
KINDS = {FLIP: "one bit", SEVERAL: "2 to 8 bits", STUCK: "stuck lane"}
PLACES = {
    ACTIVATIONS: "activations", GRADIENTS: "gradients in backward", SUMS: "final gradients", WEIGHTS: "stored weights",
}  # fmt: skip
SIZE: dict[str, Any] = {  # the model that `parallelrun model=gpt` trains (with hidden 64), and its batch
    "model.layers": 4, "model.heads": 4, "model.seq": 64, "model.vocab": 256, "dataset.vocab": 256,
    "global_batch": 48, "optimizer.name": "adamw", "steps": 10**6, "sdc.every": EVERY,
}  # fmt: skip
SMALL = [plan for plan in PLANS if plan not in ("tp3d", "tp25d")]  # 8 ranks on two cores: minutes a case
COSTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="the number of faults that have an effect")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--plans", default=",".join(SMALL), help="names of tests.corruption.PLANS, with commas")
    parser.add_argument("--cost", action="store_true", help="measure what looking costs instead")
    parser.add_argument("--hidden", default="64,128,256", help="sizes of the model for --cost, with commas")
    parser.add_argument("--rounds", type=int, default=20, help="steps and checks of each plan for --cost")
    parser.add_argument("--to", type=Path, help="append every case or plan to this file, as a line of JSON")
    parser.add_argument("--table", type=Path, help="write the table of docs/measured.md from the cases in this file")
    arguments = parser.parse_args()
    if arguments.table:
        return write_table(arguments.table)
    print(f"{time.strftime('%Y-%m-%d')}, {platform.node()}, Python {platform.python_version()}")
    if arguments.cost:
        hidden = [int(one) for one in arguments.hidden.split(",")]
        measure_cost(hidden, arguments.rounds, arguments.to)
    else:
        plant(arguments.cases, arguments.first, arguments.plans.split(","), arguments.to)


def plant(cases: int, seed: int, plans: list[str], to: Path | None) -> None:
    """Run seeds until `cases` faults had an effect; print how many were found, named, undone, by kind and place."""
    rows: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    while (missing := cases - sum(map(len, rows.values()))) > 0:
        drawn: dict[str, list[tuple[int, Case]]] = defaultdict(list)
        some = min(missing, TOGETHER * len(plans))  # few enough that a campaign cut short has faults of all plans
        for number in range(seed, seed + max(some, TOGETHER)):
            case = draw(number, plans)
            drawn[case.plan].append((number, case))
        seed += max(some, TOGETHER)
        for plan, of_plan in sorted(drawn.items()):
            for start in range(0, len(of_plan), TOGETHER):
                for number, case, outcomes in outcomes_of(plan, of_plan[start : start + TOGETHER]):
                    result = judge(case, clean(plan), outcomes)
                    if result.acted:
                        rows[_row(case)].append(result)
                    if to is not None:
                        note(to, number, case, result, outcomes)
    print(f"{'fault':22} {'looked for':20} {'cases':>5} {'found':>6} {'named':>6} {'ended right':>12}")
    for (kind, place, how), found in sorted(rows.items()):
        show(f"{kind}, {place}", how, found)
    show("all", "", [result for found in rows.values() for result in found])


def _row(case: Case) -> tuple[str, str, str]:
    how = "computed twice, N=1" if case.recompute else "every 2 to 4 steps"
    return case.fault.kind, case.fault.place, how


def show(fault: str, how: str, found: list[Result]) -> None:
    named, ended = sum(one.named for one in found), sum(one.ended for one in found)
    print(f"{fault:22} {how:20} {len(found):5} {sum(one.found for one in found):6} {named:6} {ended:12}")


def outcomes_of(plan: str, drawn: list[tuple[int, Case]]) -> Iterator[tuple[int, Case, list[Outcome]]]:
    """Run cases of one plan in the same processes; yield each with the outcomes of its ranks."""
    world = tiny_plan({**BASE, **PLANS[plan]}).world
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(world, run_all, [case for _, case in drawn], Path(folder), timeout=1800)
    for (number, case), *ranks in zip(drawn, *found):
        yield number, case, ranks


@cache
def clean(plan: str) -> list[Outcome]:
    """The run of a plan without a fault, and without looking for one."""
    over = {**BASE, **PLANS[plan]}
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(tiny_plan(over).world, run, over, None, Path(folder))


def note(to: Path, seed: int, case: Case, result: Result, outcomes: list[Outcome]) -> None:
    """Append a case to a file."""
    row: dict[str, Any] = {"seed": seed, "plan": case.plan, "every": case.every, "recompute": case.recompute}
    row |= {**vars(case.fault), **vars(result), "planted": outcomes[case.fault.rank].planted[:5]}
    row |= {"events": outcomes[0].events, "errors": [one.error for one in outcomes]}
    with to.open("a") as file:
        file.write(json.dumps(row) + "\n")


def measure_cost(hidden: list[int], rounds: int, to: Path | None) -> None:
    """Print the processor time of checks with `sdc.every=50` over that of training steps, on the slowest rank."""
    for name, over in [(plan, {**COSTS[plan], "model.hidden": size}) for size in hidden for plan in COSTS]:
        size = tiny_plan({**SIZE, **over}).spec.num_parameters
        found = run_ranks(2, costs, over, rounds, timeout=600)
        shares = [(rest + check / EVERY) / step for step, rest, check in found]
        step, rest, check = found[shares.index(max(shares))]
        print(
            f"{name:6} {size / 1e6:4.1f} million parameters: a step {step * 1e3:.1f} ms, its checksums "
            f"{rest * 1e3:.2f} ms, a check {check * 1e3:.1f} ms: {max(shares):.2%} at N={EVERY}",
            flush=True,
        )
        if to is not None:
            row = {"plan": name, "parameters": size, "step_s": step, "checksums_s": rest, "check_s": check}
            with to.open("a") as file:
                file.write(json.dumps({**row, "share": max(shares)}) + "\n")


def write_table(rows: Path) -> None:
    """Replace the table of docs/measured.md by that of a file of cases."""
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, rows.read_text().splitlines()):
        if row["acted"]:
            by_fault[KINDS[row["kind"]]].append(row)
    by_fault["all"] = [row for found in by_fault.values() for row in found]
    lines = ["| planted | cases | found in time | rank named | ended right |", "| --- | --- | --- | --- | --- |"]
    for fault, cases in sorted(by_fault.items(), key=lambda item: (item[0] == "all", item[0])):
        counts = [sum(case[key] for case in cases) for key in ("found", "named", "ended")]
        lines.append(f"| {fault} | {' | '.join(map(str, [len(cases), *counts]))} |")
    before, begin, rest = DOCS.read_text().partition("<!-- sdc -->\n")
    _, end, after = rest.partition("<!-- /sdc -->\n")
    assert begin and end, f"{DOCS} has no place for the table"
    DOCS.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def costs(over: dict[str, Any], rounds: int) -> tuple[float, float, float]:
    """Return medians of this rank's processor seconds: of a step, of its checksums, of a check. Measured in turns."""
    config, plan = tiny_config({**SIZE, **over}), tiny_plan({**SIZE, **over})
    training = build(config, plan, torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    with tempfile.TemporaryDirectory() as folder:
        context = WorkerContext(
            rank=training.mesh.rank, world=plan.world, local_rank=0, device=torch.device("cpu"), directory=Path(folder),
            heartbeat=lambda step, phase: None, stop_requested=lambda: False, save_failed=lambda step: None,
            console_owner=False,
        )  # fmt: skip
        watch = CorruptionWatch(training, scaler, context, 0)
        times: dict[str, list[float]] = defaultdict(list)
        for step in range(1, rounds + 3):
            marks = [time.process_time()]

            def before_update(training: Training, marks: list[float] = marks) -> None:
                marks.append(time.process_time())
                watch.before_update(training)
                marks.append(time.process_time())

            with watch.around_step(step):
                train_step(training, step, 1e-3, scaler, observe=before_update)
                marks.append(time.process_time())
            marks.append(time.process_time())
            watch.check(EVERY * step, saves=False)
            marks.append(time.process_time())
            began, looked, went_on, ended, rested, checked = marks
            times["step"].append(looked - began + ended - went_on)
            times["checksums"].append(went_on - looked + rested - ended)
            times["check"].append(checked - rested)
    step_s, checksums_s, check_s = (statistics.median(times[name][2:]) for name in ("step", "checksums", "check"))
    return step_s, checksums_s, check_s


if __name__ == "__main__":
    main()
