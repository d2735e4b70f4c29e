"""Each role layer alone on the ranks of a tensor axis: outputs and every gradient are those of one device, in fp64."""

from __future__ import annotations

import pytest

from tests.pool import run_ranks
from tests.tensor_cases import BOUND, prove_layers

ROLES = ("column_parallel", "row_parallel", "embedding", "table", "position_embedding", "norm", "head")
SEQUENCE_PARALLEL = "strategy.tensor.sequence_parallel"


def assert_equal(results: list[dict[str, dict[str, float]]], roles: tuple[str, ...]) -> None:
    for errors_by_role in results:
        assert set(errors_by_role) == set(roles)
        for role, errors in errors_by_role.items():
            assert len(errors) > 1, f"{role}: there was nothing to compare"
            assert max(errors.values()) < BOUND, (role, errors)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp", [2, 4])  # 7 token ids: 4 + 3 rows, and 2 + 2 + 2 + 1; 2 kv heads: one, or half of one
def test_every_layer_gives_outputs_and_gradients_of_one_device(tp, sequence_parallel):
    overrides = {"tp": tp, SEQUENCE_PARALLEL: sequence_parallel}
    assert_equal(run_ranks(tp, prove_layers, ROLES, overrides), ROLES)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_collectives_as_nodes_of_their_own_compute_the_same(sequence_parallel):
    overrides = {"tp": 4, SEQUENCE_PARALLEL: sequence_parallel}
    assert_equal(
        run_ranks(4, prove_layers, ("column_parallel", "head"), overrides, "zero_bubble"), ("column_parallel", "head")
    )
