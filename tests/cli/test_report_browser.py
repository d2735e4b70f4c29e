"""The page in headless Chromium, where one is installed: both themes are drawn, and nothing is asked of a network."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from parallelrun.base.records import append_jsonl
from parallelrun.report.page.document import page
from parallelrun.report.records.read import read
from tests.unit.report.page.test_page import full_run

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
SCHEMES = {"dark": 0, "light": 1}  # Blink's preferredColorScheme

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")


def chromium(folder, *words: str) -> str:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--no-first-run",
             "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=1000,800"]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, *words, (folder / "report.html").as_uri()], capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Content Security Policy" not in done.stderr and "CONSOLE" not in done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    runs = [read(full_run(tmp_path / name, config={"dp": dp})) for name, dp in (("a", 2), ("b", 4))]
    (tmp_path / "report.html").write_text(page(runs, "two runs"))
    return tmp_path


def test_the_page_is_drawn_light_and_dark(folder):
    image = pytest.importorskip("PIL.Image", reason="pillow reads the screenshot")
    corners = {}
    for scheme, number in SCHEMES.items():
        picture = folder / f"{scheme}.png"
        chromium(folder, f"--blink-settings=preferredColorScheme={number}", f"--screenshot={picture}")
        drawn = image.open(picture).convert("RGB")
        corners[scheme] = drawn.getpixel((2, 2))
        assert len(drawn.getcolors(2**24)) > 50  # text and lines, not an empty page
    assert corners == {"light": (255, 255, 255), "dark": (20, 23, 27)}


def test_the_browser_keeps_every_section(folder):
    text = chromium(folder, "--dump-dom")
    for name in ("results", "training", "time", "communication", "experts", "memory", "differences", "configuration"):
        assert f'<section id="{name}">' in text
    assert text.count("<polyline") == 6  # two lines in two charts, and two in the legend


MEASURE = """<script>
const cut = [...document.querySelectorAll('.wide,.big')].filter(part => part.scrollWidth > part.clientWidth)
document.body.setAttribute('data-cut', cut.map(part => part.getAttribute('aria-label') || part.className).join())
</script>"""


@pytest.mark.parametrize("width", [1200, 1920])
def test_no_table_is_cut(tmp_path, width):
    sweep, runs = tmp_path / "sweep", []
    sweep.mkdir()
    for number in range(16):
        words = [f"strategy.data.worker_batches=[{number // 2},8]", "optimizer.lr=1e-05", f"seed={number % 2}"]
        words = [*words, f"model.router.aux_weight=0.0{number // 8}"]
        name = f"{number:03d}-horovod-dp2"
        append_jsonl(sweep / "results.jsonl", {"point": number, "directory": name, "overrides": words})
        config = {"optimizer.lr": 1e-5 * (number // 2), "seed": number % 2, "strategy.data": {"batches": words * 4}}
        summary = {"loss": 5.5 + number, "tokens_per_s": 12345.0 * number, "peak_memory_bytes": 2e8 * 1.1**number}
        runs.append(read(full_run(sweep / name, config=config, **summary)))
    policy, text = "default-src 'none'; style-src 'unsafe-inline'", page(runs, "long names")
    assert policy in text
    text = text.replace("<details", "<details open").replace(policy, "script-src 'unsafe-inline'")
    (tmp_path / "report.html").write_text(text.replace("</body>", f"{MEASURE}</body>"))
    assert 'data-cut=""' in chromium(tmp_path, f"--window-size={width},900", "--dump-dom")
