"""Which failure is the root cause, its exit code, and the final error message."""

from __future__ import annotations

import errno
import signal

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from parallelrun.base.errors import CheckpointError, ConfigError, NumericsError, Problem
from parallelrun.cli.errors import translate
from parallelrun.launch.failures import failure
from parallelrun.launch.failures.failure import Failure, message, of_exception, of_exit, root_cause
from parallelrun.launch.host.job import ConsoleOptions
from tests.plans import tiny_plan

GLOO = (
    "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21132. This is typically caused..."
)


class DistBackendError(RuntimeError):
    """As torch names its own."""


def test_a_lost_connection_is_never_the_cause_even_if_it_is_seen_first():
    victims = [of_exception(RuntimeError(GLOO), rank, time_ns=10 + rank) for rank in range(3)]
    killed = of_exit(3, -signal.SIGKILL, time_ns=50)
    assert root_cause([*victims, killed]) == killed
    raised = of_exception(ValueError("x"), 2, time_ns=40)
    assert root_cause([*victims, killed, raised]) == raised  # among real causes the first
    assert root_cause(victims).rank == 0


def test_a_lost_connection_is_known_inside_other_exceptions():
    try:
        try:
            raise DistBackendError("Socket closed")
        except DistBackendError as error:
            raise RuntimeError("the schedule failed") from error
    except RuntimeError as error:
        assert of_exception(error, 0, 0).order > 0


def test_a_user_s_own_connection_error_is_a_cause():
    assert of_exception(OSError("Connection refused by the dataset's server"), 0, 0).order == 0


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("[c10d] socket: Too many open files")]
)
def test_a_rank_that_may_not_open_more_files_tells_the_limit(error, monkeypatch):
    monkeypatch.setattr(failure.resource, "getrlimit", lambda _: (77, 99))
    found = of_exception(error, 2, 5)
    assert (found.exit_code, found.what) == (3, "rank 2 may not open more files: the limit is 77")


def test_an_abort_is_the_cause_only_if_nothing_better_is_known():
    aborted, raised = of_exit(0, -signal.SIGABRT, 1), of_exception(ValueError("x"), 1, 2)
    assert root_cause([aborted, raised]) == raised
    assert root_cause([aborted, of_exception(RuntimeError(GLOO), 1, 0)]) == aborted


@pytest.mark.parametrize(
    ("error", "single_rank", "code"),
    [
        (NumericsError("nan"), False, 5),
        (CheckpointError("bad"), False, 4),
        (ValueError("x"), False, 6),
        (ValueError("x"), True, 1),
        (RuntimeError(GLOO), False, 6),
        (DistBackendError("Timed out waiting 60000ms for recv operation to complete"), False, 7),
    ],
)
def test_an_exception_has_its_exit_code(error, single_rank, code):
    assert of_exception(error, 0, 0, single_rank).exit_code == code


@pytest.mark.parametrize(
    ("status", "out_of_memory", "what"),
    [
        (-9, False, "died: SIGKILL (likely the out-of-memory killer: see dmesg)"),
        (-9, True, "died: SIGKILL (the out-of-memory killer)"),
        (-34, False, "died: SIGRTMIN"),
        (-40, False, "died: signal 40"),
        (3, False, "exit 3 without an exception"),
    ],
)
def test_an_end_without_a_word_is_told_by_its_status(status, out_of_memory, what):
    assert of_exit(1, status, 0, out_of_memory).what == what


def test_a_failure_survives_its_file(tmp_path):
    told = Failure(2, "loss is nan", 5, 123, 0, 77, 9, "step", (Problem("loss is nan", "lr", "lr=1"),), "Traceback ...")
    failure.write_failure(tmp_path, told)
    assert failure.read_failure(tmp_path, 2) == told
    assert failure.read_failure(tmp_path, 0) is None
    (tmp_path / "errors" / "rank_1.json").write_text("{")  # the rank was killed, or the disk is full
    assert failure.read_failure(tmp_path, 0) is None


def test_the_last_words_name_rank_place_step_checkpoint_and_command(tmp_path):
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step_15.aside").mkdir()
    told = Failure(3, "died: SIGKILL", 6, 0, 0, 77, 12, "step")
    lines = message(
        told, tiny_plan(dp=2, tp=2), tmp_path, ConsoleOptions(("dp=2", "tp=2", "name=a b", "resume=latest"))
    )
    assert lines[0].startswith("error: rank 3 (dp=1 tp=1 pp=0, ") and lines[0].endswith("pid 77) died: SIGKILL")
    assert lines[1:] == [
        "  at: rank 3, step 12, phase step",
        "  last good checkpoint: step 10",
        f"  resume with: parallelrun dp=2 tp=2 'name=a b' resume={tmp_path}/checkpoints/step_10",
        f"  log: {tmp_path}/logs/rank_3.log",
    ]


def test_the_last_words_are_few_however_long_the_traceback(tmp_path):
    told = Failure(0, "boom", 6, 0, traceback="\n".join(f"line {i}" for i in range(500)))
    lines = message(told, tiny_plan(dp=2), tmp_path, ConsoleOptions(verbose=True))
    assert len(lines) <= 25 and lines[-1] == "line 499" and lines[0].startswith("error: rank 0")


def test_a_full_disk_is_the_machine_s_fault():
    full = OSError(errno.ENOSPC, "No space left on device", "summary.json")
    said = of_exception(full, 0, 1)
    assert (said.exit_code, said.order) == (3, 0) and "no room to write" in said.what and "summary.json" in said.what
    assert of_exception(OSError(errno.EACCES, "Permission denied"), 0, 1).exit_code == 6


class Several(Exception):
    """As Python's ExceptionGroup, which 3.10 does not have."""

    def __init__(self, exceptions):
        self.exceptions = exceptions


def wrapped(how: str) -> BaseException:
    """A full disk inside another exception, as libraries raise it."""
    full = OSError(errno.EDQUOT, "Disk quota exceeded", "model.pt")
    try:
        try:
            if how == "handled":
                raise full
            raise RuntimeError("cannot write") from full
        except Exception as error:
            if how == "of torch's ranks":
                raise CheckpointException("write", {1: (error, None)}) from None
            if how == "in a group":
                raise Several([ValueError("odd"), error]) from None
            raise ValueError("not saved") from None if how == "handled" else error
    except BaseException as error:
        return error  # torch's is no Exception


@pytest.mark.parametrize("how", ["raised from it", "handled", "of torch's ranks", "in a group"])
def test_a_full_disk_inside_another_exception_is_the_machine_s_fault_too_also_before_a_run(how):
    found = of_exception(wrapped(how), 0, 1)
    assert found.exit_code == 3 and found.what == "no room to write: [Errno 122] Disk quota exceeded: 'model.pt'"
    told = translate(wrapped(how))
    assert told is not None and told.exit_code == 3 and told.problems[0].where == "model.pt"


def test_the_outer_error_for_the_user_wins():
    told = ConfigError(Problem("told already"))
    told.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    outer = RuntimeError("outer")
    outer.__cause__ = told
    assert translate(outer) is told


def test_an_exception_in_a_users_own_file_names_the_lines_of_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = "return json.loads(text)\n\n\ndef forward(x):\n    return inner(x)\n"
    (tmp_path / "net.py").write_text(f"import json\n\n\ndef inner(text):\n    {body}")
    own: dict = {}
    exec(compile((tmp_path / "net.py").read_text(), str(tmp_path / "net.py"), "exec"), own)
    try:
        own["forward"]("{")
    except ValueError as error:
        found = of_exception(error, 0, 5)
    own_frames = [frame for frame in found.frames if frame.startswith("net.py")]  # this test's own is the user's too
    assert own_frames == ["net.py:9 in forward: return inner(x)", "net.py:5 in inner: return json.loads(text)"]
    assert len(found.frames) == 3, "nothing of Python's own json package"
    lines = message(found, tiny_plan(), tmp_path)
    assert [line.strip() for line in lines if line.startswith("  in: ")] == [f"in: {frame}" for frame in found.frames]
    failure.write_failure(tmp_path, found)
    assert failure.read_failure(tmp_path, 0) == found
