"""Each model's `own_keys` are the keys that its spec and its network read, and no others."""

from __future__ import annotations

import sys

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.planner.model import definitions
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import whole_network
from tests.exchange import LATENT
from tests.plans import narrow_config, tiny_config
from tests.vision import ALEXNET, BOTTLENECK, VGG

ROPE = {"model.position": "rope"}
YARN, LLAMA3 = ROPE | {"model.rope_scaling": "yarn"}, ROPE | {"model.rope_scaling": "llama3"}
BERT = {"model.name": "bert", "model.preset": "bert"}
MODULE = {
    "model.name": "module", "model.preset": "module", "model.source": "tests/unit/user_net.py:build", "tp": 2,
    "model.roles": {"*.[qkv]": "column_parallel", "*.out": "row_parallel"}, "model.vocab": 32,
}  # fmt: skip
IMAGES = {
    "model.name": "module", "model.preset": "module", "model.source": "tests/unit/other_nets.py:resnet18",
    "dataset.name": "digits", "dataset.vocab": None, "model.vocab": None,
}  # fmt: skip
ELSEWHERE = {"vocab", "norm_samples", "dropout"}  # the plan reads them
MLP = {"model.name": "mlp", "model.preset": "mlp"}
OF_ANY = {
    "name",
    "preset",
    "router",
    "experts",
    "dense_layers",
    "expert_bias",
    "expert_ffn",
    "expert_period",
    "shared_experts",
    "shared_gate",
}  # see routing.unread
CASES = {
    "gpt": [{}, LLAMA3, LATENT | YARN],
    "bert": [BERT],
    "mlp": [MLP, MLP | {"dataset.name": "pystdlib", "model.vocab": 256}],
    "resnet": [BOTTLENECK], "vgg": [VGG], "alexnet": [ALEXNET], "module": [MODULE, IMAGES],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_own_keys_of_a_model_are_those_that_it_reads(name, monkeypatch):
    read = set()

    def recorded(model, key):
        if "/parallelrun/models/" in sys._getframe(1).f_code.co_filename:
            read.add(key)
        return object.__getattribute__(model, key)

    for overrides in CASES[name]:
        plan = resolve(tiny_config(overrides))
        with monkeypatch.context() as patch:
            patch.setattr(ModelConfig, "__getattribute__", recorded)
            config = narrow_config(overrides)
            definitions.model(config).make(config, plan.spec.vocab)
            whole_network(config, plan)
    own = definitions.model(config).own_keys
    assert read - OF_ANY - {"position"} <= own, "it reads what it does not declare"
    assert own - ELSEWHERE <= read, "it declares what it does not read"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model.channels": 3}, "model.channels"),
        (BOTTLENECK, "model.layers"),
        (MODULE, "dropout"),
        (BERT, "model.norm_momentum"),
        ({"model.global_period": 2}, "model.global_period"),
    ],
)
def test_a_key_that_the_model_does_not_read_is_refused(overrides, key):
    overrides = {"dropout": 0.1, **overrides}
    with pytest.raises(ConfigError, match=f"^{key}=.* is not read by model="):
        resolve(tiny_config(overrides), given=frozenset({key}))
    resolve(tiny_config(overrides), given=frozenset({"model.name", "model.vocab"}))


def test_an_empty_list_or_mapping_is_as_if_it_had_not_been_given():
    for key, empty in (("model.arguments", {}), ("model.stages", [])):
        resolve(tiny_config({key: empty}), given=frozenset({key}))
