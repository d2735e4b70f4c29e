"""TensorBoard, Weights & Biases and MLflow: what a reader of their files finds, after a run and after its resumption.

All of them are written offline, in directories of the runs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras import needs
from tests.unit.report.trackers.run_directory import (
    begin,
    followed_to_end,
    interrupted_and_resumed,
    resumed,
    state_of,
)

LOSSES = [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.2), (6, 2 / 6), (7, 2 / 7), (8, 0.25)]  # 6 to 8: the second
SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of the runs. What trackers set in the environment of their process, this process forgets again."""
    for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING", "MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY",
                 "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return tmp_path


@needs("tensorboard")
def test_tensorboard_shows_every_step_of_a_resumed_run_once(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = interrupted_and_resumed(folder, "tensorboard", **{"tracker.group": "g"})
    assert not (second / "tensorboard").exists()
    reader = EventAccumulator(str(first / "tensorboard"))
    reader.Reload()
    expected = [*LOSSES[:3], (4, 0.5), (5, 0.4), *LOSSES[5:]]  # those that the second run has taken again are its own
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [
        (s, pytest.approx(v)) for s, v in expected
    ]
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
    }
    documents = {tag: json.loads(found[-1].strip("`\n")) for tag, found in texts.items()}
    assert documents["config"]["model"]["layers"] == 4 and documents["run"]["group"] == "g"
    assert documents["plan"]["dp"] == 2 and documents["plan"]["predicted_memory_bytes"] > 0
    assert documents["summary"]["state"] == "finished" and documents["summary"]["loss"] == 0.25


def records_of(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB, records in parts) after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_run(directory: Path) -> dict[str, Any]:
    """What the W&B file of a run directory says."""
    [path] = directory.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, Any] = {"loss": [], "config": {}, "summary": {}}
    for record in records_of(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found |= {"id": run.run_id, "name": run.display_name, "project": run.project, "group": run.run_group}
            found["tags"] = list(run.tags)
        updates = {"run": record.run.config, "config": record.config, "summary": record.summary}
        if kind in updates:
            target = found["summary" if kind == "summary" else "config"]
            target |= {item.key: json.loads(item.value_json) for item in updates[kind].update}
        if kind == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found["loss"].append((record.history.step.num or row["_step"], row["loss"]))
        if kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


@needs("wandb")
def test_wandb_resumes_one_run_offline_and_logs_no_step_twice(folder):
    keys = {"tracker.tags": ["a", "b"], "tracker.group": "g", "tracker.project": "p"}
    first, second = interrupted_and_resumed(folder, "wandb", **keys)
    before, after = wandb_run(first), wandb_run(second)
    assert before["id"] == after["id"] == state_of(second, "wandb")["identity"]["id"]
    assert [*before["loss"], *after["loss"]] == LOSSES
    for found in (before, after):
        assert (found["name"], found["project"], found["group"], found["tags"]) == ("gpt/first", "p", "g", ["a", "b"])
        assert found["config"]["model"]["layers"] == 4 and found["config"]["plan"]["dp"] == 2
    assert (before["summary"]["state"], before["exit_code"]) == ("failed", 6)
    assert (after["summary"]["state"], after["exit_code"], after["summary"]["loss"]) == ("finished", 0, 0.25)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not [path for path in files if path.name in ("wandb-metadata.json", "requirements.txt", "output.log")]


@needs("mlflow")
def test_mlflow_resumes_one_run_of_a_local_store_and_logs_no_step_twice(folder):
    interrupted_and_resumed(folder, "mlflow", **{"tracker.tags": ["a"], "tracker.group": "g", "tracker.project": "p"})
    other = begin(folder, "other", **{"tracker.project": "p", "tracker.name": "mine"})
    followed_to_end(other, "mlflow", [1], "preempted", 75)

    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("p")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {"gpt/first": "FINISHED", "mine": "KILLED"}
    run = runs["gpt/first"]
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == LOSSES
    assert run.data.params["model.layers"] == "4" and run.data.params["tracker.project"] == "p"
    tags = run.data.tags
    assert (tags["a"], tags["group"], tags["state"], tags["plan.dp"]) == ("true", "g", "finished", "2")
    assert run.data.metrics["summary.loss"] == 0.25 and float(tags["plan.predicted_memory_bytes"]) > 0
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config_from_step_4.json", "summary.json"}


@needs("mlflow")
def test_a_run_in_the_local_store_starts_again_in_another_store_and_goes_on_there(folder, monkeypatch):
    first = followed_to_end(begin(folder, "first"), "mlflow", [1, 2])
    server = folder / "elsewhere"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.as_uri())
    second = followed_to_end(resumed(first, "second", 2), "mlflow", [3])
    third = followed_to_end(resumed(second, "third", 3), "mlflow", [4])
    identities = [state_of(directory, "mlflow")["identity"] for directory in (second, third)]
    assert identities[0] == identities[1] and identities[0]["store"] is None  # resumed in its own store
    assert str(server) not in json.dumps(identities)  # an address may hold a password
