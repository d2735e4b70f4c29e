"""One HTML page about runs, for a browser without a network: no script, no font, no picture from elsewhere.

The same runs give the same page. The page forbids itself to load anything by its content security policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parallelrun.base.wording import counted
from parallelrun.report.page import schedules, sections
from parallelrun.report.page.style import style_sheet
from parallelrun.report.records.read import RunRecord
from parallelrun.report.records.run_differences import columns_of, compare

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(runs: Sequence[RunRecord], title: str) -> str:
    """Return the page. Raises ParallelrunError (exit 4) naming a broken file."""
    columns = sections.named(columns_of(runs))
    parts = [
        ("results", "Results", sections.overview(columns)),
        ("training", "Training", sections.curves(columns)),
        ("time", "Time of a step", sections.time_by_part(columns)),
        ("pipeline", "Pipeline", schedules.pipeline(columns)),
        ("communication", "Communication", sections.communication(columns)),
        ("experts", "Experts", sections.experts(columns)),
        ("memory", "Memory", sections.memory(columns)),
        ("differences", "Differences", sections.differences(compare(runs)) if len(runs) > 1 else ""),
        ("configuration", "Configuration", sections.configuration(columns)),
    ]
    shown = [part for part in parts if part[2]]
    links = " ".join(f'<a href="#{name}">{text}</a>' for name, text, _ in shown)
    body = "".join(f'<section id="{name}"><h2>{text}</h2>{html}</section>' for name, text, html in shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head><body>"
        '<a class="skip" href="#results">skip to the results</a>'
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="quiet">parallelrun report of {counted(len(runs), "run")}</p></header>'
        f'<nav aria-label="sections">{links}</nav><main>{body}</main></body></html>\n'
    )
