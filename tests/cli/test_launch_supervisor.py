"""Ranks that die, hang, raise or are interrupted: who is named, what is left behind, with which exit code.

Real launchers with four real ranks and a small worker (`tests.cli.workers`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from parallelrun.launch.failures.guard import LAUNCHER_GONE
from tests.cli.launcher import PATIENCE_S, is_running, read, run_launcher, survivors, wait_for
from tests.matrix import FULL

ENDLESS = {"steps": 100_000}
GONE_S = 5.0


def listening_addresses(pids: list[int]) -> set[str]:
    """Addresses on which any of `pids` listens (IPv4, IPv6), read from /proc."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


def test_a_run_ends_well_and_leaves_its_files(tmp_path):
    run = run_launcher(tmp_path)
    assert run.wait() == 0, run.stderr
    assert run.status["state"] == "done"
    assert (run.status["exit_code"], run.status["step"], run.status["pid"]) == (0, 5, run.pid)
    assert {"config.yaml", "plan.json", "manifest.json", "logs"} <= {p.name for p in run.directory.iterdir()}
    assert run.stdout == "rank 0 speaks\n"  # rank 0 alone has the terminal
    assert [run.log(rank) for rank in range(4)] == [f"rank {rank} speaks\n" for rank in range(4)]
    assert "step time is no scaling measurement: 4 ranks on" in run.stderr or len(os.sched_getaffinity(0)) >= 4
    assert not survivors(run.rank_pids(), 0)


@pytest.mark.parametrize("victim", range(4) if FULL else [1])  # 0, 2 and 3 fail below, too
def test_the_rank_that_is_killed_is_named_and_nobody_survives(tmp_path, victim):
    run = run_launcher(tmp_path, ENDLESS)
    run.reaches(3)
    pids = run.rank_pids()
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    assert run.wait() == 6, run.stderr
    assert not survivors([*pids, run.pid], max(0.0, began + GONE_S - time.monotonic()))
    assert run.status["state"] == "failed"
    assert (run.status["exit_code"], run.status["failed_rank"]) == (6, victim)
    assert "SIGKILL" in run.status["error"]
    last = run.stderr.splitlines()[-4:]
    assert re.match(
        rf"error: rank {victim} \(dp={victim // 2} tp={victim % 2} pp=0, .*pid {pids[victim]}\) died: SIGKILL", last[0]
    )
    assert last[2:] == ["  last good checkpoint: none", f"  log: {run.directory}/logs/rank_{victim}.log"]
    assert len(run.stderr.splitlines()) <= 25


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("exit", "exit 3 without an exception"),
        ("sys.exit", r"sys.exit\(\)"),
        ("segfault", "SIGSEGV"),
        *([("abort", "SIGABRT")] if FULL else []),
    ],
)
def test_however_a_rank_fails_it_is_the_one_that_is_named(tmp_path, do, words):
    run = run_launcher(tmp_path, {**ENDLESS, "rank": 2, "do": do})
    assert run.wait() == 6, run.stderr
    assert (run.status["failed_rank"], run.status["exit_code"]) == (2, 6)
    assert re.search(words, run.status["error"])
    assert re.search(words, run.stderr)
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) <= 25
    assert not survivors(run.rank_pids(), GONE_S)


@pytest.mark.parametrize(
    ("do", "rank", "code", "words"),
    [
        ("ValueError", 0, 6, "ValueError: injected into save"),
        ("OSError without a number", 1, 6, "OSError: injected into save"),
        *([("AssertionError", 1, 6, "AssertionError: injected into save")] if FULL else []),
        ("full disk", 1, 3, "step 1 could not be written to .*: rank 1: No space left on device"),
    ],
)
def test_an_exception_inside_save_has_its_own_code_and_names_its_own_rank(tmp_path, do, rank, code, words):
    overrides = {"dp": 2, "steps": 1, "strategy.data.kind": "zero1"}  # so that every rank has a file to write
    run = run_launcher(tmp_path, {"do": do, "rank": rank}, overrides=overrides, worker="fail_in_save")
    assert run.wait() == code, run.stderr
    assert (run.status["exit_code"], run.status["failed_rank"]) == (code, rank)
    assert re.search(words, run.status["error"]) and re.search(words, run.stderr)
    assert "in fail" in run.log(rank)


def test_an_exception_is_kept_whole_in_the_log_and_as_json(tmp_path):
    run = run_launcher(tmp_path, {"rank": 3, "do": "raise"})
    assert run.wait() == 6, run.stderr
    assert (run.status["failed_rank"], run.status["error"]) == (3, "ValueError: the culprit speaks")
    assert run.status["error"] in run.stderr and "Traceback" not in run.stderr
    assert "in misbehave" in run.log(3)
    record = json.loads((run.directory / "errors" / "rank_3.json").read_text())
    assert (record["schema"], record["rank"], record["exit_code"]) == (1, 3, 6)
    assert record["traceback"].rstrip().endswith("ValueError: the culprit speaks")
    assert (record["step"], record["pid"]) == (3, run.rank_pids()[3])


def test_a_known_error_is_worded_as_the_command_line_words_it(tmp_path):
    run = run_launcher(tmp_path, {"rank": 1, "do": "numerics"}, overrides={"dp": 2})
    assert run.wait() == 5, run.stderr
    assert (run.status["failed_rank"], run.status["error"]) == (1, "loss is nan")
    words = run.stderr.splitlines()
    at = words.index("error: loss is nan")
    assert words[at + 1 : at + 4] == [
        "  where: optimizer.lr",
        "  try: lower optimizer.lr",
        "  at: rank 1, step 3, phase step",
    ]


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    """Runs that hang, started together: each waits for its timeout, not for its turn."""
    wishes = {
        "sleep": {**ENDLESS, "rank": 2, "do": "sleep"},
        "hold the GIL": {**ENDLESS, "rank": 2, "do": "hold the GIL"},
        "stopped": ENDLESS,
        "elsewhere": {**ENDLESS, "rank": 2, "do": "elsewhere"},
        # rank 1 leaves step 4's all-reduce out, and so meets the others one step further on, up to the run's last one
        "skipped": {"steps": 6, "skips": [1, 4]},
    }
    folder = tmp_path_factory.mktemp("hanging")
    runs = {name: run_launcher(folder / name.replace(" ", "_"), wish, timeout_s=4) for name, wish in wishes.items()}
    runs["stopped"].reaches(2)
    os.kill(runs["stopped"].rank_pids()[1], signal.SIGSTOP)
    return runs


@pytest.mark.parametrize("do", ["sleep", "hold the GIL"])
def test_a_hang_names_the_rank_that_does_not_come_and_keeps_all_stacks(hanging, do):
    run = hanging[do]
    assert run.wait() == 7, run.stderr
    assert (run.status["exit_code"], run.status["failed_rank"], run.status["step"]) == (7, 2, 3)
    assert "hangs: no progress for 4 s" in run.stderr
    assert (
        4 < run.noticed_after(2) < 20
    )  # 4 s by its clock (tests/unit/launch/failures/test_times.py), and a slow machine
    stalled = run.status["stall"]
    assert (stalled["operation"], stalled["number"], stalled["num_bytes"]) == ("all_reduce", 3, 4)
    assert (stalled["arrived"], stalled["site"].partition(" in ")[2]) == ([0, 1, 3], "train: dist.all_reduce(stop)")
    (missing,) = stalled["missing"]
    does = {"sleep": "sleeps", "hold the GIL": "holds Python's lock in native code"}[do]
    assert (missing["rank"], missing["activity"]) == (2, does) and "in misbehave: " in missing["frames"][0]
    assert Path(missing["log"]).samefile(run.directory / "logs" / "rank_2.log")
    assert "  stalled: all_reduce 3 of axis world (ranks 0, 1, 2, 3), 4 bytes, called at " in run.stderr
    assert f"  rank 2 ({socket.gethostname()}) {does}; log: " in run.stderr and "    in: " in run.stderr
    assert "in misbehave" in run.log(2)
    assert all("in all_reduce" in run.log(rank) for rank in (0, 1, 3))
    assert not survivors(run.rank_pids(), GONE_S)


def test_a_stopped_rank_is_the_one_that_hangs(hanging):
    run = hanging["stopped"]
    assert run.wait() == 7, run.stderr
    assert run.status["failed_rank"] == 1
    assert "hangs: no progress for 4 s; is stopped (SIGSTOP), so that no stack can be had, and has not" in run.stderr


def test_a_rank_in_another_collective_is_told_with_both(hanging):
    run = hanging["elsewhere"]
    assert run.wait() == 7, run.stderr
    assert run.status["failed_rank"] == 2
    assert "; rank 2 in all_gather 1 of axis tp, ranks 0, 1, 3 in all_reduce 3 of axis world; stacks of" in run.stderr


def test_a_skipped_collective_names_the_rank_that_is_out_of_step(hanging):
    run = hanging["skipped"]
    assert run.wait() == 7, run.stderr
    assert run.status["failed_rank"] == 1


def test_ctrl_c_ends_all_ranks_without_a_stack_and_without_orphans(tmp_path):
    run = run_launcher(tmp_path, ENDLESS, overrides={"dp": 2})
    run.reaches(2)
    pids = run.rank_pids()
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 130
    assert not survivors(pids, GONE_S)
    assert re.search(r"^interrupted at step \d+; last good checkpoint: none", run.stderr, re.MULTILINE)
    assert "Traceback" not in run.stderr + run.stdout
    assert (run.status["state"], run.status["exit_code"], run.status["failed_rank"]) == ("interrupted", 130, None)


def test_a_second_ctrl_c_does_not_wait_for_a_rank_that_will_not_end(tmp_path):
    run = run_launcher(tmp_path, {**ENDLESS, "rank": 0, "do": "ignore signals"}, overrides={"dp": 2})
    run.reaches(3)
    time.sleep(0.5)  # rank 0 has reached its third step: give it time to stop listening
    os.kill(run.pid, signal.SIGINT)
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 130
    assert not survivors(run.rank_pids(), 1.0)


@pytest.mark.parametrize("to_launcher", [True, False])
def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, to_launcher):
    run = run_launcher(tmp_path, ENDLESS)
    run.reaches(2)
    os.kill(run.pid if to_launcher else run.rank_pids()[2], signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    steps = {run.fact("at", rank) for rank in range(4)}
    assert len(steps) == 1  # all ranks stopped after the same step
    assert run.status["state"] == "preempted"
    saved = f"{run.directory}/checkpoints/step_{steps.pop()}"
    assert f"resume with: parallelrun dp=2 tp=2 resume={saved}" in run.stderr


def test_a_second_sigterm_ends_at_once(tmp_path):
    run = run_launcher(tmp_path, {**ENDLESS, "rank": 1, "do": "sleep"}, overrides={"dp": 2})
    run.reaches(3)
    os.kill(run.pid, signal.SIGTERM)
    wait_for(lambda: "finishing the step" in run.stderr, "the first signal to be heard")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143
    assert not survivors(run.rank_pids(), 1.0)


def children(run) -> list[int]:
    """The launcher's ranks, as soon as both are there, without the guard of the status, which has its own session."""
    found = [int(pid) for pid in read(Path(f"/proc/{run.pid}/task/{run.pid}/children")).split()]
    found = [pid for pid in found if os.getsid(pid) != pid]
    return found if len(found) == 2 else []


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_a_killed_launcher_leaves_no_orphan_but_a_final_status(tmp_path, method):
    """exec: while the ranks still import torch; a rank that did not end would train on for ever."""
    run = run_launcher(tmp_path, ENDLESS, method=method, overrides={"dp": 2})
    if method == "fork":
        run.reaches(1)
    pids = wait_for(lambda: children(run), "both ranks")
    assert all(is_running(pid) for pid in pids)
    os.kill(run.pid, signal.SIGKILL)
    assert not survivors(pids, 2.0 if method == "fork" else PATIENCE_S)
    wait_for(lambda: run.status["state"] != "running", "a final status")
    assert (run.status["state"], run.status["error"]) == ("failed", LAUNCHER_GONE)


@pytest.mark.parametrize(("backend", "expected"), [("auto", set()), ("gloo", {"0100007F"})])
def test_nothing_listens_but_gloo_on_loopback(tmp_path, backend, expected):
    run = run_launcher(tmp_path, ENDLESS, overrides={"dp": 2, "backend": backend})
    run.reaches(2)
    addresses = listening_addresses([run.pid, *run.rank_pids()])
    os.kill(run.pid, signal.SIGINT)
    run.wait()
    assert addresses == expected  # as /proc/net/tcp writes 127.0.0.1


@pytest.mark.slow
def test_exec_d_ranks_behave_like_forked_ones(tmp_path):
    run = run_launcher(tmp_path, {"rank": 1, "do": "raise"}, method="exec", overrides={"dp": 2})
    assert run.wait() == 6, run.stderr
    assert run.status["failed_rank"] == 1
    assert run.stdout == "rank 0 speaks\n"


def test_ranks_get_an_allow_list_of_variables_and_random_streams_of_their_own(tmp_path):
    secrets = {"AWS_SECRET_ACCESS_KEY": "x", "GITHUB_TOKEN": "x", "SLURM_NTASKS": "9"}
    run = run_launcher(
        tmp_path, overrides={"dp": 2}, worker="environment", environ={**secrets, "WANDB_MODE": "offline"}
    )
    assert run.wait() == 0, run.stderr
    facts = [json.loads((run.directory / f"facts_{rank}.json").read_text()) for rank in range(2)]
    for rank, fact in enumerate(facts):
        assert not secrets.keys() & fact["environ"].keys()
        assert fact["environ"]["WANDB_MODE"] == "offline"
        assert (fact["environ"]["RANK"], fact["environ"]["GLOO_SOCKET_IFNAME"]) == (str(rank), "lo")
        assert "MASTER_ADDR" not in fact["environ"]
        assert fact["threads"] == 1
        assert fact["group"] == fact["pid"]
    assert len({fact["random"] for fact in facts}) == 2


def test_one_rank_runs_inline_with_the_same_files(tmp_path):
    run = run_launcher(tmp_path, overrides={"dp": 1})
    assert run.wait() == 0, run.stderr
    assert run.status["state"] == "done"
    assert int(run.fact("started", 0)) == run.pid
    assert run.stdout == run.log(0) == "rank 0 speaks\n"


@pytest.mark.parametrize(
    ("wish", "number", "code", "state"),
    [
        ({"rank": 0, "do": "raise"}, None, 1, "failed"),
        ({"rank": 0, "do": "sleep"}, None, 7, "failed"),
        (ENDLESS, signal.SIGINT, 130, "interrupted"),
        (ENDLESS, signal.SIGTERM, 75, "preempted"),
    ],
)
def test_an_inline_run_has_the_same_endings(tmp_path, wish, number, code, state):
    run = run_launcher(tmp_path, wish, overrides={"dp": 1}, timeout_s=3)
    if number:
        run.reaches(2)
        os.kill(run.pid, number)
    assert run.wait() == code, run.stderr
    assert (run.status["state"], run.status["exit_code"]) == (state, code)
    assert code != 7 or 3 < run.noticed_after(0) < 18
    assert "Traceback" not in run.stderr
