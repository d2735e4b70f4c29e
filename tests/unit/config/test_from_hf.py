"""`model.from_hf`: a config.json fills the model, keys that are given win, and a bad file is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from parallelrun.cli.main import main

LLAMA_32 = {  # the fields of Llama 3.2 1B, smaller
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 8, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.01,
    "intermediate_size": 96, "max_position_embeddings": 128, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-6, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True,
    "vocab_size": 512,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 3,
    "max_position_embeddings": 64, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_32))
    return tmp_path / "config.json"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """The model that these words compose to, as `show` prints a recipe."""
    recipe = Path("recipe.yaml")
    recipe.write_text("steps: 1\n")
    assert main(["show", "./recipe.yaml", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["model"]


def test_it_fills_the_model_whatever_the_preset(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    for words in ([], ["model=moe_gpt"], ["model=bert"]):
        model = shown(capsys, f"model.from_hf={file.parent}", *words)
        wanted = {"name": "gpt", "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "layers": 3, "vocab": 512,
                  "seq": 128, "norm": "rmsnorm", "norm_eps": 1e-6, "activation": "swiglu", "position": "rope",
                  "rope_theta": 5e5, "rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_seq": 64,
                  "bias": False, "tied_embeddings": True, "init_std": 0.01, "experts": 0}  # fmt: skip
        assert {key: model[key] for key in wanted} == wanted, words


def test_what_is_given_wins(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    model = shown(capsys, f"model.from_hf={file}", "model.layers=1", "model.seq=32")
    assert (model["layers"], model["seq"], model["hidden"]) == (1, 32, 64)
    (file.parent / "config.json").write_text(json.dumps(MIXTRAL))
    for words in ([], ["strategy=switch"], ["model=switch_base"]):  # neither preset changes the router
        router = shown(capsys, f"model.from_hf={file}", *words, "model.router.aux_coefficient=0.5")["router"]
        assert (router["kind"], router["top_k"], router["capacity_factor"]) == ("top_k", 3, None), words
        assert router["aux_coefficient"] == 0.5


def test_plan_needs_nothing_but_the_file(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    assert main(["plan", f"model.from_hf={file}", "tp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model"]
    layer = 64 * 64 * 2 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64
    assert found["parameters"] == 3 * layer + 512 * 64 + 64
    assert found["vocab"] == 512


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "config.json is not JSON"),
        ("[]", "model_type is None, and known are gpt2, llama, mistral, phi3, olmo2, mixtral, glm4_moe"),
        (json.dumps({**LLAMA_32, "hidden_act": "gelu"}), "hidden_act is 'gelu', and only silu is built"),
        (json.dumps({key: value for key, value in LLAMA_32.items() if key != "intermediate_size"}),
         "there is no intermediate_size"),
    ],
)  # fmt: skip
def test_a_bad_file_is_exit_2_and_named(content, said, file, capsys):
    file.write_text(content)
    assert main(["plan", f"model.from_hf={file}"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(file) in error


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "config.json")
    assert main(["plan", f"model.from_hf={tmp_path}"]) == 2
    assert "it is no file" in capsys.readouterr().err


def test_a_missing_file_is_exit_2(tmp_path, capsys):
    assert main(["plan", f"model.from_hf={tmp_path / 'none'}"]) == 2
    assert "cannot read" in capsys.readouterr().err
