"""Scores: those of every sample by itself, whatever the batches, and by the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from parallelrun.cli.main import main
from parallelrun.config.model_schema import DatasetConfig, RouterConfig
from parallelrun.data import open_dataset
from parallelrun.exchange.export import export
from parallelrun.exchange.tokenizer import byte_files
from parallelrun.inference import evaluate
from tests.exchange import make, network_of
from tests.extras import needs


def by_hand(source, config, split: str) -> tuple[float, float, int]:
    """(loss, top-1, targets) of a split, one sample at a time."""
    network, loss, right, count = network_of(source.config, source.spec, source.weights), 0.0, 0, 0
    samples = getattr(open_dataset(config, source.spec), split)
    for index in range(len(samples)):
        tokens, targets = (torch.from_numpy(one) for one in samples.sample(index))
        with torch.no_grad():
            logits = network(tokens[None])[0].double()
        valid = targets >= 0
        loss += float(functional.cross_entropy(logits[valid], targets[valid], reduction="sum"))
        right += int((logits.argmax(-1)[valid] == targets[valid]).sum())
        count += int(valid.sum())
    return loss / count, right / count, count


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "BertForMaskedLM", "MixtralForCausalLM"])
def test_scores_are_those_of_every_sample_by_itself(case, monkeypatch):
    more = {"model.router": RouterConfig(top_k=2, capacity_factor=1.0, min_capacity=1)} if "Mixtral" in case else {}
    source = make(case, **more)
    monkeypatch.setattr(evaluate, "_ELEMENTS", 5 * 8 * 32)  # batches of five, and a smaller last one
    config = replace(source.config, global_batch=1)
    scores = evaluate.evaluate(source, config, "train", None)
    loss, top1, count = by_hand(source, config, "train")
    assert abs(scores.loss - loss) < 1e-5 * loss
    assert (scores.top1, scores.targets) == (top1, count)
    assert scores.perplexity == math.exp(scores.loss)
    assert scores.bits_per_byte is None  # synthetic tokens are no bytes
    assert evaluate.evaluate(source, config, "train", 7).samples == 7
    assert evaluate.evaluate(source, config, "all", None).samples > scores.samples


@pytest.fixture
def there(tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 20
    (tmp_path / "text.txt").write_text(text)
    source = make("LlamaForCausalLM", vocab=256)
    config = replace(source.config, dataset=DatasetConfig(name="text", path=str(tmp_path / "text.txt")))
    export(replace(source, config=config), tmp_path / "out", "safetensors", None, 10**9)
    export(source, tmp_path / "hf", "hf", None, 10**9)
    return tmp_path


def test_the_command_scores_its_own_data_and_others(there, capsys):
    assert main(["eval", str(there / "out"), "--json", "split=all"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))
    assert main(["eval", str(there / "hf"), "--json", "split=all", "dataset=text", f"path={there / 'text.txt'}"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert {**second, "source": first["source"]} == first
    assert main(["eval", str(there / "out")]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_each_part_of_a_mixture_has_its_loss(there, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "_ELEMENTS", 5 * 8 * 256)  # batches that would reach from one part into the next
    (there / "other.txt").write_text("0123456789" * 90)
    losses = {}
    for name in ("text", "other"):
        assert main(["eval", str(there / "out"), "--json", "dataset=text", f"path={there}/{name}.txt"]) == 0
        found = json.loads(capsys.readouterr().out)
        losses[name] = found["loss"], found["targets"]
        assert found["parts"] == {}
    parts = ", ".join(f"{{name: text, path: {there}/{name}.txt, weight: {weight}}}" for name, weight in
                      (("text", 1), ("other", 3)))  # fmt: skip
    words = ["eval", str(there / "out"), "dataset=mixture", f"dataset.mixture=[{parts}]"]
    assert main([*words, "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)
    assert mixed["parts"] == pytest.approx({name: loss for name, (loss, _) in losses.items()}, rel=1e-6)
    mean = sum(loss * number for loss, number in losses.values()) / sum(number for _, number in losses.values())
    assert mixed["loss"] == pytest.approx(mean, rel=1e-6)
    assert main(words) == 0
    assert f"loss, other    {losses['other'][0]:.4f}" in capsys.readouterr().out


@needs("tokenizers")
def test_bits_per_byte_of_tokens_that_are_parts_of_text(there, capsys):
    """A token of two bytes: its loss counts for both."""
    document = byte_files(8, None)["tokenizer.json"]
    document["model"] |= {"vocab": {**document["model"]["vocab"], "th": 256}, "merges": ["t h"]}
    (there / "tokenizer.json").write_text(json.dumps(document))
    source = make("LlamaForCausalLM", vocab=257)
    export(source, there / "pairs", "hf", None, 10**9)
    words = ["dataset=text", f"path={there / 'text.txt'}", f"tokenizer={there / 'tokenizer.json'}", "split=all"]
    assert main(["eval", str(there / "pairs"), "--json", *words, f"dataset.cache={there / 'cache'}"]) == 0
    found = json.loads(capsys.readouterr().out)
    num_bytes = found["loss"] * found["targets"] / math.log(2) / found["bits_per_byte"]
    assert 1.02 < num_bytes / found["targets"] < 1.05  # a sentence of 45 bytes has one "th"


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["hf"], 2, "is random and says nothing about trained weights"),
        (["out", "split=test"], 2, "split=test: must be one of val, train, all"),
        (["out", "samples=0"], 2, "samples=0: not a whole number"),
        (["out", "tp=2"], 2, "eval reads dataset, path, precision, split and samples, not tp"),
        (["out", "path=/nowhere.txt"], 3, "no such file or folder: /nowhere.txt"),
        (["nowhere"], 4, "no such checkpoint"),
    ],
)
def test_bad_requests_say_what_is_wrong(words, code, said, there, capsys):
    assert main(["eval", str(there / words[0]), *words[1:]]) == code
    assert said in capsys.readouterr().err
