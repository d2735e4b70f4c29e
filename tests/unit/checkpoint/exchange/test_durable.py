"""After a power failure too, what has its name is complete: files are synced before the rename, the folder after it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from parallelrun.checkpoint.exchange.export import export, write_checkpoint
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.data.megatron import write_indexed
from tests.exchange import make
from tests.unit.checkpoint.test_storage import save
from tests.unit.data.files import word_tokenizer


@pytest.fixture
def operations(monkeypatch) -> list[tuple[str, str]]:
    """(operation, path) of every sync and rename, in order."""
    log: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor: int) -> None:
        log.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda a, b: (log.append(("rename", str(b))), rename(a, b))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append(("rename", str(b))), replace(a, b))[1])
    return log


def check(operations: list[tuple[str, str]], target: Path) -> None:
    """Every file of the directory, and its names, are synced before the rename; the rename is synced after it."""
    place = operations.index(("rename", str(target)))
    before = [path for operation, path in operations[:place] if operation == "sync"]
    names = {Path(path).name for path in before}
    assert {path.name for path in target.iterdir()} <= names
    assert Path(before[-1]).parent == target.parent, "the names in the directory come last"
    assert ("sync", str(target.parent)) in operations[place:]


def test_a_checkpoint(tmp_path, operations):
    save(tmp_path)
    check(operations, tmp_path / "step_1")


@pytest.mark.parametrize("form", ["hf", "safetensors", "torch"])
def test_an_export_with_files_of_others(form, tmp_path, operations):
    export(make("LlamaForCausalLM"), tmp_path / "base", "hf", None, 10**9)
    word_tokenizer(tmp_path / "base" / "tokenizer.json")
    (tmp_path / "base" / "LICENSE").write_text("free")
    operations.clear()
    export(open_source(tmp_path / "base", "run"), tmp_path / "out", form, None, 4000)
    check(operations, tmp_path / "out")


def test_an_import(tmp_path, operations):
    export(make("LlamaForCausalLM"), tmp_path / "base", "hf", None, 10**9)
    (tmp_path / "base" / "LICENSE").write_text("free")
    operations.clear()
    write_checkpoint(open_source(tmp_path / "base", "run"), tmp_path / "out")
    check(operations, tmp_path / "out")


def test_token_files(tmp_path, operations):
    """The index comes last: with it the pair counts as complete."""
    write_indexed(tmp_path / "a", [[np.arange(5)]], np.dtype("<u2"), dict)
    names = [(operation, Path(path).name) for operation, path in operations]
    renamed = names.index(("rename", "a.bin"))
    assert {"a.bin.part", "a.json.part", "a.idx.part"} <= {name for _, name in names[:renamed]}
    assert [name for operation, name in names if operation == "rename"] == ["a.bin", "a.json", "a.idx"]
