"""The style sheet of a report: light and dark by `prefers-color-scheme`, readable on paper and on a narrow screen.

Series have colours s0 to s7 (after Okabe and Ito 2008, lighter on dark ground) and dashes, so that they are told apart
without colour too.
"""

from __future__ import annotations

NUM_COLOURS = 8
DASHES = ("", "7 4", "2 3", "8 3 2 3")

_LIGHT = ("#0072b2", "#c04a00", "#00795a", "#a8508a", "#7a5c00", "#2b7fb8", "#444444", "#8a3ffc")
_DARK = ("#5cb3f0", "#ff9d5c", "#46d3a4", "#f0a6d2", "#e6c34d", "#9fd8ff", "#cccccc", "#c6a3ff")

_BASE = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main,header,nav{max-width:1200px;margin:0 auto;padding:0 20px}
h1{font-size:24px;margin:28px 0 4px}
h2{font-size:19px;margin:36px 0 8px;padding-top:12px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:16px 0 4px}
p{margin:6px 0}
.quiet{color:var(--quiet)}
nav{padding-top:8px;padding-bottom:8px}
nav a{margin-right:14px;white-space:nowrap}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:3px solid var(--focus);outline-offset:2px}
.skip{position:absolute;left:-9999px}
.skip:focus{left:12px;top:8px;background:var(--ground);padding:6px 10px;z-index:1}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:6px 0;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--quiet)}
td{overflow-wrap:anywhere}
td:first-child{min-width:8em;overflow-wrap:break-word}
td.n,th.n{text-align:right}
td.n,th{white-space:nowrap}
td.bad{color:var(--bad);font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:12px 24px}
figure{margin:8px 0}
figure.big{overflow-x:auto}
figure.big>svg{min-width:720px}
figcaption{font-weight:600}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--ink);font:13px system-ui,sans-serif}
svg .tick{fill:var(--quiet)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round}
svg .band{opacity:.18;stroke:none}
svg .bar{stroke:var(--ground);stroke-width:1}
svg .inside{fill:#fff;font-size:11px;text-anchor:middle}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:4px 0;padding:0;list-style:none}
.legend svg{display:inline-block;width:30px;height:10px;margin-right:6px;vertical-align:middle}
details{margin:6px 0}
summary{cursor:pointer}
pre{background:var(--panel);padding:12px;overflow:auto;max-height:480px;font:13px/1.4 ui-monospace,monospace}
.k0{fill:#2265b5}.k1{fill:#12784f}.k2{fill:#12784f}.k3{fill:#8a6400}
@media print{pre{max-height:none}nav{display:none}}
"""


def style_sheet() -> str:
    """Return the CSS of the page."""
    light = _variables(_LIGHT, "#ffffff", "#1a1d21", "#59616b", "#dfe3e8", "#f4f6f8", "#0b5cad", "#b00020", "#0b5cad")
    dark = _variables(_DARK, "#14171b", "#e8eaed", "#a5adb8", "#363c44", "#1e2329", "#8cc4ff", "#ff8a80", "#ffd166")
    classes = "".join(
        f"svg .s{index}{{stroke:var(--c{index})}}svg .f{index}{{fill:var(--c{index})}}" for index in range(NUM_COLOURS)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{_BASE}{classes}"
    )


def _variables(colours: tuple[str, ...], *others: str) -> str:
    names = ("ground", "ink", "quiet", "line", "panel", "link", "bad", "focus")
    pairs = [*((f"c{index}", colour) for index, colour in enumerate(colours)), *zip(names, others)]
    return ";".join(f"--{name}:{colour}" for name, colour in pairs)
