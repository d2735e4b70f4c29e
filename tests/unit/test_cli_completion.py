"""TAB after a verb works: Hydra is shown the line without it, and the words it does not know are ours."""

from __future__ import annotations

import pytest

from parallelrun.cli.completion import answer, is_asked


def ask(line: str, point: int | None = None):
    environment = {"COMP_LINE": line, "COMP_POINT": str(len(line) if point is None else point)}
    candidates, hydra = answer(environment)
    return candidates, hydra, environment["COMP_LINE"], int(environment["COMP_POINT"])


def test_verbs_and_tools_are_offered_in_the_first_place():
    candidates, hydra, _, _ = ask("parallelrun ")
    assert {"plan", "verify", "ls", "doctor"} <= set(candidates) and hydra
    assert ask("parallelrun pl")[0] == ["plan"]
    assert ask("parallelrun str")[:2] == ([], True)


@pytest.mark.parametrize("verb", ["run", "plan", "verify", "bench"])
def test_hydra_does_not_see_the_verb(verb):
    candidates, hydra, line, point = ask(f"parallelrun {verb} strategy=pt")
    assert (candidates, hydra, line, point) == ([], True, "parallelrun strategy=pt", len("parallelrun strategy=pt"))


def test_a_line_without_a_verb_is_left_alone():
    assert ask("parallelrun model=gpt strategy=")[2] == "parallelrun model=gpt strategy="


def test_tools_complete_their_own_words():
    assert "gpt3_oneflow_3072" in ask("parallelrun show ")[0] and not ask("parallelrun show ")[1]
    assert ask("parallelrun show quick")[0] == ["quickstart"]
    assert ask("parallelrun ls str")[0] == ["strategies"]


def test_a_cursor_inside_the_line_counts():
    assert ask("parallelrun pl model=gpt", len("parallelrun pl"))[0] == ["plan"]


def test_completion_is_asked_for_by_its_flag():
    assert (
        is_asked(["-sc", "query=bash"]) and is_asked(["--shell-completion", "install=bash"]) and not is_asked(["plan"])
    )
