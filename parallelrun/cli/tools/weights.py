"""`export` writes the weights of a run for other programs; `import` makes a checkpoint of other programs' weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallelrun.base.errors import EXIT_OK, Problem
from parallelrun.checkpoint.exchange.paths import check_paths
from parallelrun.report.records import find

if TYPE_CHECKING:
    from parallelrun.checkpoint.exchange.source import StoredModel

_FORMATS = {  # checked before torch is imported
    "hf": "a directory that transformers loads: config.json, safetensors, tokenizer",
    "peft": "the LoRA adapters alone, which peft loads",
    "safetensors": "safetensors with one-device names, and config.yaml",
    "torch": "a state_dict written by torch.save, and config.yaml",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(words: list[str]) -> int:
    """`parallelrun export RUN OUT [--format hf] [--dtype bf16] [--shard-gb 5]`."""
    parser = argparse.ArgumentParser("parallelrun export", description="Write the weights of a run for other programs.")
    parser.add_argument("run", help="a run (directory, latest or name): its newest checkpoint; a checkpoint; an export")
    parser.add_argument("out", help="the directory to write; it must not exist")
    listed = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    parser.add_argument("--format", choices=list(_FORMATS), default="hf", help=f"{listed} (default: hf)")
    parser.add_argument("--dtype", choices=list(_DTYPES), help="number format of the weights (default: as stored)")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest safetensors file in GB (default: 5)")
    options = parser.parse_args(words)
    run = str(find.directory_of(options.run))
    too_small = Problem(f"--shard-gb {options.shard_gb:g}: a positive number is needed", "--shard-gb")
    check_paths(run, "run", options.out, [] if options.shard_gb > 0 else [too_small])
    import torch

    from parallelrun.checkpoint.exchange import export as writer
    from parallelrun.checkpoint.exchange.source import open_source

    source = open_source(run, "run")
    dtype = getattr(torch, _DTYPES[options.dtype]) if options.dtype else None
    writer.export(source, Path(options.out), options.format, dtype, int(options.shard_gb * 1e9))
    _print_left_out(source)
    print(f"written: {options.out} ({source.spec.num_parameters:,} parameters of {source.path})")
    return EXIT_OK


def import_weights(words: list[str]) -> int:
    """`parallelrun import DIR --to OUT`."""
    description = "Make a checkpoint of a Hugging Face directory or an export; start from it with init.from=OUT."
    parser = argparse.ArgumentParser("parallelrun import", description=description)
    parser.add_argument("directory", help="a directory with config.json and safetensors, or an export")
    parser.add_argument("--to", required=True, metavar="OUT", help="the checkpoint to write; it must not exist")
    options = parser.parse_args(words)
    check_paths(options.directory, "directory", options.to, out_key="--to")
    from parallelrun.checkpoint.exchange.export import write_checkpoint
    from parallelrun.checkpoint.exchange.source import open_source

    source = open_source(options.directory, "directory")
    write_checkpoint(source, Path(options.to))
    _print_left_out(source)
    print(f"written: {options.to} ({source.spec.num_parameters:,} parameters, model {source.spec.name})")
    print(f"train from it with: model.from_hf={options.directory} init.from={options.to}", file=sys.stderr)
    return EXIT_OK


def _print_left_out(source: StoredModel) -> None:
    from parallelrun.checkpoint.exchange.origin import left_out

    for text in left_out(source):
        print(f"note: {text}", file=sys.stderr)
