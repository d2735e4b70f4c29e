"""The tokenizer of a model, and its files for other programs: a token per byte, that of the run's data, or what came
with foreign weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from parallelrun.base.errors import CheckpointError, ConfigError, Problem
from parallelrun.checkpoint.exchange import origin
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.checkpoint.exchange.weights import CheckpointWeights
from parallelrun.checkpoint.files import write_json
from parallelrun.config import from_hf
from parallelrun.config.kept_model import GENERATION, TOKENIZER
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.tokenizing.tokenizer import (
    END_OF_TEXT,
    FILE,
    NUM_BYTES,
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
)
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import BYTES

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MASK = "[MASK]"


def files_of(source: StoredModel) -> dict[str, Path]:
    """The tokenizer's files of this model by their usual names: those in its directory, else the one that made its
    run's data, else those beside the weights that the run started from. Empty if there are none.

    Raises CheckpointError if the tokenizer of the data has changed since the run.
    """
    if files := _files_in(source.path):
        return files
    made = definitions.dataset(source.config).tokenizer(source.config)
    if made and made.path:
        _check_unchanged(source, made.path)
        return {**(_files_in(made.path.parent) if made.path.name == FILE else {}), FILE: made.path}
    if made and made.is_bytes:  # not the tokenizer of a class whose sizes alone are those of `model.path`
        source = replace(source, config=replace(source.config, model=replace(source.config.model, path=None)))
    return next(filter(None, map(_files_in, origin.directories(source))), {})


def _files_in(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in TOKENIZER if (folder / name).is_file()}


def _check_unchanged(source: StoredModel, path: Path) -> None:
    if not isinstance(source.weights, CheckpointWeights):
        return
    before = (source.weights.index.extra.get("dataset") or {}).get("tokenizer")
    now = find_tokenizer(str(path), "dataset.tokenizer").sha256
    if before not in (None, now):
        message = f"{path} has changed: its sha256 is {now}, and {source.path} was trained with that of {before}"
        raise CheckpointError(Problem(message, "dataset.tokenizer"))


def special_ids(source: StoredModel) -> dict[str, Any]:
    """The ids of special tokens that the directory of the model names, or one from which it comes; None where there are
    none, as for bytes. Raises ConfigError for a file that is no JSON."""
    for folder in origin.directories(source):
        contents = [origin.json_object(folder / name) for name in (origin.BASE_CONFIG, from_hf.CONFIG_FILE, GENERATION)]
        if ids := {key: content[key] for content in contents for key in SPECIAL_IDS if content.get(key) is not None}:
            return {**dict.fromkeys(SPECIAL_IDS), **ids}
    return dict.fromkeys(SPECIAL_IDS)


def is_bytes(source: StoredModel) -> bool:
    """Whether the tokens of this model are the bytes of texts."""
    return _was_bytes(source) and not files_of(source)


def with_own_tokenizer(source: StoredModel, config: Config) -> Config:
    """`config` for scoring this model: its text becomes tokens as in training. Raises ConfigError for another
    tokenizer than the model's."""
    definition, own = definitions.dataset(config), files_of(source).get(FILE)
    is_unset = config.dataset.tokenizer in (None, source.config.dataset.tokenizer)
    if own is not None and is_unset and definition.reads_tokenizer and not _was_bytes(source):
        return replace(config, dataset=replace(config.dataset, tokenizer=str(own)))
    used, wanted = definition.tokenizer(config), find_tokenizer(str(own), str(own)).sha256 if own else None
    if used and wanted and used.sha256 not in (wanted, BYTES):
        message = f"the data's tokenizer (sha256 {used.sha256}) is not the model's, {own} (sha256 {wanted})"
        raise ConfigError(Problem(message, "dataset.tokenizer", f"tokenizer={own}"))
    return config


def _was_bytes(source: StoredModel) -> bool:
    """Whether the run's data were bytes: an export of it has a tokenizer.json that gives the same tokens."""
    made = definitions.dataset(source.config).tokenizer(source.config)
    return made is not None and made.is_bytes


def write(source: StoredModel, out: Path) -> None:
    """Write the tokenizer's files, if the model has a tokenizer, and the settings of generation, if there are any."""
    files, special = files_of(source), special_ids(source)
    generation = next(
        filter(None, (origin.json_object(folder / GENERATION) for folder in origin.directories(source))), {}
    )
    if generation or any(code is not None for code in special.values()):
        write_json(out / GENERATION, {**generation, **special})
    for name, path in files.items():
        origin.copy(path, out / name)
    if set(files) == {FILE}:  # transformers asks for the second one
        write_json(out / "tokenizer_config.json", _config_file(source.spec.seq))
    if not files and is_bytes(source):
        end = NUM_BYTES if source.config.dataset.append_eod else None
        for name, content in byte_files(source.spec.seq, source.spec.mask_token, end).items():
            write_json(out / name, content)


def codec(source: StoredModel) -> Tokenizer:
    """The tokenizer of a model. Raises EnvironmentProblem without the package `tokenizers`, where that is needed."""
    files = files_of(source)
    if not files and not is_bytes(source):
        message = f"{source.path} has no tokenizer, and its dataset is not read as bytes"
        raise ConfigError(Problem(message, "text", f"tokens=[1,2,3], or {FILE} beside the weights"))
    path = str(files.get(FILE, source.path / FILE)) if files else BYTES
    return load_tokenizer(path, append_eod=False, where=path)


def byte_files(seq: int, mask_token: int | None, end: int | None = None) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a token per byte: byte-level BPE without merges.

    mask_token, end: the ids of the mask and of the end of a document, if there are any.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {_MASK: mask_token, END_OF_TEXT[0]: end}
    added = [
        {"id": code, "content": text, "special": True, **flags} for text, code in special.items() if code is not None
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(characters())}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
             "merges": []}  # fmt: skip
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}  # fmt: skip
    config = _config_file(seq) | ({"mask_token": _MASK} if mask_token is not None else {})
    return {FILE: tokenizer, "tokenizer_config.json": config}


def _config_file(seq: int) -> dict[str, Any]:
    """tokenizer_config.json."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq,
            "clean_up_tokenization_spaces": False}  # fmt: skip


def characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(NUM_BYTES) if byte not in printable)
    moved = {byte: NUM_BYTES + number for number, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(NUM_BYTES)]
