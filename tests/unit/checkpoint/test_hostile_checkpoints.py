"""Checkpoints that a stranger has written: sealed with good checksums, and refused for what they say (exit 4).

Each row of `HOSTILE` changes a good checkpoint in one way. All are refused before any process starts: nothing runs,
nothing is written, the file is named, and no text of theirs reaches the terminal as anything but text.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint.find import complete_steps
from parallelrun.checkpoint.resume import choose, resolve_resume
from parallelrun.checkpoint.schema import MAX_INDEX_BYTES
from parallelrun.cli import errors as screen
from parallelrun.cli.main import main
from tests.checkpoints import written
from tests.plans import tiny_config, tiny_plan

DATA = "rank_00000.safetensors"
SMALL = {"model.layers": 1}
DATASET = {"name": "text", "fingerprint": "a" * 64}
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
CHANGES_THE_DISK = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate")
RUNS_CODE = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "exec")


def seal(path: Path, raw: str | bytes) -> None:
    """Write `raw` as the index, with the right sha256 in it."""
    raw = raw.encode() if isinstance(raw, str) else raw
    body = b'{"sha256": "' + b"0" * 64 + b'"' + raw
    digest = hashlib.sha256(body).hexdigest().encode()
    (path / "index.json").write_bytes(body[:12] + digest + body[76:])


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the index's JSON and seal it again."""

    def apply(path: Path) -> None:
        body = json.loads((path / "index.json").read_text())
        change(body)
        del body["sha256"]
        seal(path, ", " + json.dumps(body)[1:])

    return apply


def field(*keys: Any, value: Any) -> Callable[[Path], None]:
    """Replace one field of the index; Ellipsis as its value removes it, as a key it stands for any."""

    def change(body: dict[str, Any]) -> None:
        node: Any = body
        for key in keys[:-1]:
            node = node[next(iter(node)) if key is ... else key]
        if value is ...:
            del node[keys[-1]]
        else:
            node[keys[-1]] = value

    return index(change)


def header(change: Callable[[dict[str, Any]], Any], pad: int = 0) -> Callable[[Path], None]:
    """Change the header of the data file, and seal size and sha256 in the index."""

    def apply(path: Path) -> None:
        content = (path / DATA).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        fields = json.loads(content[8 : 8 + length])
        change(fields)
        text = json.dumps(fields).encode()
        replace_data(path, struct.pack("<Q", len(text)) + text + content[8 + length :] + bytes(pad))

    return apply


def replace_data(path: Path, content: bytes) -> None:
    (path / DATA).write_bytes(content)
    field("files", DATA, value=[len(content), hashlib.sha256(content).hexdigest()])(path)


def first(fields: dict[str, Any], kind: str = "model/") -> str:
    return next(key for key in fields if key.startswith(kind))


def rename(fields: dict[str, Any], old: str, new: str) -> None:
    fields[new] = fields.pop(old)


def pipe(path: Path) -> None:
    (path / "index.json").unlink()
    os.mkfifo(path / "index.json")


def instead(make: Callable[[Path], Any], name: str = "index.json") -> Callable[[Path], None]:
    """Remove a file and put something else in its place."""

    def apply(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return apply


def huge_file(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(2 * MAX_INDEX_BYTES)


def overlapping(body: dict[str, Any]) -> None:
    """Two parts of four rows' volume in all, which hold row 1 twice and the last row never."""
    tensor = body["tensors"][first(body["tensors"])]
    rows, width = tensor["shape"]
    other = "rank_00001.safetensors"
    body["files"][other] = body["files"][DATA]
    tensor["parts"] = [
        {"offsets": [0, 0], "sizes": [rows // 2, width], "file": DATA},
        {"offsets": [1, 0], "sizes": [rows // 2, width], "file": other},
    ]


def state(kind: str) -> Callable[[dict[str, Any]], Any]:
    """Remove one kind of the state of one parameter from the index, which is looked at before the data."""
    return lambda body: body["tensors"].pop(first(body["tensors"], f"optimizer/{kind}/"))


HOSTILE: dict[str, Callable[[Path], None]] = {
    # what is in the place of the index
    "a pipe": pipe,
    "a pipe as data": instead(os.mkfifo, DATA),
    "a folder": instead(os.mkdir),
    "a link to an endless device": instead(lambda file: file.symlink_to("/dev/zero")),
    "an index of half a gigabyte": instead(huge_file),
    "no JSON": lambda path: seal(path, ", nonsense"),
    "not UTF-8": lambda path: seal(path, b', "step": "\xff\xfe"}'),
    "deep lists": lambda path: seal(path, ', "plan": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "deep objects": lambda path: seal(path, ', "plan": ' + '{"a":' * 100_000 + "1" + "}" * 100_001),
    "not a number": lambda path: seal(path, ', "step": NaN}'),
    "a number of 10,000 digits": lambda path: seal(path, f', "step": {"9" * 10_000}}}'),
    "a key twice": lambda path: seal(path, ', "step": 3, "step": 4}'),
    # steps and what a training keeps
    "no extra.step": field("extra", "step", value=...),
    "no extra.global_batch": field("extra", "global_batch", value=...),
    "no extra.scaler": field("extra", "scaler", value=...),
    "no extra": field("extra", value=...),
    "extra is a list": field("extra", value=[]),
    "extra.step is text": field("extra", "step", value="3"),
    "extra.step is true": field("extra", "step", value=True),
    "extra.step is another": field("extra", "step", value=2),
    "a negative step": index(lambda body: (body.update(step=-1), body["extra"].update(step=-1))),
    "a step beyond all numbers": index(lambda body: (body.update(step=10**30), body["extra"].update(step=10**30))),
    "a step of 1.5": field("step", value=1.5),
    "a scale of text": field("extra", "scaler", "scale", value="1"),
    "an infinite scale": lambda path: seal(
        path, (path / "index.json").read_text()[76:].replace('"scale": 1.0', '"scale": 1e400')
    ),
    "no loss scaling counter": field("extra", "scaler", "applied_in_a_row", value=...),
    "scaler is a number": field("extra", "scaler", value=7),
    "a dataset of numbers": field("extra", "dataset", value={"name": 3, "fingerprint": 4}),
    "a dataset without a name": field("extra", "dataset", value={"fingerprint": "a"}),
    "settings of data that are a list": field("extra", "dataset", value={**DATASET, "settings": [1]}),
    "a setting of data that is a list": field("extra", "dataset", value={**DATASET, "settings": {"seed": [1]}}),
    "an escape as a setting of data": field("extra", "dataset", value={**DATASET, "settings": {"a": ESCAPE}}),
    "an escape as dataset": field("extra", "dataset", value={"name": ESCAPE, "fingerprint": "a" * 64}),
    "kept is text": field("extra", "kept", value="outer"),
    "global_batch is a list": field("extra", "global_batch", value=[8]),
    "clocks of text": field("extra", "clocks", value=["now"]),
    # the plan
    "plan is text": field("plan", value="dp=2"),
    "degrees are a list": field("plan", "degrees", value=[1, 2]),
    "degrees of text": field("plan", "degrees", "dp", value="2"),
    "an escape as plan": field("plan", "data", value=ESCAPE),
    "an escape as an axis": field("plan", "degrees", value={ESCAPE: 2}),
    "an escape as optimizer": field("optimizer", value=ESCAPE),
    # tensors and files
    "tensors are a list": field("tensors", value=[]),
    "a tensor without parts": field("tensors", ..., "parts", value=[]),
    "parts that overlap": index(overlapping),
    "a shape of text": field("tensors", ..., "shape", value="ab"),
    "a negative size": field("tensors", ..., "shape", value=[-1, -1]),
    "two hundred dims": field("tensors", ..., "shape", value=[1] * 200),
    "a dtype of Python": field("tensors", ..., "dtype", value="__builtins__"),
    "another dtype in the index": field("tensors", ..., "dtype", value="int32"),
    "an escape as tensor": index(lambda body: rename(body["tensors"], first(body["tensors"]), f"model/{ESCAPE}")),
    "a tensor of no parameter": index(lambda body: rename(body["tensors"], first(body["tensors"]), "model/nosuch")),
    "state without a parameter": index(
        lambda body: rename(body["tensors"], first(body["tensors"], "optimizer/"), "optimizer/exp_avg")
    ),
    "state that is missing": index(state("exp_avg_sq")),
    "an unknown field": index(lambda body: body.update(_target_="os.system")),
    "a file outside": index(lambda body: rename(body["files"], DATA, "../../../etc/passwd")),
    "a file without a checksum": field("files", DATA, value=[3]),
    "a pickle beside no index": instead(lambda file: (file.parent / "model.pt").write_bytes(b"cos\nsystem\n")),
    # the header of the data
    "another dtype in the data": header(lambda fields: fields[first(fields)].update(dtype="I32")),
    "half the width and twice the numbers": header(
        lambda fields: fields[first(fields)].update(dtype="F16", shape=[2 * fields[first(fields)]["shape"][0], 16])
    ),
    "a shape turned round": header(lambda fields: fields[first(fields)]["shape"].reverse()),
    "a tensor that is not in the data": header(lambda fields: fields.pop(first(fields))),
    "a tensor under two names": header(lambda fields: fields.update(other=fields[first(fields)])),
    "two tensors on the same bytes": header(
        lambda fields: fields[first(fields, "optimizer/exp_avg/")].update(
            data_offsets=fields[first(fields, "optimizer/exp_avg_sq/")]["data_offsets"]
        )
    ),
    "offsets of text": header(lambda fields: fields[first(fields)].update(data_offsets="ab")),
    "offsets beyond the file": header(lambda fields: fields[first(fields)].update(data_offsets=[2**40, 2**41])),
    "bytes that nobody owns": header(lambda fields: None, pad=64),
    "a header longer than the file": lambda path: replace_data(path, struct.pack("<Q", 2**60) + b"{}"),
    "a header of deep lists": lambda path: replace_data(
        path, struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000
    ),
    "an empty data file": lambda path: replace_data(path, b""),
}


@pytest.fixture(scope="module")
def watched():
    """What Python is asked to run or to change on the disk while the returned list is `armed`."""
    seen: list[str] = []
    armed = [False]

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if not armed[0]:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in RUNS_CODE or event in CHANGES_THE_DISK:
            seen.append(f"{event} {arguments}")

    sys.addaudithook(look)  # for good: it cannot be removed
    yield seen, armed
    armed[0] = False


def test_the_table_is_long_enough_and_the_untouched_one_is_good(tmp_path):
    assert len(HOSTILE) >= 60
    path = written(tmp_path / "step_3", tiny_plan(SMALL))
    index(lambda body: None)(path)
    header(lambda fields: None)(path)
    assert choose(tiny_config(SMALL, resume=str(path)), tiny_plan(SMALL)).path == path


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_named_and_changes_nothing(tmp_path, watched, name):
    path = written(tmp_path / "checkpoints" / "step_3", tiny_plan(SMALL))
    HOSTILE[name](path)
    config, plan = tiny_config(SMALL, resume=str(path)), tiny_plan(SMALL)
    seen, armed = watched
    began = time.monotonic()
    armed[0] = True
    with pytest.raises(CheckpointError) as caught:
        choose(config, plan)
    armed[0] = False
    assert time.monotonic() - began < 5 and seen == []
    text = screen.render(caught.value.problems)
    assert caught.value.exit_code == 4 and str(path) in text
    assert all(character.isprintable() or character == "\n" for character in text), text


def test_among_good_ones_it_is_skipped(tmp_path, caplog):
    folder = tmp_path / "runs" / "gpt" / "a" / "checkpoints"
    good = written(folder / "step_2", tiny_plan(SMALL))
    for name in ("a pipe", "deep lists", "an escape as plan"):
        HOSTILE[name](written(folder / f"step_{100 + len(os.listdir(folder))}", tiny_plan(SMALL)))
    assert list(complete_steps(folder)) == [2] and resolve_resume("latest", str(tmp_path / "runs")) == good
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("name", ["a pipe", "deep lists", "an escape as dataset", "another dtype in the data"])
def test_the_program_ends_with_4_and_makes_no_run(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    path = written(tmp_path / "step_3", tiny_plan(SMALL))
    HOSTILE[name](path)
    small = ["model.layers=1", "model.hidden=16", "model.heads=4", "model.seq=8", "dataset.vocab=32", "steps=9"]
    small += ["dataset=synthetic", "dataset.samples=64", "global_batch=8", "strategy=single", f"resume={path}"]
    assert main(small) == 4
    said = capsys.readouterr().err
    assert str(path) in said and "\x1b" not in said and "Traceback" not in said
    assert os.listdir(tmp_path) == ["step_3"]
