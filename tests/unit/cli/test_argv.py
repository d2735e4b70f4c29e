"""argv is sorted, and every mistake that needs no composition is told at once."""

from __future__ import annotations

import shlex
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from parallelrun.base.errors import ConfigError
from parallelrun.cli.argv import read, starts_ranks
from tests.matrix import examples


def overrides(line: str) -> list[str]:
    return [override.hydra() for override in read(shlex.split(line)).overrides]


def problems(line: str):
    with pytest.raises(ConfigError) as caught:
        read(shlex.split(line))
    return caught.value.problems


def test_the_verb_is_the_first_word():
    assert read(["plan", "tp=2"]).verb == "plan"
    assert read(["tp=2"]).verb == "run"
    assert read([]).verb == "run"


def test_our_flags_are_taken_out_anywhere():
    line = read(["plan", "--json", "tp=2", "-v", "--trust"])
    assert line.json and line.verbose and line.trust and line.flags == ()


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--cfg job --resolve -p model tp=2", ("--cfg", "job", "--resolve", "-p", "model")),
        ("--cfg=job tp=2", ("--cfg=job",)),
        ("--info defaults-tree tp=2", ("--info=defaults-tree",)),
        ("--info tp=2", ("--info=all",)),
        ("--multi tp=2", ("--multirun",)),
        ("--config-dir x -cn other", ("--config-dir", "x", "-cn", "other")),
        ("-sc query=bash", ("-sc",)),
    ],
)
def test_hydras_flags_pass(words, flags):
    if "query=" in words:
        assert not starts_ranks(words.split())
        return
    assert read(words.split()).flags == flags


def test_a_sweep_is_known_by_its_flag_or_by_hydras_key():
    assert read(["-m", "tp=1,2"]).multirun
    assert read(["--multirun", "tp=1,2"]).multirun
    assert read(["hydra.mode=MULTIRUN", "tp=1,2"]).multirun
    assert not read(["tp=2"]).multirun


def test_mpiruns_words_mean_the_world():
    assert overrides("-np 4 model=gpt") == ["model=gpt", "world=4"]
    assert overrides("-np 4 -H localhost:4") == ["world=4"]
    assert overrides("-H localhost:2,127.0.0.1:2") == ["world=4"]
    assert overrides(f"-np 2 -H {socket.gethostname()}") == ["world=2"]


def test_other_hosts_are_no_mistake():
    assert overrides("-np 8 -H nodeA:4,nodeB:4") == ["world=8"]


def test_all_mistakes_come_at_once():
    assert len(problems("tpp=8 --dp 2 seed=010")) == 3


TYPED = """
run plan ls tp=2 tp= =2 tp = -m --json -v --tp 8 model=gpt model= recipe=./x.yaml recipe=a,b ~tp +x=1 ++tp=3
tp=010 path=~/x,y -np -H localhost:3 --cfg job --info hydra.run.dir=x '' - -- --= a=b=c @x=1 tp@a=2 é=1 tp=[1
tp='x tp=${pp} tp=choice(1,2) compile=2 model.roles.a=b
"""
WORDS = some.sampled_from(TYPED.split())


@given(some.lists(WORDS | some.text(max_size=12), max_size=8))
@settings(max_examples=examples(400), deadline=None)
def test_no_command_line_breaks_the_reader(words):
    try:
        for override in read(words).overrides:
            assert "=" in override.hydra() or override.is_hydra
    except ConfigError as error:
        assert all(problem.what and problem.where for problem in error.problems)
