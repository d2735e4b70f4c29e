"""When a search chooses the plan, what it starts from, and what its result is turned into."""

from __future__ import annotations

import re

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.search import command_of
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.search import open_keys as chosen
from parallelrun.planner.search import requested_searches as searches
from tests.unit.config.test_presets import composed

SMALL = ("model=gpt2_124m", "cluster=a100_dgx", "precision=bf16", "global_batch=16", "micro_batch=4", "recompute=none")


@pytest.mark.parametrize(
    ("words", "is_open"),
    [
        ((), False),
        (("world=8",), False),
        (("gpus=8",), True),
        (("cluster=a100_dgx",), True),
        (("cluster=ethernet_25g",), False),  # it gives no bandwidth of its devices' memory
        (("cluster=ethernet_25g", "gpus=8"), True),
        (("cluster=a100_dgx", "world=8", "micro_batch=2"), True),
        (("objective=cost", "tokens=1e9"), True),
        *((("cluster=a100_dgx", "gpus=8", word), False) for word in ("strategy=ptdp", "tp=2", "dp=8", "pp=2")),
        (("strategy=auto", "tp=2", "world=8"), True),
    ],
)
def test_a_plan_is_searched_where_nothing_chooses_it_and_devices_are_known(words, is_open):
    found = composed(*words)
    assert chosen.is_open(found.config, found.given) == is_open


def test_only_auto_searches_for_another_verb():
    found = composed("cluster=a100_dgx", "gpus=8")
    found.config.verb = "run"
    try:
        assert not chosen.is_open(found.config, found.given)
    finally:
        found.config.verb = "plan"


def test_gpus_is_another_name_of_world():
    found = composed("gpus=8")
    assert (found.config.world, found.config.gpus) == (8, None) and {"gpus", "world"} <= found.given
    assert composed("gpus=8", "world=8").config.world == 8
    with pytest.raises(ConfigError, match="gpus=8 contradicts world=4"):
        composed("gpus=8", "world=4")
    with pytest.raises(ConfigError, match="gpus=0 is not a whole number"):
        composed("gpus=0")


def test_servers_have_no_device():
    found = composed("strategy=ps", "gpus=4")
    with pytest.raises(ConfigError, match="gpus=4 counts a device for every rank"):
        resolve(found.config, given=found.given)


def test_the_devices_to_search_on():
    def devices(*words: str, world: int | None = None, gpus: int | None = None, verb: str = "plan") -> int:
        config = composed(*words).config
        config.verb = verb
        try:
            return chosen.num_devices(config, world, gpus)
        finally:
            config.verb = "plan"

    assert devices("cluster=a100_dgx") == 8 and devices("cluster=a100_dgx", "cluster.nodes=4") == 32
    assert devices("cluster=a100_dgx", "gpus=16") == 16 and devices(world=4, verb="run") == 4
    assert devices("strategy=auto", gpus=2, verb="run") == 2
    with pytest.raises(ConfigError, match="number of devices"):
        devices("strategy=auto")
    with pytest.raises(ConfigError, match="launcher has started 4 ranks"):
        devices("strategy=auto", "world=8", world=4)


def test_the_command_of_a_plan_gives_that_plan():
    words = (*SMALL[:-2], "local_batch=4", "gpus=4", "tokens=1e9", "explain=true", "strategy=auto")
    found = composed(*(word for word in words if word != "global_batch=16"))
    search = searches.searched(found.config, found.given, 4)
    command = command_of(search.best[0], found.overrides)
    again = composed(*command.split()[1:])
    plan = resolve(again.config, given=again.given)
    predicted = step_time(plan, again.config.cluster)
    assert predicted is not None and search.best[0].time is not None
    assert predicted.step_s == search.best[0].time.step_s
    assert not {"strategy", "tokens", "explain", "local_batch"} & again.given and plan.batch.global_batch == 16


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("gpus=2",), ("peak_tflops.fp32", "memory_gb_s", "intra_gb_s")),
        (("gpus=2", "cluster=ethernet_25g"), ("memory_gb_s",)),
        (("gpus=16", "cluster=a100_dgx", "cluster.inter_gb_s=null"), ("inter_gb_s",)),
    ],
)
def test_rates_that_a_search_lacks_are_named(words, keys):
    found = composed(*words)
    with pytest.raises(ConfigError) as caught:
        searches.searched(found.config, found.given, found.config.world or 0)
    (problem,) = caught.value.problems
    assert problem.what.endswith(", ".join(f"cluster.{key}" for key in keys)) and caught.value.exit_code == 2


def test_a_rate_of_zero_is_refused_and_not_called_missing():
    config = composed(*SMALL, "cluster.inter_gb_s=0").config
    with pytest.raises(ConfigError, match="150 GB/s are plausible"):
        searches.searched(config, frozenset(), 16)


def test_a_search_without_a_plan_that_fits_says_what_would():
    found = composed("model=llama3_8b", "cluster=a100_dgx", "precision=bf16", "global_batch=4", "micro_batch=1")
    with pytest.raises(ConfigError) as caught:
        searches.searched(found.config, found.given, 1)
    (problem,) = caught.value.problems
    assert "none of 3 legal plans on 1 device" in problem.what and "fits a device of 7" in problem.what
    assert re.search(r"the smallest needs 1\d\d\.\d GiB: pp=1 dp=1 tp=1 recompute=full", problem.what)
    assert problem.suggestion == "gpus=2"
    again = searches.searched(found.config, found.given, 2)
    assert again.best[0].fits == "yes", "the suggestion helps"


def test_a_key_that_leaves_no_plan_is_to_be_left_out():
    words = ("model=llama3_8b", "cluster=a100_dgx", "precision=bf16", "global_batch=4", "micro_batch=1")
    found = composed(*words, "recompute=none", "layout=1d")
    with pytest.raises(ConfigError) as caught:
        searches.searched(found.config, found.given, 2)
    assert caught.value.problems[0].suggestion == "leave recompute out or global_batch=1 or gpus=4"


def test_a_search_without_a_legal_plan_says_which_rule_removed_most():
    found = composed("model=gpt2_124m", "cluster=a100_dgx", "gpus=5", "global_batch=8", "tp=5")
    with pytest.raises(ConfigError) as caught:
        searches.searched(found.config, found.given, 5)
    (problem,) = caught.value.problems
    assert problem.what.startswith("no plan on 5 devices of cluster=a100_dgx is legal; the rule about")
    assert "leave tp out" in problem.suggestion
