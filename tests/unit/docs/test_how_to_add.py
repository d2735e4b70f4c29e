"""The guide's tables name real classes and members: the base class of each example, the questions of a strategy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelrun.planner.contract.classes import data_strategy
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.plan import SYNC

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "how_to_add.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The code words of the cells of a section's table, row by row, without the header."""
    text = TEXT.partition(f"### {section}\n")[2]
    lines = re.findall(r"^\|(?! *-)(.*)\|$", re.split(r"^##", text, maxsplit=1, flags=re.M)[0], re.M)
    return [[" ".join(re.findall(r"`([^`]+)`", cell)) for cell in line.split("|")] for line in lines[1:]]


BASES = [(row[1], kind) for row in rows("Which base class") if row[1] for kind in row[4].split()]


def test_every_data_strategy_but_fsdp_and_the_servers_is_an_example():
    assert {kind for _, kind in BASES} == set(
        ["naive_ddp", "ddp", "ring", "zero1", "zero2", "local_sgd", "diloco", "horovod"]
    )


@pytest.mark.parametrize(("base", "kind"), BASES)
def test_an_example_derives_from_the_base_class_that_the_guide_names(base, kind):
    cls = data_strategy(kind)
    assert base in [parent.__name__ for parent in cls.__mro__]
    nearer = {name for name, _ in BASES} - {"DataStrategy"}
    assert base != "DataStrategy" or not nearer & {parent.__name__ for parent in cls.__mro__}


def test_every_question_about_replicas_that_differ_is_a_member_of_the_base_class():
    members = [word for row in rows("Replicas that differ") for word in re.sub(r"\(.*?\)", "", row[0]).split()]
    assert "SYNC" in members and SYNC == "sync"
    assert len(members) >= 6 and all(hasattr(DataStrategy, name) for name in members if name != "SYNC")
