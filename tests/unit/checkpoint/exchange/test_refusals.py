"""Bad exports and imports: what differs is named with both shapes or values, and nothing is half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallelrun.base.errors import CheckpointError, ConfigError, EnvironmentProblem
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.cli.main import main
from parallelrun.config.schema.model_schema import RouterConfig
from tests.exchange import make


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export(make("LlamaForCausalLM"), tmp_path / "out", "hf", None, 10**9)
    return tmp_path / "out"


def change(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    "case, changed, said",
    [
        ("GPT2LMHeadModel", {"model.norm": "rmsnorm"}, "model.norm=rmsnorm: GPT2LMHeadModel of transformers has norm="),
        ("LlamaForCausalLM", {"model.activation": "gelu"}, "model.activation=gelu: LlamaForCausalLM"),
        ("MixtralForCausalLM", {"model.router": RouterConfig(top_k=1)}, "top_k=1: MixtralForCausalLM gives a single"),
        ("MixtralForCausalLM", {"model.router": RouterConfig(renormalise="none")}, "model.router.renormalise=none"),
        ("MixtralForCausalLM", {"model.router": RouterConfig(capacity_factor=1.25)}, "capacity_factor=1.25: Mixtral"),
        ("MixtralForCausalLM", {"model.expert_period": 2}, "model.expert_period=2"),
        ("Glm4MoeForCausalLM", {"model.shared_experts": 0}, "has a shared expert in every layer"),
        ("DeepseekV3ForCausalLM", {"model.norm_eps": 1e-5}, "DeepseekV3ForCausalLM of transformers has norm_eps=1e-06"),
        ("DeepseekV3ForCausalLM", {"model.rope_scaling": "yarn", "model.rope_mscale": 0.5}, "or neither"),
        ("DeepseekV3ForCausalLM", {"model.norm": "layernorm"}, "MixtralForCausalLM of transformers has kv_lora_rank"),
        ("GPT2LMHeadModel", {"model.head_bias": True}, "model.head_bias=True: GPT2LMHeadModel of transformers has"),
        ("LlamaForCausalLM", {"model.head_bias": True}, "model.head_bias=True: LlamaForCausalLM"),
        ("LlamaForCausalLM, biases, tied", {"model.qkv_bias": False}, "model.qkv_bias=False: LlamaForCausalLM"),
        ("Qwen2ForCausalLM", {"model.qk_norm": "head"}, "model.qk_norm=head: Qwen2ForCausalLM"),
        ("Qwen3ForCausalLM", {"model.qkv_bias": True}, "model.qkv_bias=True: Qwen3ForCausalLM"),
        ("GPT2LMHeadModel", {"model.head_dim": 6}, "model.head_dim=6: GPT2LMHeadModel of transformers has head_dim="),
        ("GPT2LMHeadModel", {"model.qk_norm": "head"}, "model.qk_norm=head: GPT2LMHeadModel"),
        ("BertForMaskedLM", {"model.qkv_bias": False}, "model.qkv_bias=False: BertForMaskedLM"),
        ("BertForMaskedLM", {"model.bias": False}, "model.bias=False: BertForMaskedLM"),
        ("BertForMaskedLM", {"model.norm_bias": False}, "model.norm_bias=False: BertForMaskedLM"),
        ("GPT2LMHeadModel", {"model.norm_bias": False}, "model.norm_bias=False: GPT2LMHeadModel"),
    ],
)
def test_a_model_that_no_class_computes_is_refused(case, changed, said, tmp_path):
    with pytest.raises(ConfigError) as caught:
        export(make(case, **changed), tmp_path / "out", "hf", None, 10**9)
    assert any(said in problem.what for problem in caught.value.problems), caught.value
    assert not list(tmp_path.iterdir())


def test_it_still_goes_out_as_plain_safetensors(tmp_path):
    source = make("GPT2LMHeadModel", **{"model.norm": "rmsnorm"})
    export(source, tmp_path / "out", "safetensors", None, 3000)
    back = open_source(tmp_path / "out", "run")
    assert back.config.model == source.config.model
    for name, one in source.spec.parameters.items():
        assert torch.equal(back.weights.whole(name, one.shape), source.weights.whole(name, one.shape)), name


def test_torch_save_holds_a_state_dict_under_one_device_names(tmp_path):
    source = make("MixtralForCausalLM")
    export(source, tmp_path / "out", "torch", torch.bfloat16, 1)
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert state.keys() == source.spec.parameters.keys()
    name = "layers.1.moe.experts.down"
    assert torch.equal(state[name], source.weights.whole(name, source.spec.parameters[name].shape).bfloat16())


def test_an_existing_directory_is_left_alone(exported):
    with pytest.raises(EnvironmentProblem, match="exists already"):
        export(make("LlamaForCausalLM"), exported, "hf", None, 10**9)
    assert (exported / "model.safetensors").is_file()


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    source = make("LlamaForCausalLM")
    del source.weights.tensors["head.norm.weight"]
    with pytest.raises(KeyError):
        export(source, tmp_path / "out", "hf", None, 10**9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"model_type": "whisper"}, "model_type is 'whisper', and known are gpt2, llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only silu is built"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "only default, linear, llama3 and yarn are built"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "there is no low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 3}}, "beta is 3, a field that"),
        ({"head_dim": 8.5}, "head_dim is 8.5, not a int"),
        ({"mlp_bias": True}, "mlp_bias is True, and only False is built"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a int"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0, a field that parallelrun does not know"),
    ],
)
def test_what_our_model_does_not_compute_is_refused_by_its_field(fields, said, exported):
    change(exported, **fields)
    with pytest.raises(ConfigError) as caught:
        open_source(exported, "directory")
    assert any(said in problem.what for problem in caught.value.problems), caught.value
    assert any("config.json" in f"{problem.what} {problem.where}" for problem in caught.value.problems)


def test_a_layer_that_does_not_match_is_named_with_both_shapes(exported):
    change(exported, intermediate_size=20)
    with pytest.raises(CheckpointError) as caught:
        open_source(exported, "directory")
    named = "model.layers.0.mlp.gate_proj.weight (layers.0.mlp.up.gate.weight) is [24, 16] there, [20, 16] in the model"
    assert named in str(caught.value)


def test_missing_and_unknown_tensors_are_named(exported):
    file = exported / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        open_source(exported, "directory")
    assert "model.norm.weight (head.norm.weight) [16] is not there" in str(caught.value)
    assert "model.layers.0.extra.weight [16] is not in the model" in str(caught.value)


def test_weights_in_fp8_are_refused_and_a_layer_that_predicts_more_tokens_is_left_out(tmp_path, capsys):
    export(make("DeepseekV3ForCausalLM"), tmp_path / "out", "hf", None, 10**9)
    file, config = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.61.eh_proj.weight": torch.ones(2)}, file)
    published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1,
                 "seq_aux": True, "quantization_config": {"quant_method": "fp8"}, "aux_loss_alpha": 0.001}  # fmt: skip
    config.write_text(json.dumps({**json.loads(config.read_text()), **published}))
    assert open_source(tmp_path / "out", "directory").config.model.router.aux_coefficient == 0.001
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    scales = {f"{name}_scale_inv": torch.ones(1, 1)}
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn), **scales}, file)
    assert main(["import", str(tmp_path / "out"), "--to", str(tmp_path / "new")]) == 4
    assert f"{name} is stored as F8_E4M3: quantised weights are not read" in capsys.readouterr().err


def test_weights_of_gpt_oss_in_mxfp4_are_refused_by_name(tmp_path, capsys):
    export(make("GptOssForCausalLM"), tmp_path / "out", "hf", None, 10**9)
    file = tmp_path / "out" / "model.safetensors"
    tensors, name, numbers = load_file(file), "model.layers.0.mlp.experts.down_proj", torch.zeros(4, dtype=torch.uint8)
    stored = {f"{name}_blocks": numbers, f"{name}_scales": numbers.clone()}
    save_file({**{key: value for key, value in tensors.items() if key != name}, **stored}, file)
    assert main(["import", str(tmp_path / "out"), "--to", str(tmp_path / "new")]) == 4
    assert f"{name}_blocks is stored as MXFP4: quantised weights are not read" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0not json at all!", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_is_exit_4(exported, content, capsys):
    (exported / "model.safetensors").write_bytes(content)
    assert main(["import", str(exported), "--to", str(exported.parent / "new")]) == 4
    assert "model.safetensors is damaged" in capsys.readouterr().err
    assert not (exported.parent / "new").exists()


def test_an_index_cannot_lead_to_other_directories(exported):
    (exported / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="no file of the same directory"):
        open_source(exported, "directory")


@pytest.mark.parametrize("words", [["export", "nowhere", "out"], ["import", "nowhere", "--to", "out"]])
def test_what_does_not_exist_is_exit_4(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 4
    assert "nowhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
