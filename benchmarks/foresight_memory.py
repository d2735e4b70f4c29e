"""Score the predicted memory on plans that others have run: which of them fit a GPU, and how much they need.

    python -m benchmarks.foresight_memory                # every row; about two minutes on one core
    python -m benchmarks.foresight_memory --every 4

The rows are those of dev_ultrascale_3b (nanotron on H100), nothing is fitted on them. Status `oom` means failed or out
of memory: rows with more stages than layers failed for that reason, the others should be predicted not to fit. No row
that ran may be. The column mem_gib is compared with the tensors of the heaviest rank; it varies by some percent between
equal plans, as reserved memory does and allocated memory does not.

What nanotron does otherwise than this program (conf/stack/nanotron.yaml, `as_run`) was chosen with the published memory
in view; its runs with tp > 8 are shown apart, because they are a set of their own, as its times are.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from benchmarks.foresight import PUBLISHED, planned
from benchmarks.pairs import read_arguments, write
from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.resolve.resolve_config import resolve

SET = "dev_ultrascale_3b"
GIB = 2**30
HIGHEST_TP = 8  # inside a node
GROUPS = (("tp <= 8, ddp", True, "ddp"), ("tp <= 8, zero1", True, "zero1"),
          ("tp > 8, ddp", False, "ddp"), ("tp > 8, zero1", False, "zero1"))  # fmt: skip


def as_run(config: Config, row: dict[str, str]) -> Config:
    """With nanotron's cuts into stages. Its backward reuses what column products gathered; above HIGHEST_TP the runs
    gathered again."""
    overlap = int(row["tp"]) > HIGHEST_TP
    tensor = replace(config.strategy.tensor, overlap=overlap)
    pipeline = replace(config.strategy.pipeline, split=cuts(row))
    return replace(config, strategy=replace(config.strategy, tensor=tensor, pipeline=pipeline))


def cuts(row: dict[str, str]) -> list[str]:
    """The first block of every stage but the first: a stage ends with the block that takes the sum of costs (of
    products alone) above its share. Where nothing is left for the last stages, they get one block each."""
    hidden, ffn, vocab, layers, stages = (int(float(row[key])) for key in ("h", "ffn", "V", "L", "pp"))
    names = ["embedding", *(f"layers.{number}" for number in range(layers)), "head"]
    sums = list(accumulate([0, *([4 * hidden**2 + 3 * hidden * ffn] * layers), vocab * hidden]))
    cuts: list[str] = []
    for name, total in zip(names[1:], sums, strict=False):
        if len(cuts) < stages - 1 and total > sums[-1] * (len(cuts) + 1) / stages:
            cuts.append(name)
    for name in reversed(names):
        cuts += [name] if name not in cuts and len(cuts) < stages - 1 else []
    return sorted(cuts, key=names.index)


@dataclass(frozen=True)
class Row:
    """A published row. ran: its status is ok. predicted_gib: tensors of the heaviest rank. fits: yes | no | unknown;
    empty where it has more stages than layers."""

    name: str
    data: str
    inside_node: bool
    ran: bool
    measured_gib: float | None = None
    predicted_gib: float | None = None
    fits: str = ""

    @property
    def may_be_memory(self) -> bool:
        return bool(self.fits) and not self.ran


def rows_of(every: int = 1) -> Iterator[Row]:
    """The rows of the set, ran or failed; only each `every`-th."""
    with open(PUBLISHED / f"{SET}.csv", newline="") as file:
        published = list(csv.DictReader(file))
    yield from map(predicted, published[::every])


def predicted(row: dict[str, str]) -> Row:
    """The row with its prediction."""
    known = Row(row["name"], row["data"], int(row["tp"]) <= HIGHEST_TP, row["status"] == "ok")
    try:
        plan, config = planned(row)
        plan = resolve(as_run(config, row))
    except ConfigError:
        return known
    whole = max(prediction.memories(plan, config.cluster).values(), key=lambda memory: memory.tensors)
    measured = float(row["mem_gib"]) if row["mem_gib"] else None
    fits = cluster_cost.fits(whole, config.cluster)
    return replace(known, measured_gib=measured, predicted_gib=whole.tensors / GIB, fits=fits)


def scores(rows: Iterable[Row]) -> dict[str, Any]:
    """Errors of the heaviest rank's tensors, of rows that ran; and the verdicts on rows that ran and that failed."""
    rows = list(rows)
    errors = [row.predicted_gib / row.measured_gib - 1 for row in rows if row.predicted_gib and row.measured_gib]
    ran = [row for row in rows if row.ran and row.fits]
    failed = [row for row in rows if row.may_be_memory]
    return {
        "rows": len(rows),
        "mape": statistics.mean(map(abs, errors)) if errors else None,
        "median_error": statistics.median(errors) if errors else None,
        "ran": len(ran),
        "ran_called_impossible": sum(row.fits == "no" for row in ran),
        "failed": sum(not row.ran for row in rows),
        "failed_otherwise": sum(not row.ran and not row.may_be_memory for row in rows),
        "failed_predicted_no": sum(row.fits == "no" for row in failed),
        "failed_predicted_unknown": sum(row.fits == "unknown" for row in failed),
        "failed_predicted_yes": sum(row.fits == "yes" for row in failed),
    }


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for title, inside, data in GROUPS:
        yield title, [row for row in rows if row.inside_node == inside and row.data == data]
    yield "all", list(rows)


def main() -> None:
    arguments = read_arguments(__doc__, "foresight_memory", [SET], every="1")
    rows = list(rows_of(int(arguments.every)))
    print(f"{'rows':18}{'number':>7}{'MAPE':>8}{'median':>8}{'ran':>6}{'called no':>11}"
          f"{'failed':>8}{'otherwise':>11}{'no':>5}{'unknown':>9}{'yes':>5}")  # fmt: skip
    found = []
    for title, some in _groups(rows):
        score = scores(some)
        found.append({"case": title, **score})
        error = "" if score["mape"] is None else f"{score['mape']:8.1%}{score['median_error']:+8.1%}"
        print(f"{title:18}{score['rows']:7}{error:16}{score['ran']:6}{score['ran_called_impossible']:11}"
              f"{score['failed']:8}{score['failed_otherwise']:11}{score['failed_predicted_no']:5}"
              f"{score['failed_predicted_unknown']:9}{score['failed_predicted_yes']:5}")  # fmt: skip
    for row in rows:
        if row.fits == ("no" if row.ran else "yes"):
            gib = f"{row.predicted_gib or 0:.1f} GiB predicted, {row.measured_gib or 'failed'}"
            print(f"fits: {row.fits}; {row.data} {row.name}: {gib}")
    if arguments.name:
        print("written to", write(arguments.name, {"command": f"--every {arguments.every}"}, found))


if __name__ == "__main__":
    main()
