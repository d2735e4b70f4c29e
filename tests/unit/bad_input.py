"""Seeded wrong command lines: keys with odd values, several wrong keys, typing errors, recipes, tools and flags."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from parallelrun.config.keys import PATH_KEYS, Key, known_keys

NUMBERS = (
    "nan", "inf", "-inf", ".nan", "1e400", "-1", "0", "1e-400", "99999999999999999999999", "-99999999999999999999",
    "1.5", "1e30", "true", "null", "''", '""', "[]", "[1,2]", "{}", "{a: 1}", "ü", "１２", "2x", "0x", "1_0", "~",
    "None", "4GB", "100MB/s", "10%", "1/2", "1e5", "-0.0", "9" * 400, "٣", "\u200b4", "80 GB", "'8'", "!!int 4",
    "<4>", "4;",
)  # fmt: skip
TEXTS = (
    "''", "null", "ü", "\U0001f600", "a b", "a/b/../c", "x" * 5000, "[]", "{}", "[a,b]", "{a: 1}", "1", "1.5",
    "true", "nan", "\\", "'", '"', "a=b", "$HOME", "${x}", "${oc.env:NOSUCH}", "a\nb", "\x1b[31m", "\x00", "%s",
    "{0}", "~", ":", "a:b", "#", "*", "&a", "!x", "|", "-", "--", "-1", "\ud800",
)  # fmt: skip
LISTS = (
    "1", "a", "''", "null", "{}", "{a: 1}", "[", "]", "[1", "[[1]]", "[nan]", "[null]", "[a,{b: 1}]", "[-1]",
    "[1.5]", "[true]", "['']", "[99999999999999999999999]", "[ü]", "true", "[[[[]]]]", "[inf,0.9]", "[0.9]",
    "[1,1,1]",
)  # fmt: skip
DICTS = (
    "1", "a", "''", "null", "[]", "[1]", "{", "{a}", "{a: {b: 1}}", "{1: 2}", "{a: nan}", "{'': 1}", "{ü: 1}",
    "true", "{a: [1]}", "{a: -1}", "{a: 99999999999999999999}", "{fp32: -1}", "{fp32: inf}", "{null: 1}",
)  # fmt: skip
PATHS = (
    "nosuch", "folder", "empty", "binary", "locked", "/proc/self/mem", "/dev/null", "/dev/zero", "fifo", "loop",
    "~nosuch/x", "", "nosuch/deep/er", "text.txt/x", "/root/../nosuch", "x" * 300, "broken.json", "list.json", "ü",
    "bad.safetensors",
)  # fmt: skip
VERBS = (
    ("run",), (), ("plan",), ("verify",), ("bench",), ("explain",), ("plan", "--json"), ("show", "quickstart"),
    ("slurm",), ("k8s",), ("sky",), ("-m",), ("plan", "-m"),
)  # fmt: skip
PRESETS = (
    (), ("strategy=fsdp", "dp=2"), ("strategy=tp2d", "tp=4"), ("strategy=ps", "dp=3"), ("strategy=ring", "world=4"),
    ("model=moe_gpt", "strategy=gshard", "dp=2", "ep=2"), ("model=resnet", "strategy=ddp", "dp=2"),
    ("strategy=horovod", "world=4"), ("cp=2", "tp=2"), ("cluster=h100_dgx", "tp=8"), ("recipe=quickstart",),
    ("model=bert", "strategy=tp"), ("model=mlp",), ("model=matmul", "strategy=tp2d", "tp=4"),
    ("strategy=diloco", "dp=2"), ("strategy=interleaved", "pp=2"), ("model=gpt3_175b", "tp=8", "pp=8"),
)  # fmt: skip
TOOLS = {
    "ls": ("nosuch", "keys extra", "--nosuch", "models --json x", "''"),
    "show": ("nosuch", "a b", "quickstart tp=x", "quickstart nosuch=1", "broken.yaml", "''", "folder", "--json"),
    "recipes": (
        "nosuch", "cp", "cp nosuch", "cp quickstart folder/nosuch/x", "cp quickstart locked", "validate",
        "validate nosuch", "validate folder", "validate binary", "validate broken.yaml types.yaml cycle_a.yaml",
        "ls extra", "cp quickstart empty.yaml", "validate fifo", "validate loop", "''",
    ),
    "runs": (
        "nosuch", "show", "show nosuch", "show folder", "ls runs=nosuch", "ls runs=binary",
        "ls --limit x", "show badrun", "ls runs=badruns", "''",
    ),
    "compare": (
        "", "a", "a b", "folder folder", "badrun badrun", "badrun badrun --fail-on", "badrun badrun --fail-on x",
        "badrun badrun --fail-on loss>x", "badrun badrun --fail-on nosuch>1%", "badrun badrun --nosuch",
        "a b --json",
    ),
    "report": (
        "", "nosuch", "folder", "badrun", "badrun --to nosuch/x.html", "badrun --to", "badrun --nosuch",
        "badruns --to locked/x",
    ),
    "plot": (
        "", "nosuch", "folder --x world --y loss", "badruns --x world --y tokens_per_s --to x.pdf", "badruns --x",
        "badrun --x nosuch --y nosuch", "badruns --x world --y loss --to nosuch/x.pdf",
        "badruns --x world --y loss --to x.xyz", "--x world",
    ),
    "slurm": (
        "", "nodes=x", "nodes=0 gpus_per_node=-1 time=x", "tp=2 nodes=2 gpus_per_node=x time=abc",
        "nodes=99999999999999999999 time=1:00:00 gpus_per_node=8", "tp=3 nodes=ü time=1",
        "tp=2 nodes=1 gpus_per_node=2 time=", "tp=2 nodes=1 gpus_per_node=2 time=1:00 partition= account='a b;rm'",
        "tp=x nodes=1 gpus_per_node=y time=z", "tp=2 node=1", "-m tp=1,2 nodes=1", "plan tp=2 nodes=1",
        "tp=2 nodes=1 gpus_per_node=2 time=99:99:99", "tp=2 nodes=٣ gpus_per_node=2 time=1:00:00",
        "tp=2 nodes=1 nodes=2 gpus_per_node=2 time=1:00:00",
    ),
    "k8s": (
        "", "nodes=x", "nodes=1 gpus_per_node=2 image= claim=",
        "tp=2 nodes=1 gpus_per_node=2 image='a b' claim='A_B'", "nodes=0 gpus_per_node=0 image=x claim=y",
        "tp=2 nodes=1 gpus_per_node=2 image=x claim=ü", "tp=2 nodes=1 gpus_per_node=2 image=x claim=y job_name=A_B",
    ),
    "sky": (
        "", "nodes=x accelerator= gpus_per_node=x bucket=",
        "tp=2 nodes=1 gpus_per_node=2 accelerator='a b' bucket=x",
        "tp=2 nodes=1 gpus_per_node=2 accelerator=H100 bucket=y://z",
        "tp=2 nodes=1 gpus_per_node=2 accelerator=H100:8 bucket=s3://b",
    ),
    "doctor": (
        "nosuch", "--nosuch", "-H", "-H ''", "--hostfile nosuch", "--hostfile folder", "--hostfile binary",
        "--hostfile hosts_bad", "-np x", "ranks=0", "--json x", "-H a:1,a:2", "-H localhost:-1",
        "--hostfile fifo",
    ),
    "calibrate": (
        "nosuch", "--nosuch", "name=", "name=a/b", "seconds=x", "device=gpu", "device=cuda", "--to nosuch/x", "x=1",
        "--json x", "ranks=x",
    ),
    "tokenize": (
        "", "nosuch", "text.txt", "text.txt to=nosuch/x tokenizer=nosuch", "folder",
        "binary tokenizer=broken.json to=x", "text.txt tokenizer=list.json to=x", "--nosuch",
        "text.txt --to x --tokenizer nosuch", "text.txt tokenizer=bytes to=locked/x", "fifo",
        "text.txt tokenizer=bytes to=x workers=x",
    ),
    "export": (
        "", "nosuch", "badrun", "badrun format=x", "badrun to=", "badrun --to x --format nosuch", "folder to=x",
        "badrun format=hf to=text.txt", "badckpt to=x",
    ),
    "import": (
        "", "nosuch", "folder", "badrun", "badhf", "badhf to=x", "binary to=x", "badhf to=text.txt", "badckpt to=x",
    ),
    "import-flags": (
        "", "nosuch", "folder", "binary", "empty", "broken.json", "list.json", "text.txt", "bad.sh", "bad.toml",
        "ds.json", "bad.sh tp=", "fifo", "acc.yaml",
    ),
    "generate": (
        "", "badrun", "nosuch hello", "badrun hello max_tokens=0 temperature=-1 top_k=x seed=-1 tp=0",
        "badrun hello nosuch=1 more=2", "badhf hello", "badckpt hello", "folder hello", "badrun tokens=x",
        "badrun tokens=[]", "badrun hello tokens=[1]", "badrun hello max_tokens=nan temperature=inf",
        "badrun hello max_tokens=99999999999999999999999999", "'' ''",
    ),
    "eval": (
        "", "nosuch", "badrun", "badrun split=x samples=0", "badrun samples=x split=y", "badrun tp=2", "badhf",
        "badckpt", "badrun dataset=nosuch", "badrun nosuch=1",
    ),
}  # fmt: skip
FLAGS = (
    "-np x", "-np 0", "-np -1", "-np", "-np 99999999999", "-H", "-H ''", "-H :4", "-H a:b", "-H localhost:0",
    "-H h1:1,h1:2", "-np 5 -H localhost:4", "--hostfile nosuch", "--hostfile folder", "--hostfile binary",
    "--hostfile hosts_bad", "--hostfile empty", "--hostfile fifo", "--hostfile locked",
    "-np 4 --hostfile hosts_bad -H x:1", "--ssh-port x -H localhost:2",
    "--ssh-config nosuch -H localhost:2", "--config-dir binary", "--config-dir folder", "-cd nosuch",
    "--cfg x", "-p nosuch.package --cfg job", "--json --json", "--trust=x", "-m", "-m tp=",
    "-m tp=1,,2", "-m tp=range(x)", "-m tp=range(1,2,0)", "-m tp=choice()", "-m optimizer.lr=interval(1,0)",
    "-m seed=range(0,10000000000)", "-m seed=range(0,1000000)", "-m tp=glob(*)", "-m optimizer.lr=interval(0,1)",
    "-m model=mlp,nosuch tp=x", "-m sweep.resume=nosuch tp=1,2", "-m sweep.directory=binary tp=1,2",
    "-m sweep.objective=zz hydra/sweeper=optuna seed=1,2", "hydra/sweeper=nosuch -m tp=1,2", "hydra.run.dir=binary",
    "hydra.run.dir=''", "hydra.sweep.dir=3 -m tp=1,2", "hydra.job.chdir=x",
)  # fmt: skip
WRONG = (
    ("tp=x", "tp"), ("steps=0", "steps"), ("seed=-1", "seed"), ("dropout=2", "dropout"),
    ("optimizer.lr=nan", "optimizer.lr"), ("name=a/b", "name"), ("recompute=some", "recompute"),
    ("device=gpu", "device"), ("bench.steps=0", "bench.steps"), ("optimizer.betas=[2]", "optimizer.betas"),
    ("model=nosuch", "model"), ("strategy=nosuch", "strategy"), ("precision=fp7", "precision"),
    ("nosuch=1", "nosuch"), ("tracker=zz", "tracker"), ("timeout_s=-1", "timeout_s"), ("pp=0", "pp"),
    ("global_batch=0", "global_batch"), ("dataset.val_fraction=nan", "dataset.val_fraction"),
    ("cluster.nodes=x", "cluster.nodes"), ("compile=2", "compile"), ("model.layers=0", "model.layers"),
    ("eval.every=-1", "eval.every"), ("checkpoint.keep=0", "checkpoint.keep"), ("layout=9d", "layout"),
    ("schedule=zz", "schedule"), ("verify.precision=fp16", "verify.precision"), ("recipe=nosuch", "recipe"),
    ("ep=0", "ep"), ("cp=-3", "cp"), ("micro_batch=-1", "micro_batch"), ("profile=[0]", "profile"),
    ("restarts=-1", "restarts"), ("gpus=x", "gpus"), ("bogus word", "bogus word"), ("--nosuch", "--nosuch"),
)  # fmt: skip
RECIPES = {
    "broken.yaml": "tp: [1\n", "list.yaml": "- tp\n", "scalar.yaml": "3\n", "empty.yaml": "", "null.yaml": "null\n",
    "tabs.yaml": "model:\n\tlayers: 3\n", "twice.yaml": "tp: 2\ntp: 4\n",
    "cycle_a.yaml": "defaults:\n  - cycle_b.yaml\n", "cycle_b.yaml": "defaults:\n  - cycle_a.yaml\n",
    "self.yaml": "defaults:\n  - self\n", "section.yaml": "model: 3\n", "nulls.yaml": "model: null\n",
    "deep.yaml": "model:\n  layers:\n    more: 3\n", "typo.yaml": "modle:\n  layers: 3\n",
    "types.yaml": "tp: eight\nsteps: 1.5\nseed: -1\n", "nan.yaml": "optimizer:\n  lr: .nan\n",
    "anchor.yaml": "a: *b\n", "keys.yaml": "1: 2\ntrue: 3\nnull: 4\n",
    "dates.yaml": "name: 2026-11-23\nseed: 12:30:00\n", "bom.yaml": "\ufefftp: 2\n",
    "crlf.yaml": "tp: 2\r\nsteps: x\r\n", "defaults.yaml": "defaults: 3\n",
    "defaults2.yaml": "defaults:\n  - override /model: [gpt, mlp]\n  - 3\n",
    "defaults3.yaml": "defaults:\n  - {a: {b: c}}\n  - _self_\n",
    "defaults4.yaml": "defaults:\n  - override /modle: gpt\n  - override /model: gtp\n",
    "complex.yaml": "? [a, b]\n: 3\n", "about.yaml": "about: 3\ntp: 2\n",
    "binary_tag.yaml": "name: !!binary aGVsbG8=\n", "set.yaml": "model: !!set {a, b}\n",
    "dotted.yaml": "model.layers: 3\n", "group.yaml": "strategy: fsdp\n", "list_value.yaml": "tp: [1, 2]\n",
    "float.yaml": "tp: 2.0\n", "big.yaml": "steps: 99999999999999999999999\n",
    "listless.yaml": "optimizer:\n  betas: 0.9\n", "missing.yaml": "tp: ???\n",
    "interp.yaml": "tp: ${pp}\npp: ${tp}\n", "interp2.yaml": "tp: ${nosuch.key}\n", "interp3.yaml": "tp: ${\n",
    "verb.yaml": "verb: bench\n", "hydra.yaml": "hydra:\n  run:\n    dir: /tmp/x\n",
    "preset.yaml": "strategy:\n  own_axis: zz\n", "demo.yaml": "strategy:\n  demo: {zz: 2}\n",
    "fill.yaml": "strategy:\n  fill_order: [zz]\n", "router.yaml": "strategy:\n  router: {zz: 2}\n",
    "roles.yaml": "model:\n  roles: {a: {b: c}}\n", "args.yaml": "model:\n  arguments: [1]\n",
    "mixture.yaml": "dataset:\n  name: mixture\n  mixture: [3]\n",
}  # fmt: skip


def write_files(root: Path) -> None:
    """Write the files that the cases name."""
    for name, text in RECIPES.items():
        (root / name).write_text(text)
    (root / "folder").mkdir()
    (root / "empty").write_text("")
    (root / "binary").write_bytes(bytes(range(256)) * 40)
    (root / "text.txt").write_text("some text\n" * 50)
    (root / "broken.json").write_text('{"a": ')
    (root / "list.json").write_text("[1, 2]")
    (root / "ds.json").write_text('{"train_batch_size": "x", "zero_optimization": {"stage": 9}, "fp16": 3}')
    (root / "acc.yaml").write_text("distributed_type: ZZ\nnum_processes: x\n")
    (root / "bad.sh").write_text("torchrun pretrain_gpt.py --tensor-model-parallel-size x --num-layers --bogus 3\n")
    (root / "bad.toml").write_text("[model\nname=3")
    (root / "bad.safetensors").write_bytes(b"\xff" * 100)
    (root / "hosts_bad").write_text("h1 slots=x\nh1:4\n slots=4\nh2 slots=-1\nü\n")
    (root / "locked").write_text("x")
    (root / "locked").chmod(0)
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to("loop")
    (root / "recipes_bad").mkdir()
    (root / "recipes_bad" / "b.yaml").write_text("tp: [")
    for name in ("badrun", "badruns/a", "badruns/b"):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("tp: [1\n" if name != "badruns/b" else "")
        (folder / "status.json.x").write_text("{")
        (folder / "summary.json").write_text("[]" if name == "badruns/a" else '{"loss": ')
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"st\nnull\n')
    hf = root / "badhf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "x", "num_hidden_layers": -1}))
    (hf / "model.safetensors").write_bytes(b'\x08\0\0\0\0\0\0\0{"a":3}x')
    step = root / "badckpt" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    (step / "index.json").write_text('{"step": "x"}')


@dataclass(frozen=True)
class Case:
    """A command line. names: what the message must contain; is_file: no fix but another file may exist."""

    family: str
    words: tuple[str, ...]
    names: tuple[str, ...] = ()
    is_file: bool = False
    may_torch: bool = False


def _value(random: Random, key: Key) -> str:
    if key.name in PATH_KEYS and random.random() < 0.7:
        return random.choice(PATHS)
    pools = {"int": NUMBERS, "float": NUMBERS, "list": LISTS, "dict": DICTS, "bool": NUMBERS, "str": TEXTS}
    if random.random() < 0.15:
        return random.choice(NUMBERS + TEXTS + LISTS + DICTS)
    return random.choice(pools.get(key.kind, NUMBERS + TEXTS))


def _one_key(random: Random) -> Case:
    key = random.choice(list(known_keys().values()))
    words = (*random.choice(VERBS), *random.choice(PRESETS), f"{key.name}={_value(random, key)}")
    return Case("one key", words, is_file=key.name in PATH_KEYS, may_torch=True)


def _many(random: Random) -> Case:
    chosen = random.sample(WRONG, random.choice((2, 2, 3, 4)))
    words = (*random.choice(VERBS[:6]), *(word for word, _ in chosen))
    return Case("many keys", words, tuple(name for _, name in chosen))


def _typo(random: Random) -> Case:
    name = random.choice([key.name for key in known_keys().values() if not key.is_of_presets])
    place = random.randrange(len(name))
    before, letter, after = name[:place], name[place], name[place + 1 :]
    typed = random.choice((before + after, before + 2 * letter + after, before + random.choice("aeiou_.-ü") + after))
    return Case("typo", (*random.choice(VERBS), f"{typed}=1"), ())


def _recipe(random: Random) -> Case:
    name = random.choice((*RECIPES, "nosuch.yaml", *PATHS[:8], "loop"))
    head = random.choice((*VERBS[:7], ("recipes", "validate"), ("show",)))
    is_tool = head in (("recipes", "validate"), ("show",))
    return Case("recipe", (*head, name if is_tool else f"recipe={name}"), is_file=True)


def _tool(random: Random) -> Case:
    tool = random.choice(list(TOOLS))
    return Case("tool", (tool, *shlex.split(random.choice(TOOLS[tool]))), is_file=True, may_torch=True)


def _flag(random: Random) -> Case:
    words = shlex.split(random.choice(FLAGS))
    return Case("flag", (*random.choice(((), ("plan",), ("run",), ("bench",))), *words), is_file=True, may_torch=True)


FAMILIES: Mapping[str, Callable[[Random], Case]] = {
    "many": _many, "one": _one_key, "typo": _typo, "recipe": _recipe, "tool": _tool, "flag": _flag,
}  # fmt: skip


def draw(seed: int) -> Case:
    """Return the case of a seed; the families take turns."""
    return list(FAMILIES.values())[seed % len(FAMILIES)](Random(seed))
