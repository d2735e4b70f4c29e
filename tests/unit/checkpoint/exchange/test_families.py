"""Models that transformers has made compute the same here, and what their classes have beyond ours is refused by the
key of their config.json. (Our own models under transformers: `test_hugging_face.py`.)"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.config import presets
from parallelrun.config.from_hf import filled
from parallelrun.config.schema.model_schema import ModelConfig, RouterConfig
from parallelrun.models.gpt.dense_families import Llama, Mistral
from parallelrun.models.gpt.qwen_families import Qwen3, Qwen3Moe
from parallelrun.models.gpt.windowed_families import Gemma3, GptOss
from parallelrun.models.transformer.modules import rotary
from tests.exchange import SEQ, VOCAB, make, network_of, tokens
from tests.extras import needs

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": SEQ, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
WIDE = {**SIZES, "head_dim": 8}
LONG = {**SIZES, "hidden_size": 64}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MADE: dict[str, tuple[str, dict[str, Any]]] = {  # by name: the class and its configuration
    "llama, wide heads": ("Llama", WIDE),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 3}),
    "mistral, no window": ("Mistral", {**SIZES, "sliding_window": None}),
    "phi3": ("Phi3", SIZES),
    "phi3, window": ("Phi3", {**SIZES, "sliding_window": 3}),
    "olmo2": ("Olmo2", {**SIZES, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, tied": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {**LONG, "rope_parameters": YARN}),
    "qwen2, yarn, attention factor": ("Qwen2", {**LONG, "rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "qwen2, yarn, one mscale": ("Qwen2", {**LONG, "rope_parameters": {**YARN, "mscale": 0.5}}),
    "qwen3": ("Qwen3", WIDE),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, **EXPERTS, "norm_topk_prob": True}),
    "gemma2": ("Gemma2", {**WIDE, "sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3, frequencies of Gemma 3": (
        "Gemma3",
        {
            **WIDE,
            "num_hidden_layers": 3,
            "sliding_window": 3,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **WIDE,
            "sliding_window": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "truncate": False, "original_max_position_embeddings": 32},
        },
    ),
    "qwen2_moe, not normalised, dense layers": (
        "Qwen2Moe",
        {**SIZES, **EXPERTS, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 24},
    ),
}


def made(case: str, folder: Path) -> Any:
    """A model of transformers with random weights, norms and biases included, which is saved in `folder`."""
    transformers, (kind, values) = import_module("transformers"), MADE[case]
    torch.manual_seed(0)
    configs = (f"{kind}Config", f"{kind}TextConfig")  # the latter of a model of images, too
    make = next(filter(None, (getattr(transformers, name, None) for name in reversed(configs))))
    model = getattr(transformers, f"{kind}ForCausalLM")(make(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def logits(source: Any, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return network_of(source.config, source.spec, source.weights)(inputs)


@needs("transformers")
@pytest.mark.parametrize("case", MADE)
def test_a_model_of_transformers_computes_the_same_here_and_after_its_way_back(case: str, tmp_path: Path) -> None:
    theirs = made(case, tmp_path / "theirs")
    ours = open_source(tmp_path / "theirs", "directory")
    with torch.no_grad():
        wanted = theirs(tokens()).logits
    assert wanted.std() > 0.1
    assert (logits(ours, tokens()) - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    export(ours, tmp_path / "back", "hf", None, 10**9)
    back, report = import_module("transformers").AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert type(back) is type(theirs) and not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        assert torch.equal(back.eval()(tokens()).logits, wanted)


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn, both mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn, one mscale": {**YARN, "mscale_all_dim": 0.4},
    "yarn, attention factor": {**YARN, "mscale": 0.7, "attention_factor": 1.3},
    "yarn, one pair between": {**YARN, "beta_fast": 0.3, "beta_slow": 0.29},
}


@needs("transformers")
@pytest.mark.parametrize("case", SCALED)
def test_frequencies_are_those_of_transformers(case: str) -> None:
    transformers = import_module("transformers")
    functions = import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    scaling = {"rope_theta": 100.0, "rope_type": case.partition(",")[0], **SCALED[case]}
    config = transformers.LlamaConfig(**{**LONG, "head_dim": 32}, rope_parameters=scaling)
    wanted, growth = functions[scaling["rope_type"]](config, torch.device("cpu"))
    values = Llama().model_values({**LONG, "head_dim": 32, "rope_parameters": scaling}, "file")
    ours = rotary(ModelConfig(**values))
    found = ours.frequencies(16, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert ours.growth == pytest.approx(growth, rel=1e-12)


PUBLISHED: dict[str, dict[str, Any]] = {  # the config.json of the model on Hugging Face
    "qwen3_8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen2_7b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "vocab_size": 152064,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_cache": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False,
    },
    "mistral_7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
    },
    "qwen3_235b_a22b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 94, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen1.5_moe_a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
        "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt_oss_120b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_local_experts": 128, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-5, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "gemma3_27b": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "gemma2_27b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608,
        "intermediate_size": 36864, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
    "kimi_k2": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6, "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        }, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 163840,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[preset]))
    from_file = filled(ModelConfig(from_hf=str(tmp_path)))
    values = presets.values("model", preset) | {"preset": from_file.preset, "description": ""}
    if "router" in values:
        values |= {"router": RouterConfig(**values["router"]), "own_router": True}
    wanted = replace(ModelConfig(), **values, from_hf=from_file.from_hf)
    assert replace(from_file, head_dim=from_file.head_dim or values.get("head_dim")) == wanted


CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", **SIZES},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **WIDE},
    "qwen3_moe": {"model_type": "qwen3_moe", **WIDE, **EXPERTS},
    "qwen2_moe": {"model_type": "qwen2_moe", **SIZES, **EXPERTS},
    "gemma3_text": {"model_type": "gemma3_text", **WIDE},
    "gpt_oss": {"model_type": "gpt_oss", **WIDE},
}


@pytest.mark.parametrize(
    "family, fields, said",
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True, and only False"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention', 'slid"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope_scaling is {'type': 'longrope'"),
        ("phi3", {"rope_scaling": YARN}, "rope_scaling is yarn, and phi3 with default frequencies alone"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75"),
        ("olmo2", {"attention_bias": True}, "attention_bias is True, and only False"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True, and only False"),
        ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling is {'rope_type': 'dynamic'"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}, "every n-th layer of full_attention"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0, and only 7.0"),
        ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 0.5}}, "attention_factor is 0.5, and only one above 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, a field that"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, no multiple of"),
    ],
)
def test_what_a_class_has_beyond_ours_is_refused_by_its_field(family, fields, said, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[family], **fields}))
    with pytest.raises(ConfigError) as caught:
        open_source(tmp_path, "directory")
    assert any(said in problem.what for problem in caught.value.problems), caught.value


def test_a_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    fields = {"model_type": "mistral", **SIZES}
    assert Mistral().model_values({**fields, "sliding_window": None}, "file")["window"] is None
    assert Mistral().model_values(fields, "file")["window"] == 4096
    export(make("MistralForCausalLM", **{"model.window": None}), tmp_path / "out", "hf", None, 10**9)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_field_that_a_file_leaves_out_has_the_default_of_its_class() -> None:
    bare = {"intermediate_size": 24}
    assert Qwen3().model_values({**bare, "hidden_size": 1024, "num_attention_heads": 16}, "file")["head_dim"] == 128
    moe = Qwen3Moe().model_values(bare, "file")
    assert (moe["vocab"], moe["hidden"], moe["kv_heads"], moe["router"]["renormalise"]) == (151936, 2048, 4, "none")
    in_all, oss = {**bare, "layer_types": ["sliding_attention"] * 2}, GptOss()
    assert [oss.model_values({**bare, "rope_scaling": YARN, **x}, "file")["global_period"] for x in ({}, in_all)] == [
        2,
        None,
    ]
    older = {**bare, "rope_scaling": {"factor": 2.0, "rope_type": "linear"}, "rope_local_base_freq": 5.0}
    gemma = Gemma3().model_values(older, "file")
    assert (gemma["local_rope_theta"], gemma["rope_theta"], gemma["rope_factor"]) == (5.0, 1e6, 2.0)
