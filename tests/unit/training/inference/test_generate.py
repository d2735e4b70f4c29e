"""Generated tokens: the cache changes nothing, draws repeat, and what cannot be continued is refused."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint.exchange.export import export
from parallelrun.cli.main import main
from parallelrun.config.schema.model_schema import DatasetConfig, RouterConfig
from parallelrun.models import functions
from parallelrun.models.layers import PositionEmbedding
from parallelrun.training.inference.generate import Generator, Sampling, choose
from tests.cli.launcher import run_to_end
from tests.exchange import CASES, SEQ, make, network_of
from tests.extras import needs

CAUSAL = [case for case in CASES if "Masked" not in case]
TOKENS = [3, 17, 9, 30, 0, 11, 25, 4]


def worst(source) -> float:
    """The largest difference between the logits of generation and those of the whole context at once."""
    model, network = Generator(source), network_of(source.config, source.spec, source.weights)
    found = []
    for length in range(2, SEQ + 1):
        fresh = length == 2 or not model._caches
        logits = model._next_logits(TOKENS[:length], fresh)
        with torch.no_grad():
            found.append(float((logits - network(torch.tensor([TOKENS[:length]]))[0, -1]).abs().max()))
    return max(found)


@pytest.mark.parametrize("case", CAUSAL)
def test_the_cache_changes_nothing(case):
    assert Generator(make(case))._caches
    assert worst(make(case)) < 2e-5


def test_experts_with_a_capacity_see_the_whole_context():
    source = make("MixtralForCausalLM", **{"model.router": RouterConfig(top_k=2, capacity_factor=1.0, min_capacity=1)})
    assert not Generator(source)._caches
    assert worst(source) < 2e-5


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_planted_bug_in_the_positions_shows(case, monkeypatch):
    rotate = functions.rotate
    monkeypatch.setattr(functions, "rotate", lambda x, rotary, start=0: rotate(x, rotary))
    monkeypatch.setattr(PositionEmbedding, "start", property(lambda self: 0, lambda self, value: None), raising=False)
    assert worst(make(case)) > 1e-2


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_it_goes_on_when_the_context_is_full(case):
    """Each token follows from the last seq tokens at most, of which the older half is dropped at once."""
    source = make(case)
    network = network_of(source.config, source.spec, source.weights)
    found = list(Generator(source).tokens(TOKENS, 3 * SEQ, Sampling(temperature=0)))
    assert len(found) == 3 * SEQ
    context = list(TOKENS)
    for token in found:
        with torch.no_grad():
            assert token == int(network(torch.tensor([context]))[0, -1].argmax())
        context = [*context, token]
        context = context[-SEQ // 2 :] if len(context) > SEQ else context


def test_draws_repeat_with_their_seed_and_follow_the_probabilities():
    model = Generator(make("GPT2LMHeadModel"))
    first, again, other = (list(model.tokens([1], 20, Sampling(1.0, None, seed))) for seed in (1, 1, 2))
    assert first == again != other
    logits, draws = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])), torch.Generator().manual_seed(0)
    counts = Counter(choose(logits, Sampling(temperature=0.5, top_k=2), draws) for _ in range(2000))
    assert counts.keys() == {2, 3}
    assert abs(counts[3] / 2000 - 16 / 25) < 0.05


def test_a_bert_does_not_predict_next_tokens():
    with pytest.raises(ConfigError, match="does not predict next tokens"):
        Generator(make("BertForMaskedLM"))


@pytest.fixture
def bytes_model(tmp_path):
    source = make("LlamaForCausalLM", vocab=256)
    source = replace(source, config=replace(source.config, dataset=DatasetConfig(name="pystdlib")))
    export(source, tmp_path / "out", "safetensors", None, 10**9)
    return str(tmp_path / "out")


@needs("tokenizers")
def test_the_command_prints_the_text_and_json(bytes_model, capsys):
    assert main(["generate", bytes_model, "a=b", "max_tokens=5", "temperature=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == [97, 61, 98]
    assert found["text"] == bytes(found["tokens"]).decode(errors="replace")
    assert main(["generate", bytes_model, "a=b", "max_tokens=5", "temperature=0"]) == 0
    assert capsys.readouterr().out == bytes([97, 61, 98, *found["tokens"]]).decode(errors="replace") + "\n"
    assert main(["generate", bytes_model, "tokens=[97,61,98]", "max_tokens=5", "temperature=0"]) == 0
    assert capsys.readouterr().out == " ".join(map(str, [97, 61, 98, *found["tokens"]])) + "\n"


@pytest.mark.parametrize(
    "words, said",
    [
        (["tokens=[1,999]"], "token id 999 is outside the vocabulary of 256"),
        (["tokens=[1,x]"], "not a list of whole numbers"),
        (["tokens=[1]", "temperature=-1"], "temperature=-1: not a number in its range"),
        (["tokens=[1]", "top_k=0"], "top_k=0: not a whole number in its range"),
        (["tokens=[1]", "max_tokens=many"], "max_tokens=many: not a whole number in its range"),
        (["tokens=[1]", "top_p=0.5"], "top_p=0.5 is none of max_tokens="),
        (["tokens=[1]", "seed=1", "seed=2"], "seed=2 is given twice"),
        (["two", "words"], "tp=; a text is one argument: quote it"),
        (["text", "tokens=[1]"], "give a text, or token ids"),
        ([], "give a text, or token ids"),
    ],
)
def test_bad_words_are_exit_2(words, said, bytes_model, capsys):
    assert main(["generate", bytes_model, *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_on_two_ranks_gives_the_tokens_of_one(bytes_model, tmp_path):
    def program(*words: str, tokens: str = "tokens=[97,61,98]") -> subprocess.CompletedProcess[str]:
        return run_to_end("generate", bytes_model, tokens, "max_tokens=6", "temperature=0", *words, cwd=tmp_path)

    found = [json.loads(program(tp, "--json").stdout)["tokens"] for tp in ("tp=1", "tp=2")]
    assert found[0] == found[1] and len(found[0]) == 6
    assert program("tp=2").stdout == " ".join(map(str, [97, 61, 98, *found[0]])) + "\n"
    refused = program("tp=3", tokens="tokens=[97]")
    assert refused.returncode == 2 and "is not divisible by tp=3" in refused.stderr
