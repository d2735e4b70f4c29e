"""Generation on tensor-parallel ranks: the logits of every position are those of one device."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.distributed.mesh import build_mesh
from parallelrun.strategies.tensor.megatron.layers import SequencePositionEmbedding
from parallelrun.training.inference.generate import Generator, Sampling
from parallelrun.training.inference.model import plan_for
from tests.exchange import SEQ, make, network_of
from tests.pool import run_ranks

TOKENS = [3, 17, 9, 30, 0, 11, 25, 4]
CAPACITY = RouterConfig(top_k=2, capacity_factor=1.0, min_capacity=1)
CASES = {
    "learned positions, uneven vocabulary": ("GPT2LMHeadModel", {"vocab": 37}, 2),
    "rotary positions": ("LlamaForCausalLM", {}, 2),
    "a kv head on two ranks": ("LlamaForCausalLM", {}, 4),
    "experts": ("MixtralForCausalLM", {}, 2),
    "latent attention": ("DeepseekV3ForCausalLM", {}, 2),
    "experts with a capacity": ("MixtralForCausalLM", {"model.router": CAPACITY}, 2),
}


def one_after_the_other(case: str, more: dict, tp: int, forgets: bool = False) -> tuple[list[torch.Tensor], list[int]]:
    """(the logits after 2, 3, ... tokens, with the cache that the model allows; the most likely continuation).

    forgets: plant a rank that does not know where the new token stands, as a training rank does not.
    """
    source = make(case, **more)
    _, plan = plan_for(source, tp)
    model = Generator(source, (plan, build_mesh(plan, torch.device("cpu"))))
    start = property(lambda self: 0, lambda self, value: None)
    with patch.object(SequencePositionEmbedding, "start", start, create=True) if forgets else nullcontext():
        logits = [model._next_logits(TOKENS[:length], length == 2 or not model._caches) for length in range(2, SEQ + 1)]
        return logits, list(model.tokens(TOKENS[:3], 2 * SEQ, Sampling(temperature=0)))


@pytest.mark.parametrize("case, more, tp", CASES.values(), ids=CASES)
def test_logits_and_tokens_are_those_of_one_device(case, more, tp):
    source = make(case, **more)
    network = network_of(source.config, source.spec, source.weights)
    wanted = list(Generator(source).tokens(TOKENS[:3], 2 * SEQ, Sampling(temperature=0)))
    for logits, tokens in run_ranks(tp, one_after_the_other, case, more, tp):
        assert tokens == wanted
        for length, found in enumerate(logits, 2):
            with torch.no_grad():
                assert (found - network(torch.tensor([TOKENS[:length]]))[0, -1]).abs().max() < 2e-5


def test_a_rank_that_forgets_the_position_is_seen():
    found, _ = run_ranks(2, one_after_the_other, "GPT2LMHeadModel", {}, 2, True)[0]
    source = make("GPT2LMHeadModel")
    network = network_of(source.config, source.spec, source.weights)
    with torch.no_grad():
        assert (found[-1] - network(torch.tensor([TOKENS]))[0, -1]).abs().max() > 1e-2


def test_an_illegal_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match="is not divisible by tp=3"):
        plan_for(make("GPT2LMHeadModel"), 3)
