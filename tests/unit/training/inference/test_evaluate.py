"""Scores: those of every sample by itself, whatever the batches, and by the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.tokenizer import byte_files
from parallelrun.cli.main import main
from parallelrun.config.schema.model_schema import DatasetConfig, RouterConfig
from parallelrun.data import open_dataset
from parallelrun.models.documents import DocumentBounds
from parallelrun.training.inference import evaluate
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
        assert (
            main(["eval", str(there / "out"), "--json", "split=all", "dataset=text", f"path={there}/{name}.txt"]) == 0
        )
        losses[f"all of {name}"] = json.loads(capsys.readouterr().out)["loss"]
    parts = ", ".join(f"{{name: text, path: {there}/{name}.txt, weight: {weight}}}" for name, weight in
                      (("text", 1), ("other", 3)))  # fmt: skip
    words = ["eval", str(there / "out"), "dataset=mixture", f"dataset.mixture=[{parts}]"]
    assert main([*words, "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)
    first = losses["all of text"], 113  # samples of 8 tokens, the last of them incomplete
    assert main([*words, "--json", "split=all", f"samples={first[1] + 3}"]) == 0
    some = json.loads(capsys.readouterr().out)
    assert some["samples"] == first[1] + 3 and some["parts"]["text"] == pytest.approx(first[0], rel=1e-6)
    assert main([*words, "--json", "split=all"]) == 0
    found = json.loads(capsys.readouterr().out)["parts"]
    assert found == pytest.approx({name: losses.pop(f"all of {name}") for name in ("text", "other")}, rel=1e-6)
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


def by_stream(source, tokens: list[int]) -> tuple[float, int]:
    """(sum of the losses, targets) of every token but the first, in windows of seq tokens, one at a time."""
    network, seq, loss = network_of(source.config, source.spec, source.weights), source.spec.seq, 0.0
    for start in range(0, len(tokens) - 1, seq):
        part = torch.tensor(tokens[start : start + seq + 1])
        with torch.no_grad():
            logits = network(part[None, :-1])[0].double()
        loss += float(functional.cross_entropy(logits, part[1:], reduction="sum"))
    return loss, len(tokens) - 1


def score(source, folder, text: bytes, split: str = "all", **dataset):
    (folder / "small.txt").write_bytes(text)
    data = DatasetConfig(name="text", path=str(folder / "small.txt"), **dataset)
    config = replace(source.config, dataset=data, global_batch=1, verb="eval")
    return evaluate.evaluate(source, config, split, None)


TEXT = bytes(range(32, 127)) * 3


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 16, 17, 30, 100, 257])
@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_every_token_of_a_file_is_scored_once(case, length, tmp_path):
    source = make(case, vocab=256)
    assert source.spec.seq == 8
    scores, (loss, count) = score(source, tmp_path, TEXT[:length]), by_stream(source, list(TEXT[:length]))
    assert (scores.targets, scores.samples) == (count, -(-count // 8)) == (length - 1, -(-(length - 1) // 8))
    assert scores.loss == pytest.approx(loss / count, rel=1e-5)
    assert scores.bits_per_byte == pytest.approx(scores.loss / math.log(2))


@pytest.mark.parametrize("group", [1, 3])
def test_the_last_group_is_filled_with_padding(group, tmp_path):
    router = RouterConfig(top_k=2, capacity_factor=8.0, group_samples=group)
    scores = score(make("MixtralForCausalLM", vocab=256, **{"model.router": router}), tmp_path, TEXT[:60])
    alone = replace(router, group_samples=1)
    loss, count = by_stream(make("MixtralForCausalLM", vocab=256, **{"model.router": alone}), list(TEXT[:60]))
    assert (scores.targets, scores.samples) == (count, 8) == (59, 8)
    assert scores.loss == pytest.approx(loss / count, rel=1e-5)


def test_no_expert_chooses_padding(tmp_path):
    router = RouterConfig(kind="expert_choice", capacity_factor=1.0)
    source = make("MixtralForCausalLM", vocab=256, **{"model.router": router})
    tokens = torch.tensor(list(TEXT[:4]))
    inputs = torch.cat((tokens[:3], torch.zeros(5, dtype=torch.int64)))[None]
    network = network_of(source.config, source.spec, source.weights)
    with torch.no_grad():
        logits, others = (network(inputs, documents=DocumentBounds.of([[length]], 8))[0, :3] for length in (3, 8))
    loss = float(functional.cross_entropy(logits, tokens[1:]))
    assert score(source, tmp_path, TEXT[:4]).loss == pytest.approx(loss, rel=1e-5)
    assert abs(loss - float(functional.cross_entropy(others, tokens[1:]))) > 1e-3, "padding would change the loss"


def test_every_token_of_a_split_is_scored_once(tmp_path):
    source = make("GPT2LMHeadModel", vocab=256)
    text = TEXT[:250]
    parts = [score(source, tmp_path, text, split) for split in ("train", "val")]
    assert sum(one.targets for one in parts) == len(text) - 2  # the first token of each follows nothing
    whole = score(source, tmp_path, text, pack=True)
    assert whole.targets == len(text) - 1


def test_masked_tokens_behind_the_last_window_are_scored(tmp_path):
    source = make("BertForMaskedLM", vocab=257)
    assert source.spec.mask_token is not None
    few, more = (score(source, tmp_path, TEXT[:length]) for length in (8 * 5 + 1, 8 * 5 + 4))
    assert more.samples == few.samples + 1 and more.targets > few.targets
    config = replace(source.config, dataset=DatasetConfig(name="text", path=str(tmp_path / "small.txt")), verb="eval")
    inputs, targets = open_dataset(config, source.spec).whole.rest()
    assert len(inputs) == len(targets) == 4, "the last token is an input, too"


def test_a_file_without_a_target_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no target"):
        score(make("GPT2LMHeadModel", vocab=256), tmp_path, b"a")
