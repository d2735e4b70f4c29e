"""The screen of `parallelrun top`: what the run is at, a line for each rank, and what has happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from parallelrun.report.figures import bytes_text
from parallelrun.report.records.live import LiveRun
from parallelrun.report.records.rows import STYLES
from parallelrun.report.screen import table

_SILENT_S = 10.0  # without progress, from which on a rank is marked
_BAR = 24
_FIXED = 8  # lines beside those of the ranks


def drawing(run: LiveRun, height: int) -> RenderableType:
    """Return the screen for a terminal of `height` lines."""
    parts: list[RenderableType] = [_headline(run), _progress(run)]
    if run.ranks:
        parts += ["", _ranks(run, max(3, height - _FIXED - len(run.events)))]
    elif run.is_live:
        parts.append(Text("no rank has reported yet", "dim"))
    if run.events:
        parts += ["", *(Text(_event(event), "yellow", overflow="fold") for event in run.events)]
    if run.error:
        rank = run.status.get("failed_rank")
        who = f"rank {rank}: " if rank is not None else ""
        parts += ["", Text(f"{who}{run.error}", "red", overflow="fold")]
    return Group(*parts)


def _headline(run: LiveRun) -> Text:
    text = Text("/".join(run.directory.parts[-2:]), "bold")
    text.append("  ")
    text.append(run.state, STYLES.get(run.state, ""))
    code = run.status.get("exit_code")
    if code is not None:
        text.append(f" (exit code {code})", "dim")
    if run.status.get("attempt"):
        text.append(f"  attempt {run.status['attempt']}", "dim")
    if run.is_live and run.age_s is not None and run.age_s > _SILENT_S:
        text.append(f"  no news for {run.age_s:.0f} s", "red")
    return text


def _progress(run: LiveRun) -> Text:
    done = int(_BAR * min(run.step / run.steps, 1.0)) if run.steps else 0
    text = Text()
    text.append("━" * done, "green")
    text.append("━" * (_BAR - done), "dim")
    text.append(f" step {run.step}{f'/{run.steps}' if run.steps else ''}")
    for name, form in (("loss", ".4f"), ("val_loss", ".4f"), ("tokens_per_s", ",.0f")):
        value = run.row.get(name)
        if isinstance(value, (int, float)):
            text.append(f"  {value:{form}} tokens/s" if name == "tokens_per_s" else f"  {name} {value:{form}}")
    return text


def _ranks(run: LiveRun, most: int) -> RenderableType:
    """A line for each rank; where there is no room for all, those that are slow, silent or behind come first."""
    first = max(int(_number(rank, "step")) for rank in run.ranks)  # metrics.jsonl may be newer than all these rows
    shown = sorted(run.ranks, key=lambda rank: (not _marks(rank, first), rank["rank"]))[:most]
    drawn = table(">rank", "host", ">step", "phase", ">tokens/s", ">step time", ">computing", ">waiting", ">memory", "")
    for rank in sorted(shown, key=lambda row: int(row["rank"])):
        marks = _marks(rank, first)
        drawn.add_row(*(Text(text) for text in _cells(rank)), Text(marks, "yellow"), style="yellow" if marks else "")
    left = len(run.ranks) - len(shown)
    return Group(drawn, Text(f"... and {left} more ranks, as expected", "dim")) if left else drawn


def _cells(rank: Mapping[str, Any]) -> list[str]:
    step_s = _number(rank, "step_s")
    parts = [_number(rank, name) / step_s if step_s else 0.0 for name in ("compute_s", "waiting_s")]
    return [
        str(rank["rank"]),
        str(rank.get("host", "")),
        str(rank.get("step", "")),
        escape(str(rank.get("phase", ""))),
        f"{_number(rank, 'tokens_per_s'):,.0f}" if step_s else "",
        f"{step_s * 1e3:,.0f} ms" if step_s else "",
        *(f"{part:.0%}" if step_s else "" for part in parts),
        bytes_text(_number(rank, "memory_bytes")) if rank.get("memory_bytes") else "",
    ]


def _marks(rank: Mapping[str, Any], step: int) -> str:
    """Return a note if a rank is slow, silent or late. step: of the rank that is furthest."""
    if rank.get("seen") is False:
        return "not seen: nothing of it in the run directory (does its host share the disk?)"
    silent, slow = _number(rank, "silent_s"), _number(rank, "slow")
    behind = step - int(_number(rank, "step"))
    notes = {
        f"slow: computes {slow:.1f} times as long as its like": slow > 0,
        f"silent for {silent:.0f} s": silent > _SILENT_S,
        f"{behind} steps behind": behind > 1,
    }
    return ", ".join(note for note, holds in notes.items() if holds)


def _number(rank: Mapping[str, Any], name: str) -> float:
    value = rank.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _event(event: Mapping[str, Any]) -> str:
    name = str(event.get("event", "")).replace("_", " ")
    ranks = event.get("ranks")
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    undone = f"; undone to step {event['undone_to']}" if event.get("undone_to") is not None else ""
    return f"step {event.get('step', '?')}: {name}{where}: {event.get('what', '')}{undone}"
