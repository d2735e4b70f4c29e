"""Ranks that were started differently are refused; each difference is reported with its ranks. No process, no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.launch.store import rendezvous
from parallelrun.launch.store.rendezvous import Member
from tests.plans import tiny_plan

WORDS = ["model=gpt", "dp=4", "tracker.api_key=abc"]


def member(rank: int, words: list[str] | None = None, **other) -> Member:
    """A rank of two hosts with two ranks each."""
    fields = {
        "host": "ab"[rank // 2],
        "pid": rank,
        "born": "1",
        "words": rendezvous.command_line(WORDS if words is None else words),
        "code": {"parallelrun's code": "c" * 64, "torch": "2.13.0"},
        "code_version": "version 1, commit 1234567",
        "config": "d" * 64,
        "directory_seen": True,
        "gpu": f"GPU-{rank}",
        "gpu_bytes": 2**36,
        "visible_gpus": 1,
    }
    return Member(rank, **{**fields, **other})


def found(*changed: Member, device: str = "cpu") -> list[str]:
    members = [member(rank) for rank in range(4)]
    for one in changed:
        members[one.rank] = one
    plan = tiny_plan(dp=4, device=device)
    return [problem.what for problem in rendezvous.differences(members, plan)]


def test_equal_ranks_agree_whatever_the_order_of_their_words():
    assert found(member(1, ["-v", "run", "dp=4", "tracker.api_key=abc", "model=gpt"])) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*WORDS, "model.layers=3"], "model.layers=3 (rank 0: not given)"),
        (["model=gpt", "dp=2", WORDS[2]], "dp=2 (rank 0: dp=4)"),
        (["model=gpt", WORDS[2]], "dp not given (rank 0: dp=4)"),
        (["verify", *WORDS], "verify (rank 0: not given)"),
        ([*WORDS, "dp=2"], "dp=4 dp=2 (rank 0: dp=4)"),
        (["model=gpt", "dp=4", "tracker.api_key=other"], "tracker.api_key=<redacted> (a hidden value differs)"),
    ],
)
def test_another_command_line_is_told_word_by_word(words, told):
    assert found(member(2, words)) == [f"the command line of rank 2 on b differs from rank 0's: {told}"]


def test_a_key_given_twice_in_another_order_differs():
    expected, other = (rendezvous.command_line([f"dp={degree}" for degree in order]) for order in ((1, 2), (2, 1)))
    assert expected != other


def test_ranks_with_the_same_difference_are_told_together():
    words = [*WORDS, "seed=1"]
    assert found(member(1, words), member(3, words)) == [
        "the command line of ranks 1, 3 on a, b differs from rank 0's: seed=1 (rank 0: not given)"
    ]


def test_hundreds_of_different_ranks_are_counted_not_listed():
    members = [replace(member(0), rank=rank, words=rendezvous.command_line([f"seed={rank}"])) for rank in range(100)]
    problems = rendezvous.differences(members, tiny_plan(dp=4))
    assert len(problems) == rendezvous.MAX_NAMED + 1
    assert problems[-1].what == "91 other differences from rank 0"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ({"torch": "2.11.0"}, "torch of rank 3 on b differs from rank 0's: 2.11.0, V (rank 0: 2.13.0, V)"),
        (
            {"parallelrun's code": "e" * 64},
            "parallelrun's code of rank 3 on b differs from rank 0's: eeeeeeeeeeee, V (rank 0: cccccccccccc, V)",
        ),
        (
            {"the file of model.source=./net.py:build": "e" * 64},
            "the file of model.source=./net.py:build of rank 3 on b differs from rank 0's: eeeeeeeeeeee, V "
            "(rank 0: absent, V)",
        ),
    ],
)
def test_other_code_and_another_torch_are_told_with_versions(code, told):
    odd = member(3)
    assert found(replace(odd, code={**odd.code, **code})) == [told.replace("V", "version 1, commit 1234567")]


def test_the_file_of_a_user_s_module_is_compared(tmp_path):
    file = tmp_path / "net.py"
    hashes = []
    for text in ("a", "b", "b"):
        file.write_text(text)
        hashes.append(rendezvous.code({"model.source": f"{file}:build"}))
    assert hashes[0] != hashes[1] == hashes[2]
    assert set(rendezvous.code({})) == {"parallelrun's code", "torch"}


def test_a_damaged_config_and_an_unseen_run_directory_are_told():
    odd = member(2, config="f" * 64, directory_seen=False)
    assert found(odd) == [
        "the config arrived damaged at rank 2 on b: its hash differs from rank 0's",
        "the run directory is not visible on b",
    ]


def test_every_rank_of_a_gpu_run_needs_a_gpu_of_its_own():
    assert found(device="cuda") == []
    assert found(member(3, gpu=""), device="cuda") == ["device=cuda, and rank 3 on b sees no GPU"]
    assert found(member(3, gpu="GPU-2"), device="cuda") == [
        "several ranks would share one GPU: ranks 2, 3 on b (rank 2 sees 1, rank 3 sees 1)"
    ]
    assert found(member(3, gpu="GPU-1"), device="cuda") == []  # of another host: containers may number alike
    assert found(member(3, gpu=""), device="cpu") == []
