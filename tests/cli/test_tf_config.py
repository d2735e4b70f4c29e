"""A TensorFlow user's cluster: one process per task, each told by TF_CONFIG who it is; hosts that are not here."""

from __future__ import annotations

import json
import socket

from tests.cli.launcher import run_program

TINY = "model=gpt dataset=synthetic model.layers=1 model.hidden=16 model.heads=4 model.seq=8 global_batch=4"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environ(cluster, job, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def test_the_tasks_of_a_cluster_make_one_run(tmp_path):
    """A chief, a worker and a server; only the chief's address is used, as the store's."""
    cluster = {"chief": [f"localhost:{free_port()}"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
    words = [*TINY.split(), "strategy=ps", "consistency=async", "steps=2", "eval.batches=1"]
    tasks = [("chief", 0), ("worker", 0), ("ps", 0)]
    running = [run_program(tmp_path / job, words, environ(cluster, job, index), world=3) for job, index in tasks]
    assert [one.wait() for one in running] == [0, 0, 0], running[0].stderr
    chief = running[0]
    assert (chief.status["state"], chief.status["exit_code"]) == ("done", 0)
    plan = json.loads((chief.directory / "plan.json").read_text())
    assert [row["role"] for row in plan["ranks"]] == ["worker", "worker", "server"]
    assert "dp=2 (filled: 3 ranks launched, 1 server)" in plan["filled"]
    pushes = [json.loads(line) for line in (chief.directory / "apply_log.jsonl").read_text().splitlines()]
    assert len(pushes) == 2 * 2 and {push["pushes"][0]["worker"] for push in pushes} == {0, 1}


def test_when_the_strategy_has_no_servers_all_tasks_leave_with_the_chief_s_code(tmp_path):
    cluster = {"worker": [f"localhost:{free_port()}"], "ps": ["localhost:3"]}
    words = [*TINY.split(), "strategy=ddp"]
    tasks = [("worker", 0), ("ps", 0)]
    running = [run_program(tmp_path / job, words, environ(cluster, job, index), world=2) for job, index in tasks]
    assert [one.wait() for one in running] == [2, 2]
    assert "cluster.ps names 1 server, and strategy=ddp has none" in running[0].stderr


def test_other_hosts_get_their_commands_and_nothing_is_started(tmp_path):
    words = [*TINY.split(), "strategy=ps", "cluster.worker=[alpha:2222,beta:2222]", "cluster.ps=[gamma:2222]"]
    one = run_program(tmp_path / "here", words, {}, world=3)
    assert one.wait() == 3
    assert [line.partition(": env TF_CONFIG=")[0] for line in one.stdout.replace("'", "").splitlines()] == [
        "alpha", "beta", "gamma",
    ]  # fmt: skip
    assert "cannot start ranks on the others from here" in one.stderr and not one.runs.exists()


def test_a_cluster_on_this_host_is_started_whole(tmp_path):
    words = [*TINY.split(), "strategy=ps", "cluster.worker=[localhost:1,localhost:2]", "cluster.ps=[localhost:3]"]
    one = run_program(tmp_path / "here", [*words, "steps=1", "eval.batches=1"], {}, world=3)
    assert one.wait() == 0, one.stderr
    assert json.loads((one.directory / "summary.json").read_text())["world"] == 3
