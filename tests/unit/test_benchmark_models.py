"""The plain models of the benchmarks have our parameters' names and shapes, so that both sides start alike."""

from __future__ import annotations

import pytest

from benchmarks.plain_gpt import SIZES, PlainGpt
from tests.plans import tiny_plan


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_plain_gpt_has_our_parameters(size):
    theirs = {name: tuple(tensor.shape) for name, tensor in PlainGpt(size).state_dict().items()}
    assert theirs == {name: spec.shape for name, spec in tiny_plan(size.overrides).spec.parameters.items()}
