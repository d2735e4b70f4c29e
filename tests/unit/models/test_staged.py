"""`model.before`: how a forward that is no chain of modules is cut, and which forwards are refused."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.module import own_forward, spec
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.pieces.partition import cut
from tests.plans import narrow_config

FILE = Path(__file__).parents[1] / "staged_nets.py"


def config(twist: str = "", **more: Any) -> Config:
    return narrow_config({
        "model.name": "module", "model.preset": "module", "model.source": f"{FILE}:build", "dataset.name": "pystdlib",
        "dataset.vocab": None, "model.vocab": None, "model.before": ["embed", "positions", "drop"],
        "model.blocks": ["layers.*"], "model.arguments": {"twist": twist},
        **{key.replace("__", "."): value for key, value in more.items()},
    })  # fmt: skip


def problem_of(twist: str = "", **more: Any) -> Any:
    with pytest.raises(ConfigError) as caught:
        spec.MODEL.make(config(twist, **more), 32)
    return caught.value.problems[0]


def made(**more: Any) -> ModelSpec:
    return spec.MODEL.make(config(**more), 32)


def test_a_stage_begins_at_a_block_but_the_first_or_behind_the_blocks() -> None:
    model = made(model__layers=3)
    names = [block.name.removeprefix("module.") for block in model.blocks]
    assert names == ["embed", "positions", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert [block.follows for block in model.blocks] == [False, True, True, False, False, False, True]
    stages, _ = cut(model, config(), 4)
    assert [len(stage) for stage in stages] == [3, 1, 1, 2]


def test_parameters_of_the_forward_itself_are_on_the_stage_that_reads_them_first() -> None:
    cut = {"model__before": ["patches"], "model__blocks": ["encoder.blocks.*"], "model__arguments": {"tokens": True}}
    model = made(model__source=f"{FILE}:patches", dataset__name="digits", **cut)
    outside = {block.name.removeprefix("module."): {*block.outside} for block in model.blocks if block.outside}
    first = {"module.class_token", "module.encoder.positions"}
    assert outside == {"encoder.blocks.0": first, "head": {"module.scale"}}


def test_a_split_at_another_place_is_refused() -> None:
    given = config(model__layers=3, strategy__pipeline__split=["module.positions"])
    _, (problem,) = cut(made(model__layers=3), given, 2)
    assert "no stage can begin at module.positions" in problem.what and problem.suggestion.endswith("[module.layers.2]")


@pytest.mark.parametrize(
    "twist, more, said",
    [
        ("skip", {}, "more of earlier stages"),
        ("mask of values", {}, "more of earlier stages, or of the inputs"),
        ("branch on values", {}, "reads values"),
        ("looped", {}, "twice"),
        ("two names", {}, "more of earlier stages"),
        ("a weight of a block", {}, "module.table is in no block, and tied to one of a block"),
        ("between blocks, in place", {}, "in place"),
        ("", {"model__before": ["embed", "drop"]}, "in front of"),
        ("", {"model__blocks": ["layers.1", "layers.0"]}, "in front of"),
        ("", {"model__before": ["embed", "position"]}, "'position'"),
        ("", {"model__before": ["embed", "positions", "norm"]}, "more of earlier stages"),
        ("", {"model__blocks": []}, "model.blocks"),
    ],
)
def test_forwards_that_stages_cannot_compute_are_refused(twist: str, more: dict[str, Any], said: str) -> None:
    assert said in problem_of(twist, **more).what


@pytest.mark.parametrize(
    "twist",
    [
        "skip",
        "skip, in place",
        "skip, into a tensor",
        "mask of values",
        "branch on values",
        "looped",
        "between blocks, in place",
    ],
)
def test_large_modules_are_refused_by_what_they_read(twist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelrun.models.module.inspection.CHECKED_PARAMETERS", 0)
    assert problem_of(twist).kind == "undefined"


def test_what_absent_modules_return_cannot_be_read() -> None:
    absent = own_forward.absent((2, 3), torch.ones(()))
    assert isinstance(absent * torch.ones(3), own_forward.AbsentTensor) and absent.size(1) == 3
    write = [lambda x, y: x.__setitem__(0, y[0]), torch.Tensor.copy_]
    for change in (operator.ior, operator.ixor, operator.iadd, *write):
        with pytest.raises(ConfigError, match="in place"):
            change(torch.ones(2, 3), absent)
    assert isinstance(~absent.bool(), own_forward.AbsentTensor)
    for read in (bool, float, lambda x: x.tolist(), lambda x: x[0, 0].item(), lambda x: torch.equal(x, x)):
        with pytest.raises(ConfigError):
            read(absent)
