"""Recipes that want to harm: each is refused with exit 2 in seconds, nothing of theirs runs, nothing is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from parallelrun.cli.main import main
from parallelrun.config import presets
from tests.matrix import FULL

DEADLINE_S = 5.0
EVIL_MODEL = "name: module\npreset: evil\nsource: {root}/evil.py:build\ndescription: {root}/outside\n"
EVIL_CODE = "open({marker!r}, 'w').close()\ndef build(*arguments, **named):\n    raise SystemExit(0)\n"


def choose(option: str, group: str = "model") -> str:
    return f"defaults:\n  - override /{group}: {option}\n"


def nest(text: str, depth: int) -> str:
    return "${" * depth + text + "}" * depth


def doubling(levels: int, times: int = 2) -> str:
    lines = ["model:", "  arguments:", "    a0: xxxxxxxxxx"]
    for level in range(1, levels):
        lines.append(f"    a{level}: '" + f"${{model.arguments.a{level - 1}}}" * times + "'")
    return "\n".join(lines) + "\n"


def doubling_nodes(levels: int) -> str:
    lines = ["model:", "  arguments:", "    a0: {x: 1, y: 2}"]
    for level in range(1, levels):
        below = f"${{model.arguments.a{level - 1}}}"
        lines.append(f"    a{level}: {{x: '{below}', y: '{below}'}}")
    return "\n".join(lines) + "\n"


# {climb} leads from the folder of our models to the folder with the evil one, {root} is that folder.
RUNS_CODE = {
    "a model of another folder": choose("{climb}/evil_model"),
    "a model at an absolute path": choose("{root}/evil_model"),
    "a model at a URL": choose("file://{root}/evil_model"),
    "a model in double quotes with escapes": choose('"\\x2e\\x2e/\\x2e\\x2e/evil_model"'),
    "a model with back slashes": choose("..\\..\\evil_model"),
    "a model over several lines": "defaults:\n  - override /model: >-\n      {climb}/evil_model\n",
    "a model that is two dots": choose("'..'"),
    "a model with a NUL": choose('"gpt\\0"'),
    "a model with an endless name": choose("g" * 5000),
    "a model by interpolation": "model:\n  description: '{climb}/evil_model'\n" + choose("${{model.description}}"),
    "a model from the environment": choose("${{oc.env:HOME}}"),
    "a list of models": "defaults:\n  - override /model: [gpt, '{climb}/evil_model']\n",
    "a model without override": "defaults:\n  - /model: {climb}/evil_model\n",
    "a model in a package": "defaults:\n  - override /model@hydra.launcher: gpt\n",
    "a group that climbs": "defaults:\n  - override /model/{climb}: evil_model\n",
    "a group of Hydra's, not overridden": "defaults:\n  - hydra/callbacks: evil\n",
    "a dataset of another folder": choose("{climb}/evil_model", "dataset"),
    "a strategy of another folder": choose("{climb}/evil_model", "strategy"),
    "a cluster of another folder": choose("{climb}/evil_model", "cluster"),
    "a parent recipe of another folder": "defaults:\n  - {climb}/evil_model\n",
    "a parent recipe of another folder, as a group": "defaults:\n  - /recipe: {climb}/evil_model\n",
    "a parent recipe in Hydra's package": "defaults:\n  - /recipe@hydra: quickstart\n",
    "a parent that is the primary configuration": "defaults:\n  - /config\n",
    "a parent that is another group's": "defaults:\n  - /model/gpt\n",
    "a parent that is the recipe itself": "defaults:\n  - theirs\n",
    "an instruction in a mapping": "model:\n  arguments:\n    a: {{_target_: evil.build}}\n",
    "an instruction in a list": "model:\n  arguments:\n    a: [[{{_target_: evil.build}}]]\n",
    "an instruction in dots": "model:\n  arguments:\n    a._target_: evil.build\n",
    "an instruction at the root": "_target_: evil.build\n",
    "an instruction for a strategy": "strategy:\n  demo: {{_target_: evil.build}}\n",
    "an instruction by interpolation": (
        "model:\n  arguments:\n    _target_: evil.build\noptimizer:\n  lr_scale: ${{model.arguments}}\n"
    ),
    "a module of its own": "model:\n  source: {root}/evil.py:build\n",
    "a module of its own, by interpolation": (
        "model:\n  description: {root}/evil.py:build\n  source: ${{model.description}}\n"
    ),
    "Hydra's launcher": "hydra:\n  launcher:\n    _target_: evil.build\n",
    "Hydra's callbacks": "hydra:\n  callbacks:\n    x:\n      _target_: evil.build\n",
    "Hydra's settings with a dot": "hydra.run.dir: {root}\n",
    "a Python object": "seed: !!python/object/apply:os.system ['touch {root}/ran']\n",
    "a tag by its full name": "seed: !<tag:yaml.org,2002:python/object/new:os.system> [x]\n",
}
RESOLVERS = {
    "oc.decode": "seed: ${{oc.decode:'1'}}\n",
    "oc.create": "model:\n  arguments: ${{oc.create:'{{_target_: evil.build}}'}}\n",
    "oc.select": "name: ${{oc.select:hydra.run.dir}}\n",
    "oc.dict.values": "model:\n  arguments:\n    a: ${{oc.dict.values:model}}\n",
    "now": "name: ${{now:%Y}}\n",
    "Hydra's node": "name: ${{hydra.run.dir}}\n",
    "a resolver in quotes": "name: '${{ oc.env:HOME }}'\n",
    "a resolver in a key": "model:\n  arguments:\n    '${{oc.env:HOME}}': 1\n",
    "a relative key": "name: ${{.model.name}}\n",
    "a key that is computed": "name: ${{model.${{name}}}}\n",
}
WRITES_OUTSIDE = {
    "a folder above": "runs: ../outside\n",
    "the home folder": "runs: ~/outside\n",
    "a quoted folder": 'runs: "\\x2fetc"\n',
    "a linked folder": "runs: link/x\n",
    "a cache of tokens": "dataset:\n  cache: {root}/outside\n",
    "by interpolation": "model:\n  description: {root}/outside\nruns: ${{model.description}}\n",
    "by interpolation, climbing": "model:\n  description: /../../outside\nruns: x${{model.description}}\n",
    "by pieces": "model:\n  description: '..'\nruns: ${{model.description}}/${{model.description}}/outside\n",
    "a tilde by interpolation": "model:\n  description: '~'\nruns: ${{model.description}}/outside\n",
    "the picture": "plot: {root}/picture\n",
    "the sweep's folder": "sweep:\n  directory: {root}/outside\n",
    "the sweep to go on with": "sweep:\n  resume: {root}/outside\n",
    "the run's name": "name: ../../outside\n",
    "the run's name by interpolation": "model:\n  description: ../outside\nname: ${{model.description}}\n",
    "the strategy's name": "strategy:\n  name: ../../outside\n",
    "the model's name": "model:\n  preset: ../../outside\n",
    "a NUL": 'runs: "runs\\0"\n',
}
BOMBS = {
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "an alias to itself": "seed: &a [*a]\n",
    "a merge key": "model: {{<<: {{source: x}}}}\n",
    "deep lists": "seed: " + "[" * 30_000,
    "deep mappings": "seed: " + "{{a: " * 10_000,
    "a long list": "optimizer:\n  betas: [" + "1," * 30_000 + "1]\n",
    "many keys": "model:\n  arguments:\n" + "".join(f"    a{i}: 1\n" for i in range(4000)),
    "a large file": "# " + "x" * 2_000_000,
    "a long number": "seed: " + "9" * 60_000 + "\n",
    "a long number in a mapping": "model:\n  arguments:\n    a: " + "9" * 60_000 + "\n",
    "a number in base 60": "seed: " + ":".join(["59"] * 5000) + "\n",
    "many documents": "---\nseed: 1\n" * 3000,
    "a doubled text": doubling(30).replace("{", "{{").replace("}", "}}"),
    "a tenfold text": doubling(9, times=10).replace("{", "{{").replace("}", "}}"),
    "a doubled mapping": doubling_nodes(30).replace("{", "{{").replace("}", "}}"),
    "a long chain": doubling(600, times=1).replace("{", "{{").replace("}", "}}"),
    "many interpolations in a text": "model:\n  description: '" + "${{seed}}" * 7000 + "'\n",
    "nested interpolations": "name: '" + nest("name", 300).replace("{", "{{").replace("}", "}}") + "'\n",
    "open interpolations": "name: '" + "${{" * 10_000 + "'\n",
    "nested keys": "name: '" + "${{a" * 400 + "}}" * 400 + "'\n",
    "itself": "seed: ${{seed}}\n",
    "each other": "seed: ${{steps}}\nsteps: ${{seed}}\n",
    "the model within the model": "model:\n  arguments:\n    a: ${{model}}\n",
    "twice each other": "name: ${{runs}}${{runs}}\nruns: ${{name}}${{name}}\n",
}
SIZES = {
    "layers": "model:\n  layers: 1000000000\n",
    "the most layers": f"model:\n  layers: {2**63 - 1}\n",
    "layers of an mlp": choose("mlp") + "model:\n  layers: 1000000000\n",
    "stages of a resnet": choose("resnet") + "model:\n  stages: [1000000000, 1, 1, 1]\n",
    "heads": "model:\n  heads: 1000000000\n  hidden: 1000000000\n",
    "heads that no width divides": "model:\n  heads: 999999937\n  hidden: 64\n",
    "the width": f"model:\n  hidden: {2**62}\n",
    "vocab": f"model:\n  vocab: {2**62}\n",
    "experts": choose("moe_gpt") + "model:\n  experts: 1000000000000\n",
    "ranks": "dp: 1000000000000\n",
    "stages": "pp: 1000000000\n",
    "tensor ranks": "tp: 1000000000\n",
    "servers": choose("ps", "strategy") + "servers: 1000000000\n",
    "the batch": f"global_batch: {2**61 - 1}\n",
    "microbatches": "global_batch: 1000000000000\nmicro_batch: 1\npp: 2\n",
    "steps": f"steps: {2**62}\n",
    "virtual stages": choose("interleaved", "strategy") + "virtual_stages: 1000000000\n",
    "nodes": "cluster:\n  nodes: 1000000000000\n  gpus_per_node: 1000000000000\n",
    "a demonstration": "strategy:\n  demo: {{dp: 1000000000000}}\n",
    "a grid": choose("tp2d", "strategy") + "grid: 1000000x1000000\n",
    "a depth": choose("tp25d", "strategy") + "depth: 1000000000\n",
    "an image": choose("resnet") + "model:\n  image: 1000000000\n",
    "rank of powersgd": f"strategy:\n  data: {{{{compression: powersgd, powersgd_rank: {2**50}}}}}\n",
}
MALFORMED = {
    "a missing value": "seed: ???\n",
    "nothing for a model": choose("null"),
    "no option": choose(""),
    "two models": choose("gpt") + "  - override /model: mlp\n",
    "control characters": "name: \x07\x1b[2J\n",
    "no text": "\udcff",
}
CASES = {
    f"{kind}: {name}": text
    for kind, table in {
        "runs code": RUNS_CODE, "resolver": RESOLVERS, "writes outside": WRITES_OUTSIDE, "bomb": BOMBS,
        "size": SIZES, "malformed": MALFORMED,
    }.items()
    for name, text in table.items()
}  # fmt: skip


# What others show, too: the same place named otherwise, the same growth of another value, a like limit of a key.
SHOWN_BY_OTHERS = {
    "runs code: a model with back slashes", "runs code: a model over several lines", "runs code: a model with a NUL",
    "runs code: a dataset of another folder", "runs code: a strategy of another folder",
    "runs code: a parent recipe of another folder, as a group", "runs code: a parent that is another group's",
    "runs code: an instruction in dots", "runs code: Hydra's callbacks", "runs code: a tag by its full name",
    "resolver: oc.select", "resolver: oc.dict.values", "resolver: Hydra's node", "writes outside: the home folder",
    "writes outside: by interpolation", "writes outside: the sweep to go on with", "writes outside: the model's name",
    "writes outside: a tilde by interpolation", "bomb: deep mappings", "bomb: a long number in a mapping",
    "bomb: a tenfold text", "bomb: each other", "bomb: nested keys", "size: the most layers",
    "size: layers of an mlp", "size: heads", "size: vocab", "size: tensor ranks", "size: stages", "size: steps",
    "size: a depth",
}  # fmt: skip
assert CASES.keys() >= SHOWN_BY_OTHERS


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working folder, and beside it what an attacker has put on the machine."""
    root = tmp_path / "machine"
    working = root / "working"
    working.mkdir(parents=True)
    (root / "outside").mkdir()
    (root / "evil_model.yaml").write_text(EVIL_MODEL.format(root=root))
    (root / "evil.py").write_text(EVIL_CODE.format(marker=str(root / "ran")))
    (working / "link").symlink_to(root / "outside")
    monkeypatch.chdir(working)
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.syspath_prepend(str(root))
    return root


def files_below(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in sorted(root.rglob("*"))}


@pytest.mark.parametrize("case", [case for case in CASES if FULL or case not in SHOWN_BY_OTHERS])
def test_a_hostile_recipe_is_refused(case, place, capsys):
    climb = os.path.relpath(place, presets.folder() / "model")
    text = CASES[case].format(climb=climb, root=place)
    (place / "working" / "theirs.yaml").write_bytes(text.encode(errors="surrogateescape"))
    before = files_below(place)
    begun = time.perf_counter()
    code = main(["run" if case.startswith("writes") else "plan", "recipe=./theirs.yaml"])
    elapsed = time.perf_counter() - begun
    shown = capsys.readouterr()
    assert code == 2, shown
    assert files_below(place) == before
    assert elapsed < DEADLINE_S
    assert shown.err.startswith("error: ") and "unexpected" not in shown.err and len(shown.err) < 20_000
    assert "\x1b" not in shown.err and "\x07" not in shown.err


def test_there_are_many_hostile_recipes():
    assert len(CASES) >= 80
