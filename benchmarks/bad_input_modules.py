"""Users' modules with odd attributes, functions and outputs, for the campaign of bad input."""

from __future__ import annotations

from pathlib import Path
from random import Random

NAMES = (
    "heads", "kv_heads", "sample_shape", "layer_role", "held", "kind", "uncompiled", "communicates", "compute_dtype",
    "hidden", "rate", "blocks", "spec", "module", "recompute", "own_values", "momentum", "block_names", "kept",
    "stages", "num_heads", "seq", "vocab", "loss", "before_split", "sample_part", "site", "over_ranks",
)  # fmt: skip
VALUES = (
    "nn.Sequential()", "nn.Linear(2, 2)", "'x'", "''", "b'x'", "None", "0", "-1", "2.5", "True", "10**30",
    "float('nan')",
    "()", "(3, 8, 8)", "(3, -8, 8)", "[3, 'x', 8]", "[[3]]", "{}", "{1: 2}", "torch.zeros(3)", "torch.Size([3, 8, 8])",
    "lambda *_: 3", "object()", "type", "nn.ModuleList()", "nn.Parameter(torch.zeros(2))", "range(3)", "slice(3)",
)  # fmt: skip
BUILDERS = (
    "return Net(vocab)", "return None", "return Net", "return 3", "return [Net(vocab)]", "raise SystemExit(3)",
    "raise KeyError", "return nn.Linear(64, vocab)", "return nn.Identity()", "return nn.Embedding(vocab, vocab)",
    "return torch.compile(nn.Linear(64, vocab))", "return nn.LSTM(64, vocab)", "return nn.Sequential()",
    "return nn.Sequential(nn.Embedding(vocab, 64), nn.Linear(64, vocab))", "raise RecursionError", "return Net(0)",
    "return nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.LazyLinear(vocab))", "1 / 0",
)  # fmt: skip
OUTPUTS = (
    "self.head(self.inner(x))", "x", "None", "(x, x)", "x.sum()", "self.head(x).argmax(-1)", "self.nosuch(x)",
    "self.head(x).tolist()", "x.item()", "self.head(self.inner(x)).cpu()", "self.head(self.inner(x)).to(torch.int64)",
    "self.head(self.inner(x))[None]", "self.head(self.inner(x)).detach()", "self.head(self.inner(x)).half()",
    "self.head(self.inner(x)).flatten()", "torch.zeros(1)", "exit(3)", "self.head(self.inner(x))[:, :0]",
)  # fmt: skip
FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.inner, self.head = {layers}
        {attributes}

    def forward(self, x):
        return {output}


def build(vocab{parameters}):
    {builder}
"""
LAYERS = (
    *3 * ("nn.Linear(64, 64), nn.Linear(64, vocab)",), "nn.Embedding(vocab, 64), nn.Linear(64, vocab)",
    "nn.Identity(), nn.Linear(64, vocab)", "nn.Dropout(0.5), nn.Linear(64, vocab)",
    "nn.BatchNorm1d(64), nn.Linear(64, vocab)", "nn.Conv2d(3, 64, 8), nn.Linear(64, vocab)",
    "nn.LayerNorm(64), nn.Linear(64, vocab, bias=False)",
)  # fmt: skip
OPTIONS = (
    "model.blocks=[inner,head]", "model.blocks=[head]", "model.blocks=[nosuch]", "model.blocks=['']", "model.blocks=[]",
    "model.blocks=['*']", "model.blocks=[inner,inner]", "model.roles={head: head}", "model.roles={inner: embedding}",
    "model.roles={'': head}", "model.roles={'*': norm}", "model.roles={inner: column_parallel, head: row_parallel}",
    "model.roles={head: 3}", "model.roles={head: nosuch}", "model.arguments={vocab: 3}", "model.arguments={nosuch: 3}",
    "model.arguments={vocab: null}", "pp=2", "tp=2", "cp=2", "recompute=full", "recompute=selective", "precision=bf16",
    "strategy=fsdp", "strategy=tp2d", "strategy=gpipe", "strategy=ps", "cluster=h100_dgx", "cluster=a100_dgx",
    "cluster=laptop", "tp=2 strategy.tensor.sequence_parallel=true", "dropout=0.5", "model.hidden=3", "model.seq=1",
    "detail=all", "model.vocab=7", "dataset=digits", "dataset=synthetic", "objective=tokens", "model.norm_samples=3",
)  # fmt: skip


def draw_module(random: Random) -> tuple[str, tuple[str, ...]]:
    """Return (the text of a file, the words of a command that plans its module)."""
    usual = random.random() < 0.7
    lines = [f"self.{random.choice(NAMES)} = {random.choice(VALUES)}" for _ in range(random.choice((0, 1, 1, 2, 3)))]
    text = FILE.format(
        layers=random.choice(LAYERS),
        attributes="\n        ".join(lines) or "pass",
        output=OUTPUTS[0] if usual else random.choice(OUTPUTS),
        parameters=random.choice((*9 * [""], ", **more", ", hidden=3", ", /", "=3")),
        builder=BUILDERS[0] if random.random() < 0.85 else random.choice(BUILDERS),
    )
    options = ["dataset=synthetic", "strategy=ddp", *random.sample(OPTIONS, random.choice((0, 0, 1, 1, 2, 3)))]
    return text, _words(options)


def _words(options: list[str]) -> tuple[str, ...]:
    given: dict[str, str] = {}
    for option in options:
        for word in option.split(" ") if option.startswith("tp=2 ") else [option]:
            given[word.partition("=")[0]] = word
    return ("plan", "model=module", "model.source=./odd.py:build", *given.values())


def write_module(folder: Path, text: str) -> None:
    """Write the file that the words of `draw_module` name."""
    (folder / "odd.py").write_text(text)
