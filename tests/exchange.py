"""Small models with random weights for tests of `parallelrun.checkpoint.exchange`, one for each class of transformers.

`python -m tests.exchange` writes `FACTS`: what transformers computes from our exports, for tests without transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallelrun.base import registry
from parallelrun.base.precision import TABLE
from parallelrun.base.records import sha256_of
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.checkpoint.exchange.weights import Ranges, Weights
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import initialise
from parallelrun.models.network import Network
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import ModelSpec
from tests.plans import narrow_config

VOCAB, SEQ = 32, 8
FACTS = Path(__file__).parent / "unit" / "checkpoint" / "exchange" / "facts.json"
LLAMA: dict[str, Any] = {
    "model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.kv_heads": 2,
    "model.bias": False, "model.tied_embeddings": False, "model.ffn": 24, "model.norm_eps": 1e-3,
    "model.rope_theta": 100.0,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model.experts": 4, "model.expert_period": 1, "model.router": RouterConfig(top_k=2)}
DEEPSEEK = {
    **LLAMA, "model.experts": 4, "model.expert_period": 1, "model.dense_layers": 1, "model.shared_experts": 2,
    "model.expert_ffn": 12, "model.router": RouterConfig(top_k=2, score="sigmoid", scaling=2.5, bias_rate=1e-3),
}  # fmt: skip
LATENT = {
    **DEEPSEEK, "model.kv_heads": None, "model.q_lora_rank": 12, "model.kv_lora_rank": 10, "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 4, "model.v_head_dim": 7, "model.norm_eps": 1e-6, "model.experts": 8,
}  # fmt: skip
QWEN2 = {**LLAMA, "model.qkv_bias": True, "model.norm_eps": 1e-6}
QWEN3 = {**LLAMA, "model.qk_norm": "head", "model.head_dim": 6}
GEMMA = {
    **LLAMA, "model.norm_position": "both", "model.activation": "geglu", "model.scaled_embedding": True,
    "model.tied_embeddings": True, "model.window": 3, "model.global_period": 2, "model.query_pre_attn_scalar": 5.0,
}  # fmt: skip
GPT_OSS = {
    **MIXTRAL, "model.activation": "swiglu_clamped", "model.bias": True, "model.expert_bias": True, "model.sinks": True,
    "model.window": 3, "model.global_period": 2, "model.head_dim": 8, "model.rope_scaling": "yarn",
    "model.rope_factor": 4.0, "model.rope_original_seq": 16, "model.rope_truncate": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {  # by the class of transformers, and more than one option of some
    "GPT2LMHeadModel": {},
    "GPT2LMHeadModel, relu, untied": {"model.activation": "relu", "model.tied_embeddings": False, "model.ffn": 24},
    "LlamaForCausalLM": LLAMA,
    "LlamaForCausalLM, biases, tied": {**LLAMA, "model.bias": True, "model.tied_embeddings": True},
    "LlamaForCausalLM, frequencies of Llama 3.1": {
        **LLAMA, "model.rope_theta": 10.0, "model.rope_scaling": "llama3", "model.rope_factor": 8.0,
        "model.rope_original_seq": 16, "model.hidden": 32,
    },
    "LlamaForCausalLM, frequencies scaled linearly": {
        **LLAMA, "model.rope_scaling": "linear", "model.rope_factor": 2.0
    },
    "LlamaForCausalLM, yarn": {
        **LLAMA, "model.hidden": 32, "model.rope_scaling": "yarn", "model.rope_factor": 4.0,
        "model.rope_original_seq": 16, "model.rope_mscale": 1.5,
    },
    "LlamaForCausalLM, wide heads": {**LLAMA, "model.head_dim": 6},
    "MistralForCausalLM": {**LLAMA, "model.window": 3},
    "Phi3ForCausalLM": {**LLAMA, "model.preset": "phi3"},
    "MixtralForCausalLM": MIXTRAL,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Glm4MoeForCausalLM, without selection biases": {
        **DEEPSEEK, "model.router": RouterConfig(top_k=3, score="sigmoid", renormalise="after")
    },
    "DeepseekV3ForCausalLM": {**LATENT, "model.router": RouterConfig(
        top_k=3, score="sigmoid", scaling=2.5, bias_rate=1e-3, n_group=4, topk_group=2
    )},
    "DeepseekV3ForCausalLM, yarn, queries of x, weights not normalised": {
        **LATENT, "model.q_lora_rank": None, "model.rope_scaling": "yarn", "model.rope_factor": 40.0,
        "model.rope_original_seq": 32, "model.rope_beta_fast": 8.0, "model.rope_mscale_all_dim": 0.7,
        "model.qk_rope_head_dim": 8, "model.router": RouterConfig(top_k=2, score="sigmoid", renormalise="none"),
    },
    "DeepseekV2ForCausalLM": {
        **LATENT, "model.rope_scaling": "yarn", "model.rope_factor": 8.0, "model.rope_original_seq": 32,
        "model.rope_mscale": 0.5, "model.rope_mscale_all_dim": 0.5,
        "model.router": RouterConfig(top_k=3, renormalise="none", n_group=4, topk_group=2, scaling=1.5),
    },
    "Olmo2ForCausalLM": {**LLAMA, "model.qk_norm": "all", "model.norm_position": "post"},
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2ForCausalLM, tied": {**QWEN2, "model.tied_embeddings": True},
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": {
        **QWEN3, "model.experts": 4, "model.expert_period": 1, "model.expert_ffn": 12,
        "model.router": RouterConfig(top_k=2),
    },
    "Qwen3MoeForCausalLM, dense layers, weights not normalised": {
        **QWEN3, "model.experts": 4, "model.expert_period": 2, "model.expert_ffn": 12,
        "model.router": RouterConfig(top_k=3, renormalise="none"),
    },
    "Gemma2ForCausalLM": GEMMA | {"model.attention_softcap": 2.0, "model.logit_softcap": 3.0},
    "Gemma3ForCausalLM": GEMMA | {
        "model.preset": "gemma3_text", "model.qk_norm": "head", "model.local_rope_theta": 10.0,
        "model.rope_scaling": "linear", "model.rope_factor": 2.0,
    },
    "GptOssForCausalLM": GPT_OSS,
    "BertForMaskedLM": {"model.name": "bert", "dataset.vocab": VOCAB - 1},
    "BertForMaskedLM, exact GELU, vocabulary bias": {
        "model.name": "bert", "dataset.vocab": VOCAB - 1, "model.activation": "gelu_exact", "model.head_bias": True,
    },
}  # fmt: skip


class InMemory(Weights):
    """Weights that are in no file."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(Path("memory"))
        self.tensors = tensors

    def read(self, name: str, ranges: Ranges) -> Tensor:
        return self.tensors[name][tuple(slice(*pair) for pair in ranges)]

    def differences(self, spec: ModelSpec) -> list[str]:
        return []


def make(case: str, vocab: int = VOCAB, **more: Any) -> StoredModel:
    """The source of a case's model: random weights of a size at which every difference shows."""
    config = narrow_config({"model.layers": 2, "model.preset": "made", **CASES[case], "model.vocab": vocab, **more})
    spec = definitions.model(config).make(config, vocab)
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(one.shape, generator=generator) * 0.4 for name, one in spec.parameters.items()}
    return StoredModel(Path("memory"), config, spec, InMemory(tensors))


def network_of(config: Config, spec: ModelSpec, weights: Weights) -> Network:
    """The model on one device with these weights, in evaluation."""
    net: Network = registry.load("models", config.model.name, "network").build(config, spec, TABLE["fp32"])
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            one = spec.parameters[name]
            initialise.fill(parameter, one, tuple((0, n) for n in one.shape), 0, {}, weights)
    return net.eval()


def tokens() -> Tensor:
    """int64 (3, SEQ)."""
    return torch.randint(VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(6))


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of the files of an export that transformers computes from."""
    return {name: sha256_of(folder / name) for name in ("config.json", "model.safetensors")}


def _facts(case: str) -> dict[str, Any]:
    import transformers

    auto = transformers.AutoModelForMaskedLM if "Masked" in case else transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        export(make(case), out, "hf", None, 10**9)
        with torch.no_grad():
            logits = auto.from_pretrained(out).eval()(tokens()).logits[0, -1]
        return {**hashes(out), "logits": logits.tolist()}


if __name__ == "__main__":
    FACTS.write_text(json.dumps({case: _facts(case) for case in CASES}, indent=1) + "\n")
