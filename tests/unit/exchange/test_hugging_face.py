"""Exports are what transformers loads without code, and compute the same logits; what differs is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from parallelrun.config.model_schema import DatasetConfig
from parallelrun.exchange.export import export
from parallelrun.exchange.source import open_source
from parallelrun.exchange.tokenizer import byte_files
from parallelrun.models import functions
from parallelrun.models.hugging_face import family_for
from tests.exchange import CASES, FACTS, hashes, make, network_of, tokens

os.environ["HF_HUB_OFFLINE"] = "1"
SHARD_BYTES = 6000  # several files for every model


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install 'parallelrun[hf]'")


def distance(source, theirs) -> float:
    """The largest difference between the logits, over the largest logit if that is above 1."""
    with torch.no_grad():
        wanted = network_of(source.config, source.spec, source.weights)(tokens())
        found = theirs.eval()(tokens()).logits
    assert wanted.std() > 0.1
    return float((wanted - found).abs().max()) / max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_logits(case, tmp_path, transformers):
    source = make(case)
    export(source, tmp_path / "out", "hf", None, SHARD_BYTES)
    auto = transformers.AutoModelForMaskedLM if "Masked" in case else transformers.AutoModelForCausalLM
    theirs, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == case.partition(",")[0]
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert distance(source, theirs) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_files_and_logits_are_those_that_were_compared_with_transformers(case, tmp_path):
    """After a change that is meant, `python -m tests.exchange` writes the facts anew; it needs transformers."""
    source, facts = make(case), json.loads(FACTS.read_text())[case]
    export(source, tmp_path / "out", "hf", None, 10**9)
    assert hashes(tmp_path / "out") == {name: facts[name] for name in ("config.json", "model.safetensors")}
    with torch.no_grad():
        ours = network_of(source.config, source.spec, source.weights)(tokens())[0, -1]
    wanted = torch.tensor(facts["logits"])
    assert (ours - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_what_was_exported_comes_back_bit_by_bit(case, tmp_path):
    source = make(case)
    export(source, tmp_path / "out", "hf", None, SHARD_BYTES)
    back = open_source(tmp_path / "out", "directory")
    for name, one in source.spec.parameters.items():
        assert torch.equal(back.weights.whole(name, one.shape), source.weights.whole(name, one.shape)), name
    ours, theirs = (network_of(one.config, one.spec, one.weights) for one in (source, back))
    with torch.no_grad():
        assert torch.equal(ours(tokens()), theirs(tokens()))


def swapped(pieces, first, second):
    """The pieces with the parameters of two names exchanged."""
    for piece in pieces:
        other = piece.parameter.replace(first, "?").replace(second, first).replace("?", second)
        yield replace(piece, parameter=other)


PLANTED = {
    "k and v of GPT-2 exchanged": ("GPT2LMHeadModel", lambda pieces: swapped(pieces, ".qkv.k.", ".qkv.v.")),
    "square weights of GPT-2 not transposed": (
        "GPT2LMHeadModel",
        lambda pieces: (replace(p, transposed=p.transposed and "attention.out" not in p.parameter) for p in pieces),
    ),
    "gate and up of Llama exchanged": ("LlamaForCausalLM", lambda pieces: swapped(pieces, ".up.gate.", ".up.up.")),
    "norms of Llama exchanged": ("LlamaForCausalLM", lambda pieces: swapped(pieces, "attention_norm", "mlp_norm")),
    "gate and up of Mixtral's experts exchanged": (
        "MixtralForCausalLM",
        lambda pieces: swapped(pieces, "experts.gate", "experts.up"),
    ),
    "experts of Mixtral in another order": (
        "MixtralForCausalLM",
        lambda pieces: (replace(p, index=p.index if p.index is None else 3 - p.index) for p in pieces),
    ),
}


@pytest.mark.parametrize("case, planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_in_the_layout_shows_in_the_logits(case, planted, tmp_path, transformers, monkeypatch):
    source = make(case)
    family = type(family_for(source.config, source.spec))
    right = family.pieces
    monkeypatch.setattr(family, "pieces", lambda *arguments: planted(right(*arguments)))
    export(source, tmp_path / "out", "hf", None, 10**9)
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-2


def test_interleaved_rotary_pairs_show_in_the_logits(tmp_path, transformers, monkeypatch):
    source = make("LlamaForCausalLM")
    export(source, tmp_path / "out", "hf", None, 10**9)
    rotate = functions.rotate

    def interleaved(x, rotary, start=0):
        pairs = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(pairs, rotary, start)

    monkeypatch.setattr(functions, "rotate", interleaved)
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-2


@pytest.mark.parametrize("field", ["layer_norm_epsilon", "activation_function"])
def test_a_wrong_field_of_config_json_shows_in_the_logits(field, tmp_path, transformers):
    source = make("GPT2LMHeadModel")
    export(source, tmp_path / "out", "hf", None, 10**9)
    file = tmp_path / "out" / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **{"layer_norm_epsilon": 0.1, "activation_function": "gelu"}, **{
        key: content[key] for key in ("layer_norm_epsilon", "activation_function") if key != field}}))  # fmt: skip
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-4


def test_the_exported_tokenizer_gives_a_token_per_byte(tmp_path, transformers):
    source = make("GPT2LMHeadModel")
    source = replace(source, config=replace(source.config, dataset=DatasetConfig(name="pystdlib")))
    export(source, tmp_path / "out", "hf", None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n\treturn  'ä€🙂'\r\n \x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_the_tokenizer_of_a_bert_knows_its_mask(tmp_path, transformers):
    for name, content in byte_files(64, 256).items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a[MASK]b")["input_ids"] == [ord("a"), 256, ord("b")]
    assert tokenizer.mask_token_id == 256
