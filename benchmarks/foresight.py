"""Score the predicted time of a step on measurements that others have published: error, bias, order and regret.

    python -m benchmarks.foresight                       # every set; 20 seconds on one core
    python -m benchmarks.foresight --case fit_sc21_table1,dev_llmfoundry_a100 --every 4

A set is a file of published/ with the columns of its README. Constants may be fitted on those named fit_*; nothing is
fitted here. `constant`: the best single rate, in FLOP/s of a GPU, that one could have fitted on the set itself, for
comparison. Spearman's rank correlation and regret are within groups of alternatives: plans of one model, batch and
number of GPUs. Regret of the top 1 (3): how much longer the measured step of the plan predicted fastest (best of the
three predicted fastest) is than the fastest measured one. `held`: rows between the predicted p10 and p90.

Steps are predicted for the program that was measured (conf/stack, `STACKS`); `default`: MAPE of predictions for this
program. Rows with tp above 8, and those of runs that checked every collective, are also scored apart: see README.md.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pairs import read_arguments, write
from parallelrun.base.errors import ConfigError
from parallelrun.config import compose
from parallelrun.config.overrides import read
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.resolve_config import resolve

PUBLISHED = Path(__file__).parent / "published"
# The program of a set, by the first word of a row's `set`; this one where a set is not listed.
STACKS = {
    "SC21": "megatron_lm_2021", "vTrain": "megatron_lm_2021", "MCore": "megatron_core", "llmfoundry": "llm_foundry",
    "nanotron": "nanotron", "titan26": "torchtitan", "DGXC26": "nemo", "FP8NeMo": "nemo", "Qwen3": "megatron_core",
}  # fmt: skip
# Settings of it that a set has, and that a row's name tells. torchtitan's async tensor parallelism fuses gathers and
# reduce-scatters with products in forward, and half of those in backward (torch's micro-pipeline pass: patterns of one
# product). The runs of Qwen3 forced an even load (`--moe-router-force-load-balancing`).
SETTINGS = {
    "Qwen3": {"expert_imbalance": "1.0", "expert_overlap": "0"},
    "+1f1b overlap": {"expert_overlap": "1.0"},
    "A2A": {"rows_once_a_host": "false"},
    "async TP": {"tensor_overlap": "0.5"},
    "eager": {"fused_elementwise": "false", "norm_bytes": "[34,60]", "logit_bytes": "[14,18]"},
}
NODE = 8  # GPUs of the published machines whose runs checked collectives
# The machines that are not the usual ones of their GPU.
CLUSTERS = {"nanotron": "h100_efa", "titan26": "h100_hbm2e"}
CLUSTERS_OF_GPUS = {
    "A100": "a100_dgx", "H100": "h100_dgx", "H800": "h800", "H200": "h200", "B200": "b200", "GB200": "gb200",
    "GB300": "gb300", "V100": "v100_32gb",
}  # fmt: skip
MODEL_SIZES = {
    "hidden": "h", "layers": "L", "heads": "a", "kv_heads": "kv", "ffn": "ffn", "vocab": "V", "seq": "s",
}  # fmt: skip
PLAN_SIZES = {"world": "N", "tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "global_batch": "gbs", "micro_batch": "mbs"}
EXPERT_SIZES = {"experts": "experts", "expert_ffn": "efn", "shared_experts": "shared", "dense_layers": "dense"}
NUMBERS = (*MODEL_SIZES.values(), *PLAN_SIZES.values(), *EXPERT_SIZES.values(), "topk", "ep", "v")


@dataclass(frozen=True)
class Row:
    """One published measurement and its prediction, in seconds. kind: of the row, where a set has several; flops: of
    the model in one step, per GPU."""

    name: str
    group: str
    kind: str
    measured: float
    predicted: float
    p10: float
    p90: float
    flops: float


def sets() -> tuple[str, ...]:
    """The files with measured steps, those that were fitted first."""
    names = sorted(file.stem for file in PUBLISHED.glob("*.csv"))
    found = [name for name in names if "measured_s" in (PUBLISHED / f"{name}.csv").read_text().partition("\n")[0]]
    return tuple(sorted(found, key=lambda name: not name.startswith("fit_")))


def rows_of(name: str, every: int = 1, named: bool = True) -> Iterator[Row]:
    """The measured rows of a set that this program can plan; only each `every`-th. named: predicted for the program
    that was measured, else for this one."""
    with open(PUBLISHED / f"{name}.csv", newline="") as file:
        published = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    for row in published[::every]:
        try:
            plan, config = planned(row, named)
        except ConfigError:
            continue  # such as more stages than layers
        time = step_time(plan, config.cluster)
        assert time is not None, row
        flops = 3 * plan.spec.forward_flops * plan.batch.global_batch / plan.world
        seconds = float(row["measured_s"]), time.step_s, time.p10_s, time.p90_s
        yield Row(row["name"], row["group"], kind_of(row), *seconds, flops)


def kind_of(row: dict[str, str]) -> str:
    """What tells rows apart whose measured times depend on more than the plan (see README.md)."""
    if int(row["tp"]) > 8:
        return "tp > 8"
    return "stages over nodes" if _checked(row) else ""


def _checked(row: dict[str, str]) -> bool:
    """Whether a run checked every collective. The script that started nanotron's runs (run_multinode.sh) sets
    TORCH_DISTRIBUTED_DEBUG=DETAIL in its later version, not in the first; the driver (scripts/scaling_benchmarks.py)
    skips plans without stages that have run, and runs those with stages again. So do the times look: plans with stages
    on several nodes wait for their hosts, in proportion to tp, however small the microbatch."""
    return origin(row) == "nanotron" and int(row["pp"]) > 1 and int(row["N"]) > NODE


def origin(row: dict[str, str]) -> str:
    """The program of a published row, by the first word of its set."""
    return row["set"].partition("-")[0]


def stack_of(row: dict[str, str]) -> list[str]:
    """The overrides for the program of a row."""
    settings = {"checked_collectives": "true"} if _checked(row) else {}
    for words, changes in SETTINGS.items():
        settings |= changes if words in row["name"] or words == origin(row) else {}
    return [f"stack={STACKS.get(origin(row), 'parallelrun')}", *(f"stack.{key}={it}" for key, it in settings.items())]


def cluster_of(row: dict[str, str]) -> str:
    """The cluster file of a row. Raises KeyError for a GPU without one."""
    return CLUSTERS.get(origin(row)) or CLUSTERS_OF_GPUS[row["gpu"].partition("-")[0]]


def planned(row: dict[str, str], named: bool = True) -> tuple[Plan, Config]:
    """The plan of a published row, for its program (named) or this one. Raises ConfigError if it is not legal here."""
    number = {key: int(float(row.get(key) or key == "cp")) for key in NUMBERS}
    config, given = _composed(*_choices(row, number), *(stack_of(row) if named else ()))
    sizes: dict[str, Any] = {name: number[column] for name, column in MODEL_SIZES.items()}
    if "head_dim 128" in row.get("note", ""):
        sizes["head_dim"] = 128
    degrees: dict[str, Any] = {name: number[column] for name, column in PLAN_SIZES.items()}
    if number["experts"]:
        sizes |= {name: number[column] for name, column in EXPERT_SIZES.items()}
        sizes["router"] = replace(config.model.router, top_k=number["topk"])
        degrees["ep"] = number["ep"]
    config = replace(
        config,
        model=replace(config.model, **sizes),
        cluster=replace(config.cluster, inter_gb_s=float(row["inter"])),
        virtual_stages=number["v"] if config.schedule == "interleaved" else None,
        **degrees,
    )
    return resolve(config, given=given), config


@cache
def _composed(*overrides: str) -> tuple[Config, frozenset[str]]:
    """The configuration with these choices, without numbers, and the keys that are given with the numbers."""
    parsed, problems = read(list(overrides), False, "here")
    if problems:
        raise ConfigError(*problems)
    found, _ = compose.compose_once(compose.prepare(parsed, (), "plan", False))
    return found.config, found.given | {f"model.{name}" for name in MODEL_SIZES} | PLAN_SIZES.keys()


def _choices(row: dict[str, str], number: dict[str, int]) -> Iterator[str]:
    """The overrides of a row that are no numbers: few differ, and composing takes a quarter of a second."""
    yield f"model={'llama3_8b' if row['llama'] == '1' else 'gpt3_175b'}"
    yield f"model.tied_embeddings={str(row['tied'] == '1').lower()}"
    yield from (f"strategy=ptdp device=cuda recompute={row['recomp']} strategy.data.kind={row['data']}").split()
    yield f"strategy.tensor.sequence_parallel={str(row['sp'] == '1' and number['tp'] > 1).lower()}"
    yield from (f"precision={row['prec']} cluster={cluster_of(row)}").split()
    if number["experts"]:
        yield "strategy.expert.tp=1"  # Megatron's expert tensor parallel size
        yield from ["strategy.expert.kind=dropless", "model.expert_period=1", "model.experts=8", "model.router.top_k=2"]
        yield from ["model.expert_ffn=1024", "model.dense_layers=0", "model.shared_experts=0", "ep=1"]
    if number["pp"] > 1 and number["gbs"] // (number["mbs"] * number["dp"]) < number["pp"]:
        yield "schedule=gpipe"  # 1F1B needs a microbatch per stage here
    elif number["v"] > 1:
        yield "schedule=interleaved"


def scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Relative errors of predicted over measured, and what is made of them."""
    errors = [row.predicted / row.measured - 1 for row in rows]
    rate = statistics.median(row.flops / row.measured for row in rows)
    constant = [row.flops / rate / row.measured - 1 for row in rows]
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    several = [group for name, group in groups.items() if name and len(group) > 2]
    return {
        "rows": len(rows),
        "mape": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
        "p90": sorted(map(abs, errors))[math.ceil(0.9 * len(errors)) - 1],
        "constant_mape": statistics.mean(map(abs, constant)),
        "held": statistics.mean(row.p10 <= row.measured <= row.p90 for row in rows),
        "spread": statistics.mean(row.p90 / row.predicted - 1 for row in rows),
        "spearman": statistics.mean(map(_spearman, several)) if several else None,
        "regret_top1": statistics.mean(_regret(group, 1) for group in several) if several else None,
        "regret_top3": statistics.mean(_regret(group, 3) for group in several) if several else None,
    }


def _spearman(rows: Sequence[Row]) -> float:
    ranks = [_ranks([getattr(row, key) for row in rows]) for key in ("measured", "predicted")]
    return statistics.correlation(*ranks) if len(set(ranks[0])) > 1 < len(set(ranks[1])) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + values.count(value) / 2 for value in values]


def _regret(rows: Sequence[Row], first: int) -> float:
    chosen = sorted(rows, key=lambda row: row.predicted)[:first]
    return min(row.measured for row in chosen) / min(row.measured for row in rows) - 1


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The scores of stored results as the Markdown table of docs/measured.md."""
    head = ("set", "constants", "rows", "MAPE", "bias", "as this program", "constant rate", "between p10 and p90",
            "rank correlation", "regret of the first, of the best of three")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for one in results:
        order = ("", "") if one["spearman"] is None else (
            f"{one['spearman']:.2f}", f"{one['regret_top1']:.1%}, {one['regret_top3']:.1%}"
        )  # fmt: skip
        percents = (f"{one[key]:.1%}" for key in ("mape", "bias", "default_mape", "constant_mape"))
        lines.append((one["case"], one["constants"], str(one["rows"]), *percents, f"{one['held']:.0%}", *order))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    arguments = read_arguments(__doc__, "foresight", sets(), every="1")
    found = []
    print(
        f"{'set':40}{'rows':>5}{'MAPE':>8}{'bias':>8}{'default':>9}{'p90':>8}{'constant':>10}"
        f"{'held':>7}{'Spearman':>10}{'regret':>14}"
    )
    for name in arguments.case.split(","):
        rows = list(rows_of(name, int(arguments.every)))
        defaults = dict(cases(name, list(rows_of(name, int(arguments.every), named=False))))
        fitted = "fitted" if name.startswith("fit_") else "not fitted"
        for case, some in cases(name, rows):
            score = {**scores(some), "default_mape": scores(defaults[case])["mape"]}
            errors = {row.name: round(row.predicted / row.measured - 1, 4) for row in some}
            found.append({"case": case, "constants": fitted, **score, "errors": errors})
            print(line(case, score), flush=True)
    if arguments.name:
        print("written to", write(arguments.name, {"command": f"--every {arguments.every}"}, found))


def cases(name: str, rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    """A set, and each kind of its rows where it has several."""
    yield name, rows
    kinds = sorted({row.kind for row in rows})
    for kind in kinds if len(kinds) > 1 else ():
        yield f"{name}: {kind or 'other rows'}", [row for row in rows if row.kind == kind]


def line(case: str, score: dict[str, Any]) -> str:
    order = "" if score["spearman"] is None else (
        f"{score['spearman']:10.2f}{score['regret_top1']:7.1%}{score['regret_top3']:7.1%}"
    )  # fmt: skip
    return (
        f"{case:40}{score['rows']:5}{score['mape']:8.1%}{score['bias']:+8.1%}{score['default_mape']:9.1%}"
        f"{score['p90']:8.1%}{score['constant_mape']:10.1%}{score['held']:7.0%}{order}"
    )


if __name__ == "__main__":
    main()
