"""Exports are what transformers loads without code, and compute the same logits; what differs is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.checkpoint.exchange.tokenizer import byte_files
from parallelrun.checkpoint.exchange.weights import FileWeights
from parallelrun.cli.main import main
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.models import functions
from parallelrun.models.hugging_face import family_for
from parallelrun.models.moe import routing
from parallelrun.models.transformer import latent_attention
from tests.exchange import CASES, FACTS, SEQ, VOCAB, hashes, make, network_of, tokens
from tests.extras import needs

os.environ["HF_HUB_OFFLINE"] = "1"
right_groups = routing._within_best_groups
SHARD_BYTES = 6000  # several files for every model


@pytest.fixture(scope="module")
def transformers():
    return import_module("transformers")


def distance(source, theirs) -> float:
    """The largest difference between the logits, over the largest logit if that is above 1."""
    with torch.no_grad():
        wanted = network_of(source.config, source.spec, source.weights)(tokens())
        found = theirs.eval()(tokens()).logits
    assert wanted.std() > 0.1
    return float((wanted - found).abs().max()) / max(1.0, float(wanted.abs().max()))


@needs("transformers")
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
    rounding = 2e-7 if case.startswith("Gemma") else 0.0  # of norms, whose weights are stored less 1
    for name, one in source.spec.parameters.items():
        pair = back.weights.whole(name, one.shape), source.weights.whole(name, one.shape)
        torch.testing.assert_close(*pair, rtol=0.0, atol=rounding * ("norm" in name), msg=name)
    ours, theirs = (network_of(one.config, one.spec, one.weights) for one in (source, back))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()), rtol=0.0, atol=100 * rounding)


def with_token_types(folder: Path) -> None:
    """Move a part of every position's embedding of an exported bert to token type 0, as a trained one has it."""
    tensors = load_file(folder / "model.safetensors")
    types = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    tensors["bert.embeddings.token_type_embeddings.weight"] = types
    tensors["bert.embeddings.position_embeddings.weight"] -= types[0]
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "type_vocab_size": 2}))


@pytest.mark.parametrize("planted", [False, True])
def test_token_types_and_the_vocabulary_bias_of_a_bert_are_read(planted, tmp_path, monkeypatch):
    source = make("BertForMaskedLM, exact GELU, vocabulary bias")
    export(source, tmp_path / "out", "hf", None, 10**9)
    with_token_types(tmp_path / "out")
    if planted:
        monkeypatch.setattr(FileWeights, "_added_to", lambda self, name: [])
    back = open_source(tmp_path / "out", "directory")
    ours, theirs = (network_of(one.config, one.spec, one.weights) for one in (source, back))
    with torch.no_grad():
        distance_of_logits = float((ours(tokens()) - theirs(tokens())).abs().max())
    assert back.config.model.head_bias and (distance_of_logits < 1e-5) != planted


def test_ids_of_special_tokens_come_back(tmp_path):
    export(make("LlamaForCausalLM"), tmp_path / "first", "hf", None, 10**9)
    assert json.loads((tmp_path / "first" / "config.json").read_text())["eos_token_id"] is None
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    (tmp_path / "first" / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.6}))
    assert main(["import", str(tmp_path / "first"), "--to", str(tmp_path / "checkpoint")]) == 0
    for origin in ("first", "checkpoint"):
        export(open_source(tmp_path / origin, "run"), tmp_path / f"of_{origin}", "hf", None, 10**9)
        for name in ("config.json", "generation_config.json"):
            content = json.loads((tmp_path / f"of_{origin}" / name).read_text())
            assert {key: content[key] for key in ids} == ids
    (tmp_path / "first" / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        export(open_source(tmp_path / "first", "run"), tmp_path / "third", "hf", None, 10**9)
    assert not (tmp_path / "third").exists()


@needs("transformers")
def test_a_bert_that_transformers_has_made_computes_the_same_here(tmp_path, transformers):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.BertConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=SEQ)
    theirs = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "out")
    assert distance(open_source(tmp_path / "out", "directory"), theirs) < 1e-5


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


@needs("transformers")
@pytest.mark.parametrize("case, planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_in_the_layout_shows_in_the_logits(case, planted, tmp_path, transformers, monkeypatch):
    source = make(case)
    family = type(family_for(source.config, source.spec))
    right = family.pieces
    monkeypatch.setattr(family, "pieces", lambda *arguments: planted(right(*arguments)))
    export(source, tmp_path / "out", "hf", None, 10**9)
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-2


@needs("transformers")
def test_interleaved_rotary_pairs_show_in_the_logits(tmp_path, transformers, monkeypatch):
    source = make("LlamaForCausalLM")
    export(source, tmp_path / "out", "hf", None, 10**9)
    rotate = functions.rotate

    def interleaved(x, rotary, start=0):
        pairs = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(pairs, rotary, start)

    monkeypatch.setattr(functions, "rotate", interleaved)
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-2


@needs("transformers")
def test_a_window_of_one_key_more_shows_in_the_logits(tmp_path, transformers, monkeypatch):
    source, right = make("MistralForCausalLM"), functions.window_mask
    export(source, tmp_path / "out", "hf", None, 10**9)
    monkeypatch.setattr(functions, "window_mask", lambda *sizes: right(*sizes[:3], sizes[3] + 1, sizes[4]))
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-2


YARN = "DeepseekV3ForCausalLM, yarn, queries of x, weights not normalised"
OF_LATENTS = {
    "pairs of halves": (YARN, latent_attention.LatentAttention, "_turned",
                        lambda self, x: functions.rotate(x, self.rotary)),
    "scores that do not grow": (YARN, latent_attention, "score_growth", lambda model: 1.0),
    "frequencies that are all scaled": (YARN, functions.Rotary, "_scaled_pairs", lambda self, half: (-2.0, -1.0)),
    "groups by their best expert": ("DeepseekV3ForCausalLM", routing, "_within_best_groups",
                                    lambda ranking, spec: right_groups(ranking, replace(spec, score="softmax"))),
    "groups by their best two experts": ("DeepseekV2ForCausalLM", routing, "_within_best_groups",
                                         lambda ranking, spec: right_groups(ranking, replace(spec, score="sigmoid"))),
}  # fmt: skip


@needs("transformers")
@pytest.mark.parametrize("case, place, name, planted", OF_LATENTS.values(), ids=OF_LATENTS)
def test_a_planted_bug_in_latent_attention_or_groups_shows_in_the_logits(
    case, place, name, planted, tmp_path, transformers, monkeypatch
):
    source = make(case)
    export(source, tmp_path / "out", "hf", None, 10**9)
    monkeypatch.setattr(place, name, planted)
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-2


@needs("transformers")
@pytest.mark.parametrize("field", ["layer_norm_epsilon", "activation_function"])
def test_a_wrong_field_of_config_json_shows_in_the_logits(field, tmp_path, transformers):
    source = make("GPT2LMHeadModel")
    export(source, tmp_path / "out", "hf", None, 10**9)
    file = tmp_path / "out" / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **{"layer_norm_epsilon": 0.1, "activation_function": "gelu"}, **{
        key: content[key] for key in ("layer_norm_epsilon", "activation_function") if key != field}}))  # fmt: skip
    assert distance(source, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) > 1e-4


@needs("transformers")
def test_the_exported_tokenizer_gives_a_token_per_byte(tmp_path, transformers):
    source = make("GPT2LMHeadModel")
    source = replace(source, config=replace(source.config, dataset=DatasetConfig(name="pystdlib")))
    export(source, tmp_path / "out", "hf", None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n\treturn  'ä€🙂'\r\n \x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@needs("transformers")
def test_the_tokenizer_of_a_bert_knows_its_mask(tmp_path, transformers):
    for name, content in byte_files(64, 256).items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a[MASK]b")["input_ids"] == [ord("a"), 256, ord("b")]
    assert tokenizer.mask_token_id == 256
