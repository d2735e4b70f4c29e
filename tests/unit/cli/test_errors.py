"""Every message has one shape, and what Hydra raises is brought into it."""

from __future__ import annotations

from parallelrun.base.errors import Problem
from parallelrun.cli import errors


def test_the_shape_of_a_message():
    problem = Problem("tp=3: 64 does not divide", "tp", "tp=2 or tp=4", "parallelrun plan tp=2")
    assert errors.render([problem]) == (
        "error: tp=3: 64 does not divide\n  where: tp\n  did you mean: tp=2 or tp=4\n  try: parallelrun plan tp=2"
    )


def test_all_problems_are_shown_each_on_lines_of_its_own():
    assert errors.render([Problem("a"), Problem("b\nc")]) == "error: a\nerror: b c"
    assert errors.render([Problem("x")] * 30).endswith("... and 10 more")


def test_an_unexpected_error_says_how_to_see_more(capsys):
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        assert errors.report(error, verbose=False) == 1
        assert "-v" in capsys.readouterr().err
        assert errors.report(error, verbose=True) == 1
        assert "Traceback" in capsys.readouterr().err


def test_an_error_that_is_not_hydras_is_not_called_a_configuration_error():
    assert errors.translate(KeyError("x")) is None
    assert errors.translate(ValueError("x")) is None
