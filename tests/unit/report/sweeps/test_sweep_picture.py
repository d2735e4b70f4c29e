"""The sweep's one picture: what it takes from the run files, and that it is drawn from nothing else."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from parallelrun.base.records import append_jsonl, write_json
from parallelrun.report.sweeps import sweep_picture
from parallelrun.report.sweeps.sweep_picture import NUMBERS, PICTURE
from tests.unit.docs import docs_module


def run(sweep: Path, point: int, strategy: str, metrics: list[dict[str, Any]], **more: Any) -> None:
    """The files of one finished point. more: of its row; wire: (purpose, bytes[, every]) of comm.json."""
    place = sweep / f"{point:03d}-{strategy}"
    place.mkdir(parents=True)
    for row in metrics:
        append_jsonl(place / "metrics.jsonl", row)
    wire = [
        {"purpose": purpose, "wire_bytes": size, **({"every": every[0]} if every else {})}
        for purpose, size, *every in more.pop("wire", [("gradients", 100)])
    ]
    write_json(place / "comm.json", {"rows": wire})
    write_json(place / "summary.json", {"global_batch": 8, "steps": metrics[-1]["step"] if metrics else 0})
    overrides = more.pop("overrides", [f"strategy={strategy}", "world=4"])
    row = {"point": point, "state": "done", "directory": place.name, "overrides": overrides, "strategy": strategy}
    append_jsonl(sweep / "results.jsonl", {**row, "config_sha256": f"{point}", **more})


def steps(count: int, every: int = 2, samples: int = 8, **more: float) -> list[dict[str, Any]]:
    return [
        {"step": step, "samples": step * samples, "time_s": 0.5 * step, "loss": 5.0 - step}
        | ({"val_loss": 4.0 / step, **more} if step % every == 0 else {})
        for step in range(1, count + 1)
    ]


def sent(sweep: Path) -> dict[str, list[float]]:
    """Bytes sent until every evaluation."""
    return {one.label: [at.sent_bytes for at in one.with_measure("val_loss")] for one in sweep_picture.series(sweep)}


def test_every_point_is_a_series_by_what_is_varied(tmp_path):
    run(tmp_path, 0, "ddp", steps(6))
    run(tmp_path, 1, "ring", steps(4), wire=[("gradients", 30), ("gradients", 70), ("activations", 5)])
    found = sweep_picture.series(tmp_path)
    assert [one.label for one in found] == ["ddp", "ring"]
    evaluated = found[0].with_measure("val_loss")
    assert [at.step for at in evaluated] == [2, 4, 6] and evaluated[0].time_s == 1.0
    assert [at.measures["loss"] for at in found[0].measured] == [4.0, 3.0, 2.0, 1.0, 0.0, -1.0]
    assert sent(tmp_path) == {"ddp": [200, 400, 600], "ring": [210, 420]}
    assert evaluated[1].measures == {"loss": 1.0, "val_loss": 1.0}


def test_labels_name_every_key_that_varies_but_the_strategys(tmp_path):
    run(tmp_path, 0, "ps", steps(2), overrides=["strategy=ps", "consistency=sync"])
    run(tmp_path, 1, "ps2", steps(2), overrides=["strategy=ps", "consistency=async"])
    assert [one.label for one in sweep_picture.series(tmp_path)] == ["consistency=sync", "consistency=async"]


def test_control_traffic_is_no_training_traffic(tmp_path):
    run(tmp_path, 0, "ddp", steps(2), wire=[("gradients", 100), ("control", 7)])
    assert sent(tmp_path) == {"ddp": [200]}


def test_what_is_sent_every_few_steps_only_is_counted_when_it_is_sent(tmp_path):
    wire = [("sync", 1000, 4), ("partial", 1, 1), ("control", 7)]
    run(tmp_path, 0, "local_sgd", steps(10), wire=wire)
    assert sent(tmp_path) == {"local_sgd": [2, 1004, 1006, 2008, 3010]}  # the run's last step averages too


def test_updates_of_asynchronous_workers_are_parts_of_a_batch(tmp_path):
    """Four workers of 2 samples: an update is a quarter of a step in which all of them push and pull."""
    run(tmp_path, 0, "ps", steps(8, every=4, samples=2), wire=[("push", 60), ("pull", 40)])
    assert sent(tmp_path) == {"ps": [100, 200]}


def test_unfinished_points_torn_lines_and_numbers_that_are_none_are_left_out(tmp_path):
    rows = steps(6)
    rows[3]["val_loss"] = None
    run(tmp_path, 0, "ddp", rows)
    with open(tmp_path / "000-ddp" / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "val_lo')
    run(tmp_path, 1, "tp", steps(4), state="failed")
    append_jsonl(tmp_path / "results.jsonl", {"point": 2, "state": "skipped", "overrides": ["strategy=single"]})
    (found,) = sweep_picture.series(tmp_path)
    assert [at.step for at in found.with_measure("val_loss")] == [2, 6]


def test_where_nothing_was_evaluated_the_training_loss_is_drawn(tmp_path):
    run(tmp_path, 0, "ddp", [{"step": 1, "samples": 8, "time_s": 1.0, "loss": 2.0}])
    sweep_picture.write(tmp_path)
    found = texts((tmp_path / PICTURE).read_text())
    assert "training loss against time" in found and "validation loss against time" not in found


def test_losses_over_many_factors_are_drawn_in_factors(tmp_path):
    """A spike to 58 would flatten everything below it."""
    for name, losses in (("even", (2.0, 3.0, 1.0)), ("spike", (58.0, 2.0, 0.02))):
        rows = [{"step": n, "samples": 8 * n, "time_s": n, "loss": loss} for n, loss in enumerate(losses, 1)]
        run(tmp_path / name, 0, "ddp", rows)
        sweep_picture.write(tmp_path / name)
    assert {"0.1", "1", "10"} <= set(texts((tmp_path / "spike" / PICTURE).read_text()))
    assert "0.1" not in texts((tmp_path / "even" / PICTURE).read_text())


def test_a_long_run_is_drawn_by_means(tmp_path):
    run(tmp_path, 0, "ddp", steps(2000))
    sweep_picture.write(tmp_path)
    assert (tmp_path / PICTURE).stat().st_size < 100_000
    assert len((tmp_path / NUMBERS).read_text().splitlines()) == 2001


def test_without_a_finished_step_there_is_no_picture(tmp_path):
    run(tmp_path, 0, "ddp", [])
    assert sweep_picture.write(tmp_path) == [] and not (tmp_path / PICTURE).exists()


def test_without_matplotlib_the_numbers_are_written_all_the_same(tmp_path, monkeypatch):
    run(tmp_path, 0, "ddp", steps(6))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [path.name for path in sweep_picture.write(tmp_path)] == [NUMBERS]


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_shows_loss_against_time_and_bytes_and_accuracy_where_there_is_one(tmp_path):
    run(tmp_path, 0, "ddp", steps(6, val_top1=0.5))
    run(tmp_path, 1, "horovod", steps(6), wire=[("gradients", 2**30)], ranks_per_core=2.0, bubble_predicted=0.0)
    run(tmp_path, 2, "gpipe", steps(6), ranks_per_core=2.0, bubble_predicted=0.22)
    assert [path.name for path in sweep_picture.write(tmp_path)] == [PICTURE, NUMBERS]
    found = texts((tmp_path / PICTURE).read_text())
    for name in ("validation loss", "top-1 accuracy"):
        assert f"{name} against time" in found and f"{name} against bytes sent" in found
    assert {"ddp", "horovod", "seconds of training", "GiB sent by all ranks"} <= set(found)
    assert {"gpipe (22% bubble predicted)", "step time is no scaling measurement: ranks shared cores"} <= set(found)


def test_the_numbers_of_the_picture_are_in_its_csv(tmp_path):
    run(tmp_path, 0, "ddp", steps(4, val_top1=0.25))
    run(tmp_path, 1, "ring", steps(4))
    sweep_picture.write(tmp_path)
    text = (tmp_path / NUMBERS).read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 8
    assert rows[1] == {"point": "0", "label": "ddp", "crowded": "0", "step": "2", "time_s": "1.0", "sent_bytes": "200",
                       "loss": "3.0", "val_loss": "2.0", "val_top1": "0.25"}  # fmt: skip
    assert rows[0]["val_loss"] == rows[5]["val_top1"] == ""
    assert sweep_picture.to_svg(docs_module("data_axis").from_csv(text)) == (tmp_path / PICTURE).read_text()


def test_of_very_many_points_the_first_are_drawn_and_all_are_in_the_csv(tmp_path):
    for point in range(25):
        run(tmp_path, point, f"way{point}", steps(2))
    sweep_picture.write(tmp_path)
    found = texts((tmp_path / PICTURE).read_text())
    assert "way19" in found and "way20" not in found and any("5 more points" in text for text in found)
    assert "way24" in (tmp_path / NUMBERS).read_text()


def test_a_point_that_sends_nothing_is_drawn(tmp_path):
    run(tmp_path, 0, "single", steps(6), wire=[])
    run(tmp_path, 1, "ddp", steps(60))
    sweep_picture.write(tmp_path)
    found = texts((tmp_path / PICTURE).read_text())
    assert "single" in found and "0" in found
