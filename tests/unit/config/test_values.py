"""Values that YAML or Hydra would read as something else are refused with what they would become."""

from __future__ import annotations

import pytest

from parallelrun.config.keys import Key, known_keys, sections
from parallelrun.config.values import string_trap, trap

DEGREE, TRUTH = Key("tp", "int", optional=True), Key("compile", "bool", optional=False)
RATE, WORD = Key("optimizer.lr", "float", optional=False), Key("name", "str", optional=True)


def what(key: Key, text: str) -> str:
    problem = trap(key, text, "here")
    return "" if problem is None else problem.what


@pytest.mark.parametrize("text", ["8", "1", "0", "-4", "null", "9223372036854775807"])
def test_a_whole_number_passes(text):
    assert what(DEGREE, text) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("010", "parsed as 8 from 010; write 8 or 10"),
        ("-010", "parsed as -8 from -010; write -8 or -10"),
        ("09", "parsed as 9 from 09; write 9"),
        ("0x10", "parsed as 16 from 0x10; write 16"),
        ("0b11", "parsed as 3 from 0b11; write 3"),
        ("1:30", "parsed as 90 from 1:30; write 90"),
        ("1_000", "parsed as 1000 from 1_000; write 1000"),
        ("2.0", "must be a whole number; write 2"),
        ("2.5", "must be a whole number"),
        ("1e3", "write 1000"),
        ("true", "a boolean"),
        ("off", "a boolean"),
        ("auto", "write null"),
        ("", "write null"),
        ("1e20", "out of range"),
        ("100000000000000000000", "out of range"),
        ("9" * 5000, "out of range"),
        ("nan", "out of range"),
        ("inf", "out of range"),
        ("eight", "not a whole number"),
    ],
)
def test_a_trap_is_told_with_what_it_becomes(text, said):
    assert said in what(DEGREE, text)


@pytest.mark.parametrize("text", ["true", "False", "yes", "off"])
def test_truth_values_pass(text):
    assert what(TRUTH, text) == ""


@pytest.mark.parametrize(
    ("text", "said"), [("2", "parsed as true from 2"), ("0", "write true or false"), ("tru", "true")]
)
def test_a_number_is_no_truth_value(text, said):
    assert said in what(TRUTH, text)


@pytest.mark.parametrize("text", ["1", "1e-3", ".5", "-1", "nan", ".inf", "1E5"])
def test_numbers_pass_and_their_range_is_for_resolve(text):
    assert what(RATE, text) == ""


@pytest.mark.parametrize(
    ("text", "said"), [("010", "parsed as 8"), ("1:30", "90"), ("on", "boolean"), ("fast", "number")]
)
def test_numbers_have_traps_too(text, said):
    assert said in what(RATE, text)


def test_null_is_only_for_optional_keys():
    assert "cannot be null" in what(RATE, "null")


@pytest.mark.parametrize(("text", "read"), [("010", "8"), ("1e3", "1000.0"), ("on", "True"), ("1_0", "10")])
def test_a_text_that_yaml_reads_as_something_else_must_be_quoted(text, read):
    problem = string_trap(WORD, text, "here")
    assert problem is not None and f"parsed as {read} from {text}" in problem.what


@pytest.mark.parametrize("text", ["run-1", "7", "1f1b", "./net.py:build", "2d"])
def test_plain_texts_pass(text):
    assert string_trap(WORD, text, "here") is None


def test_the_schema_is_walked_to_its_leaves():
    keys = known_keys()
    assert keys["tp"] == Key("tp", "int", True)
    assert keys["strategy.data.shard"] == Key("strategy.data.shard", "int", True, least=1, of_degrees=True)
    assert keys["recompute"].choices == ("none", "selective", "full", "offload") and keys["recompute"].help
    assert keys["optimizer.betas"].kind == "list" and keys["model.roles"].kind == "dict"
    assert keys["compile"] == Key("compile", "bool", False)
    assert {"strategy.data", "model", "eval"} <= sections() and "tp" not in sections()
