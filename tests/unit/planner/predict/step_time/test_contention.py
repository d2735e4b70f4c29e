"""Tensor parallelism over hosts: its collectives share ports with those of the data strategy."""

from __future__ import annotations

import pytest

from parallelrun.planner.predict.step_time import step
from parallelrun.planner.predict.step_time.blocks import TENSOR
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.resolve_config import resolve
from tests.unit.config.test_presets import composed


@pytest.mark.parametrize(("tp", "is_slower"), [(8, False), (16, True)])
def test_tensor_parallelism_over_hosts_shares_its_ports_with_data_communication(tp: int, is_slower: bool) -> None:
    """FSDP's gathers are under way while layers communicate; inside a host, they use other links."""
    seconds = []
    for dp in (1, 4):
        sizes = {"dp": dp, "tp": tp, "global_batch": 8 * dp, "micro_batch": 2}
        found = composed(
            "model=llama3_70b", "model.layers=4", "strategy=fsdp", "cluster=h100_dgx", "recompute=full",
            *(f"{key}={value}" for key, value in sizes.items()),
        )  # type: ignore[no-untyped-call]  # fmt: skip
        time = step_time(resolve(found.config, given=found.given), found.config.cluster)
        assert time
        seconds.append(time.parts[TENSOR])
    assert (seconds[1] > 1.01 * seconds[0]) == is_slower and seconds[1] < 2 * seconds[0]


def test_each_of_two_that_share_a_port_gets_half_of_it() -> None:
    assert [step._contention_s(1.0, hidden, 5.0) for hidden in (-1.0, 0.0, 2.0, 4.0, 9.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]
