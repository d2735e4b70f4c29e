"""What parallelrun does not understand of a directory is kept through import, fine-tuning and export, or named."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import initial_weights, notes_on_initial, open_source
from parallelrun.checkpoint.resume import CONFIG_FILE
from parallelrun.cli.main import main
from parallelrun.config import from_hf
from parallelrun.models.bert.hugging_face import Bert
from parallelrun.planner.resolve.freeze import freeze
from tests.checkpoints import written
from tests.exchange import SEQ, VOCAB, make, network_of, tokens
from tests.extras import needs
from tests.plans import tiny_config, tiny_plan
from tests.unit.data.files import word_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
KEPT = {"chat_template.jinja": TEMPLATE, "LICENSE": "free", "README.md": "# card", "modeling_own.py": "1 / 0",
        "preprocessor_config.json": "{}", "chat_template.json": "{}"}  # fmt: skip
LEFT_OUT = ["original", "pytorch_model.bin", "adapter_config.json", "adapter_model.safetensors", "model.gguf"]
FACTS = {"max_position_embeddings": 4096, "pretraining_tp": 2, "_name_or_path": "maker/base", "use_cache": False,
         "id2label": {"0": "a"}, "auto_map": {"AutoModel": "modeling_own.X"}}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama of 4,096 positions, as somebody publishes it."""
    folder = tmp_path / "base"
    export(make("LlamaForCausalLM"), folder, "hf", None, 10**9)
    change(folder / "config.json", **FACTS, quantization_config={"bits": 8}, eos_token_id=4)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "bos_token_id": 1}))
    word_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 4096, "padding_side": "left"}))
    for name, text in KEPT.items():
        (folder / name).write_text(text)
    (folder / "original").mkdir()
    (folder / ".cache").mkdir()
    for name in LEFT_OUT[1:]:
        (folder / name).write_bytes(b"x")
    return folder


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def tuned(folder: Path, origin: Path, base: Path, seq: int = 8) -> Path:
    """A run whose weights started from `origin`, with a checkpoint after three steps."""
    keys = {
        "model.from_hf": str(base / "config.json"), "model.preset": "llama", "model.layers": 2, "model.heads": 4,
        "model.kv_heads": 2, "model.ffn": 24, "model.norm": "rmsnorm", "model.position": "rope", "model.bias": False,
        "model.activation": "swiglu", "model.tied_embeddings": False, "model.rope_theta": 100.0, "model.vocab": VOCAB,
        "model.norm_eps": 1e-3, "model.seq": seq, "init.weights": str(origin),
    }  # fmt: skip
    plan = tiny_plan(keys)
    written(folder / "checkpoints" / "step_3", plan)
    (folder / CONFIG_FILE).write_text(freeze(tiny_config(keys), plan))
    return folder


def exported(run: Path, out: Path) -> Path:
    assert main(["export", str(run), str(out)]) == 0
    return out


def check(out: Path, length: int = 4096) -> None:
    for name, text in KEPT.items():
        assert (out / name).read_text() == text, name
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in FACTS} == {**FACTS, "max_position_embeddings": length}
    assert config["eos_token_id"] == 4 and "quantization_config" not in config
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["temperature"], generation["bos_token_id"]) == (0.6, 1)
    assert json.loads((out / "tokenizer_config.json").read_text())["padding_side"] == "left"
    ours = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == {*KEPT, *ours}


def test_a_fine_tuned_model_leaves_with_everything_of_its_base(base, tmp_path, capsys):
    check(exported(tuned(tmp_path / "run", base, base), tmp_path / "out"))
    said = capsys.readouterr().err
    for name in LEFT_OUT:
        assert f"note: left out: {base / name}\n" in said
    assert "note: left out: quantization_config of config.json\n" in said and ".cache" not in said


def test_a_training_on_longer_samples_lengthens_the_context(base, tmp_path):
    check(exported(tuned(tmp_path / "run", base, base, seq=8192), tmp_path / "out"), length=8192)


@pytest.mark.slow
def test_it_comes_through_import_a_run_and_a_run_that_started_from_that_one(base, tmp_path, capsys):
    assert main(["import", str(base), "--to", str(tmp_path / "checkpoint")]) == 0
    assert f"left out: {base / 'original'}" in capsys.readouterr().err
    base = base.rename(tmp_path / "moved")
    check(exported(tmp_path / "checkpoint", tmp_path / "of_import"))
    gone = tmp_path / "base"
    first = tuned(tmp_path / "first", tmp_path / "checkpoint", gone)
    second = tuned(tmp_path / "second", first, gone)
    third = tuned(tmp_path / "third", second / "checkpoints" / "step_3", gone)
    for run in (first, second, third):
        check(exported(run, tmp_path / f"of_{run.name}"))
    export(open_source(third, "run"), tmp_path / "plain", "safetensors", None, 10**9)
    check(exported(tmp_path / "plain", tmp_path / "of_plain"))


def test_a_base_that_is_gone_is_named(base, tmp_path, capsys):
    run = tuned(tmp_path / "run", base, base)
    base.rename(tmp_path / "moved")
    out = exported(run, tmp_path / "out")
    assert f"note: {base / 'config.json'} is gone: its other fields are not in config.json" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 8


def test_fields_of_another_class_are_not_taken_over(base, tmp_path):
    change(base / "config.json", model_type="gpt2")
    out = exported(tuned(tmp_path / "run", base, base), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama" and "pretraining_tp" not in config


def test_runs_that_started_from_one_another_are_read_once(base, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    tuned(first, second, base)
    tuned(second, first, base)
    exported(first, tmp_path / "out")


@needs("transformers")
def test_transformers_reads_the_context_and_the_template(base, tmp_path):
    transformers = import_module("transformers")
    out = exported(tuned(tmp_path / "run", base, base), tmp_path / "out")
    (out / "config.json").write_text((out / "config.json").read_text().replace("modeling_own.X", "none.X"))
    model = transformers.LlamaForCausalLM.from_pretrained(out)
    assert model.config.max_position_embeddings == 4096 and model.generation_config.temperature == 0.6
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE


def untie(folder: Path, copy: str, original: str, sharded: bool = False) -> None:
    """Give the output layer values of its own, under a config.json that ties it."""
    tensors = load_file(folder / "model.safetensors")
    tensors[copy] = tensors[original] + 0.5
    if not sharded:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    names = {key: f"model-{1 + (key == copy)}.safetensors" for key in tensors}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in tensors if names[key] == name}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


TIED = {
    "llama": ("LlamaForCausalLM, biases, tied", "model.embed_tokens.weight", False),
    "llama in shards": ("LlamaForCausalLM, biases, tied", "model.embed_tokens.weight", True),
    "gpt2": ("GPT2LMHeadModel", "transformer.wte.weight", False),
}


@pytest.mark.parametrize("case, original, sharded", TIED.values(), ids=TIED)
def test_an_output_layer_with_values_of_its_own_is_not_tied(case, original, sharded, tmp_path, capsys):
    source, folder = make(case), tmp_path / "out"
    export(source, folder, "hf", None, 10**9)
    untie(folder, "lm_head.weight", original, sharded)
    untied = open_source(folder, "directory")
    said = capsys.readouterr().err
    assert f"lm_head.weight differs from {original}: they are not tied (model.tied_embeddings=false)" in said
    assert untied.config.model.tied_embeddings is False
    name, embedding = "head.head.weight", "embedding.tokens.weight"
    shape = untied.spec.parameters[name].shape
    assert torch.equal(untied.weights.whole(name, shape), source.weights.whole(embedding, shape) + 0.5)
    export(untied, tmp_path / "again", "hf", None, 10**9)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False


def assert_transformers_computes_the_same(folder: Path, kind: str) -> None:
    source, theirs = open_source(folder, "directory"), getattr(import_module("transformers"), kind)
    with torch.no_grad():
        ours = network_of(source.config, source.spec, source.weights)(tokens())
        wanted = theirs.from_pretrained(folder).eval()(tokens()).logits
    assert (ours - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@needs("transformers")
@pytest.mark.parametrize("case, original, sharded", TIED.values(), ids=TIED)
def test_transformers_computes_the_same_from_an_untied_output_layer(case, original, sharded, tmp_path):
    export(make(case), tmp_path / "out", "hf", None, 10**9)
    untie(tmp_path / "out", "lm_head.weight", original, sharded)
    assert_transformers_computes_the_same(tmp_path / "out", "AutoModelForCausalLM")


def test_an_equal_copy_stays_tied(tmp_path, capsys):
    export(make("GPT2LMHeadModel"), tmp_path / "out", "hf", None, 10**9)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert open_source(tmp_path / "out", "directory").config.model.tied_embeddings is True
    assert not capsys.readouterr().err


@pytest.mark.parametrize("last", [True, False])
def test_one_bit_of_a_large_copy_is_enough(last, tmp_path, monkeypatch):
    """The tensors are compared in blocks."""
    monkeypatch.setattr("parallelrun.config.stored_tensors._BLOCK", 100)
    export(make("GPT2LMHeadModel"), tmp_path / "out", "hf", None, 10**9)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    copy = tensors["transformer.wte.weight"].clone()
    copy[-1 if last else 0, -1 if last else 0] += 1e-6
    save_file({**tensors, "lm_head.weight": copy}, tmp_path / "out" / "model.safetensors")
    assert open_source(tmp_path / "out", "directory").config.model.tied_embeddings is False


def test_a_model_that_the_user_ties_refuses_an_output_layer_of_its_own(tmp_path):
    export(make("GPT2LMHeadModel"), tmp_path / "out", "hf", None, 10**9)
    untie(tmp_path / "out", "lm_head.weight", "transformer.wte.weight")
    source = make("GPT2LMHeadModel")
    config = source.config
    config.init.weights = str(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        initial_weights(config, source.spec)


@pytest.mark.parametrize(
    "copy, original",
    [
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_a_bert_whose_output_layer_has_values_of_its_own_is_refused(copy, original, tmp_path):
    export(make("BertForMaskedLM, exact GELU, vocabulary bias"), tmp_path / "out", "hf", None, 10**9)
    untie(tmp_path / "out", copy, original)
    with pytest.raises(CheckpointError, match=rf"{copy} differs from {original}"):
        open_source(tmp_path / "out", "directory")


def published(folder: Path) -> None:
    """Write the names of TensorFlow, a pooler and next-sentence weights, as published BERT models have them."""
    tensors = load_file(folder / "model.safetensors")
    names = {
        key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for key in tensors
    }
    assert sum(new != old for old, new in names.items()) == 12
    more = {"bert.pooler.dense.weight": torch.ones(16, 16), "cls.seq_relationship.bias": torch.ones(2),
            "bert.embeddings.position_ids": torch.arange(SEQ)[None]}  # fmt: skip
    save_file(
        {**{names[key]: tensor for key, tensor in tensors.items()}, **more},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def test_published_names_of_a_bert_are_read_and_what_is_not_read_is_named(tmp_path, capsys):
    source = make("BertForMaskedLM, exact GELU, vocabulary bias")
    export(source, tmp_path / "out", "hf", None, 10**9)
    published(tmp_path / "out")
    back = open_source(tmp_path / "out", "directory")
    for name, one in source.spec.parameters.items():
        assert torch.equal(back.weights.whole(name, one.shape), source.weights.whole(name, one.shape)), name
    assert back.weights.unread == ["bert.pooler.dense.weight", "cls.seq_relationship.bias"]
    config = back.config
    config.init.weights = str(tmp_path / "out")
    (note,) = notes_on_initial(config)
    assert note.endswith(": bert.pooler.dense.weight, cls.seq_relationship.bias")
    assert main(["import", str(tmp_path / "out"), "--to", str(tmp_path / "checkpoint")]) == 0
    assert "note: left out: bert.pooler.dense.weight\n" in capsys.readouterr().err


@needs("transformers")
def test_transformers_computes_the_same_from_published_names(tmp_path):
    export(make("BertForMaskedLM, exact GELU, vocabulary bias"), tmp_path / "out", "hf", None, 10**9)
    published(tmp_path / "out")
    assert_transformers_computes_the_same(tmp_path / "out", "BertForMaskedLM")


def test_a_bare_bert_may_have_both_old_names_and_no_prefix():
    assert Bert().spellings("bert.embeddings.LayerNorm.weight") == (
        "bert.embeddings.LayerNorm.weight", "embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.gamma",
    )  # fmt: skip


def test_the_plan_of_an_untied_model_counts_both_matrices(tmp_path):
    export(make("GPT2LMHeadModel"), tmp_path / "out", "hf", None, 10**9)
    model = from_hf.filled(tiny_config({"model.from_hf": str(tmp_path / "out")}).model)
    assert model.tied_embeddings
    from_hf._is_untied.cache_clear()
    untie(tmp_path / "out", "lm_head.weight", "transformer.wte.weight")
    assert not from_hf.filled(tiny_config({"model.from_hf": str(tmp_path / "out")}).model).tied_embeddings
    kept = from_hf.filled(tiny_config({"model.from_hf": str(tmp_path / "out")}).model, {"model.tied_embeddings"})
    assert kept.tied_embeddings
