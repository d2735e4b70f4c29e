"""How much of a step waits for data, for every dataset, and the CPU time that reading takes in the background.

    python -m benchmarks.data --case text,mixture --steps 10 --name ""  # all cases: a few minutes on two cores

Each case is one run of `parallelrun` on one rank, with files made for it. `data_s` is what the rank waits for its
samples in a step (median over steps from the third); the bar is 2 % of the step. `read_cpu_s`: CPU time of a batch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.pairs import write
from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint.exchange.tokenizer import byte_files
from parallelrun.config import compose
from parallelrun.config.overrides import read
from parallelrun.data import open_dataset
from parallelrun.data.order import make_sampler
from parallelrun.data.tokenizing.tokenize import main as tokenize
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.reader import HostSamples

MOST = 0.02  # of a step
GPT = ["model=gpt", "model.layers=4", "model.hidden=128", "model.seq=128", "global_batch=16"]
BERT = ["model=hf", "model.path=BertForSequenceClassification", "model.hf={num_hidden_layers: 2, vocab_size: 257}"]
RESNET = ["model=resnet", "global_batch=32"]
Case = tuple[list[str], Callable[[Path], list[str]]]


def _texts(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, length))) for length in random.integers(2, 9, 500)]
    return [" ".join(random.choice(words, 400)) for _ in range(1000)]


def _text(folder: Path) -> list[str]:
    (folder / "a.txt").write_text("\n".join(_texts(folder)))
    return ["dataset=text", f"path={folder}/a.txt"]


def _jsonl(folder: Path) -> list[str]:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in _texts(folder))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "tokenizer.json").write_text(json.dumps(byte_files(128, None)["tokenizer.json"]))
    tokens = [f"tokenizer={folder}/tokenizer.json", f"dataset.cache={folder}/cache"]
    return ["dataset=text", f"path={folder}/a.jsonl.gz", *tokens]


def _parquet(folder: Path) -> list[str]:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"body": _texts(folder)}), folder / "a.parquet")
    return ["dataset=text", f"path={folder}/a.parquet", "dataset.column=body", f"dataset.cache={folder}/cache"]


def _labelled(folder: Path) -> list[str]:
    rows = [json.dumps({"text": text, "label": len(text) % 2}) for text in _texts(folder)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return ["dataset=labelled", f"path={folder}/rows.jsonl"]


def _custom(folder: Path) -> list[str]:
    rows = "torch.randint(256, (1000, 129))"
    (folder / "own.py").write_text(f"import torch\ndef build(): return [(row[:-1], row[1:]) for row in {rows}]\n")
    return ["dataset=custom", f"dataset.source={folder}/own.py:build", "model.vocab=256"]


def _megatron(folder: Path) -> list[str]:
    _text(folder)
    tokenize([f"{folder}/a.txt", f"output={folder}/tokens"])
    return ["dataset=megatron", f"path={folder}/tokens"]


def _mixture(folder: Path) -> list[str]:
    _text(folder)
    parts = f"[{{name: text, path: {folder}/a.txt, weight: 0.7}}, {{name: pystdlib, weight: 0.25}}"
    return ["dataset=mixture", f"dataset.mixture={parts}, {{name: synthetic, weight: 0.05}}]"]


def _mnist(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    for name, count in (("train", 2000), ("t10k", 500)):
        images, labels = random.integers(0, 256, (count, 28, 28), np.uint8), random.integers(0, 10, count, np.uint8)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())
    return ["dataset=mnist", f"path={folder}"]


def _cifar10(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = random.integers(0, 256, (400, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    return ["dataset=cifar10", f"path={folder}"]


def _imagefolder(folder: Path) -> list[str]:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(200):
        place = folder / f"class{number % 4}"
        place.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (96, 96, 3), np.uint8)).save(place / f"{number}.jpg")
    return ["dataset=imagefolder", f"path={folder}", "model.image=64"]


CASES: dict[str, Case] = {
    "pystdlib": (GPT, lambda folder: ["dataset=pystdlib"]),
    "text": (GPT, _text),
    "text, jsonl.gz by tokenizer.json": (GPT, _jsonl),
    "text, parquet": (GPT, _parquet),
    "chat": (GPT, lambda folder: ["dataset=chat"]),
    "labelled": (BERT, _labelled),
    "custom": (GPT, _custom),
    "megatron": (GPT, _megatron),
    "mixture": (GPT, _mixture),
    "synthetic tokens": (GPT, lambda folder: ["dataset=synthetic"]),
    "digits": (RESNET, lambda folder: ["dataset=digits"]),
    "mnist": (RESNET, _mnist),
    "cifar10": (RESNET, _cifar10),
    "imagefolder": (RESNET, _imagefolder),
}


def measure(case: str, steps: int) -> dict[str, Any]:
    """One run, and the CPU time of reading its batches."""
    model, make = CASES[case]
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        (folder / "files").mkdir()
        words = [*model, *make(folder / "files"), "dp=1"]
        options = [f"steps={steps}", "eval.every=0", "checkpoint.last=false", f"runs={folder}/runs"]
        command = [sys.executable, "-m", "parallelrun", *words, *options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        run = folder / "runs" / "latest"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
        cpu = _reading(words, steps)
    data, step = (statistics.median(row[key] for row in rows) for key in ("data_s", "step_time_s"))
    shown = [word.replace(name, "FOLDER") for word in words]
    return {
        "case": case, "step_s": step, "data_s": data, "share": data / step,
        "share_worst_step": max(row["data_s"] / row["step_time_s"] for row in rows),
        "read_cpu_s": cpu, "read_cpu_of_step": cpu / step, "steps": len(rows), "command": " ".join(shown),
    }  # fmt: skip


def _reading(words: list[str], steps: int) -> float:
    """CPU seconds of reading one global batch, the median of `steps` batches."""
    parsed, problems = read(words, False, "here")
    if problems:
        raise ConfigError(*problems)
    found, _ = compose.compose_once(compose.prepare(parsed, (), "run", False))
    config, plan = found.config, resolve(found.config, given=found.given)
    dataset = open_dataset(config, plan.spec)
    size = plan.batch.global_batch
    sampler = make_sampler(len(dataset.train), size, config.seed, dataset.train.shares)
    samples = HostSamples(dataset.train, sampler, 0, size, True, True, torch.float32)
    seconds = []
    for step in range(1, steps + 1):
        began = time.process_time()
        samples[step]
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="some of the cases, as they begin, with commas; default: all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--name", default="data", help="results/<date>-NAME.json; empty: do not write")
    arguments = parser.parse_args()
    asked = tuple(arguments.case.split(",")) if arguments.case else ("",)
    rows = []
    for case in CASES:
        if case.startswith(asked):
            row = measure(case, arguments.steps)
            rows.append(row)
            waits = f"waits {row['data_s'] * 1e3:.3f} ms for data, {row['share']:.2%}"
            reads = f"reading takes {row['read_cpu_s'] * 1e3:.2f} ms of CPU, {row['read_cpu_of_step']:.1%}"
            verdict = "" if row["share"] < MOST else f"  ABOVE {MOST:.0%}"
            print(f"{case:<34} step {row['step_s'] * 1e3:7.1f} ms  {waits}; {reads}{verdict}", flush=True)
    if arguments.name:
        print(write(arguments.name, {"peer": "none", "bar": MOST}, rows))


if __name__ == "__main__":
    main()
