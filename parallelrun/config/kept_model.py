"""A run's own copy of what `model.path` names: config.json and the tokenizer's files, which outlive the original."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from parallelrun.config.from_hf import CONFIG_FILE
from parallelrun.config.schema.run_schema import Config

FOLDER = "model"  # in the directory of a run
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "vocab.txt",
)  # fmt: skip
GENERATION = "generation_config.json"
_OTHERS = ("chat_template.jinja", GENERATION)


def keep(config: Config, folder: Path) -> None:
    """Copy what describes the model of `model.path` into `folder`. Nothing if it names a class. Raises OSError."""
    source = Path(config.model.path or "").expanduser()
    if config.model.path is None or not source.exists():
        return
    (folder / FOLDER).mkdir(mode=0o700)
    names = (CONFIG_FILE, *TOKENIZER, *_OTHERS)
    files = {name: source / name for name in names} if source.is_dir() else {CONFIG_FILE: source}
    for name, file in files.items():
        if file.is_file():
            shutil.copyfile(file, folder / FOLDER / name)


def with_kept(config: Config, folder: Path) -> Config:
    """Return the configuration of the run in `folder` with its own copy in the place of the original."""
    copy = folder / FOLDER
    if config.model.path is None or not (copy / CONFIG_FILE).is_file():
        return config
    original, tokenizer = Path(config.model.path), config.dataset.tokenizer
    if tokenizer is not None and Path(tokenizer) in (original, original / TOKENIZER[0]):
        config = replace(config, dataset=replace(config.dataset, tokenizer=str(copy / TOKENIZER[0])))
    return replace(config, model=replace(config.model, path=str(copy)))
