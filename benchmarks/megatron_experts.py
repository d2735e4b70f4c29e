"""megatron-core's layer with experts on the CPU, with our weights: for `benchmarks.experts`.

Its all-to-all dispatcher and one MLP an expert (its grouped product needs CUDA). What it asks of CUDA beside devices
(streams, events, copies to the host) is turned into nothing, in this process only.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.megatron import OnCpu, on_cpu
from benchmarks.pairs import peers_on_gloo
from parallelrun.models.moe.layer import MoE


class _NoStream:
    """A CUDA stream or event where there is none."""

    def __init__(self, *unused: Any, **options: Any):
        pass

    def record_event(self, *unused: Any) -> _NoStream:
        return _NoStream()

    def __getattr__(self, name: str) -> Any:
        return lambda *unused, **options: None


def without_streams() -> None:
    """Make CUDA's streams harmless for megatron-core's dispatcher."""
    replacements: dict[str, Any] = {
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: _NoStream(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )


def build_layer(hidden: int, ffn: int, num_experts: int, ours: MoE) -> nn.Module:
    """A MoELayer at ep = all ranks that computes what `ours` does, top-2 of a softmax over the chosen."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    with peers_on_gloo():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    on_cpu()
    without_streams()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=8,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=ffn,
        activation_func=partial(functional.gelu, approximate="tanh"),
        add_bias_linear=False,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        num_moe_experts=num_experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )
    with OnCpu():
        layer = build_module(get_gpt_layer_local_spec(num_experts=num_experts).submodules.mlp, config=config)
    weights = dict(layer.named_parameters())
    with torch.no_grad():
        weights["router.weight"].copy_(ours.router.weight)
        for index, (up, down) in enumerate(zip(ours.experts.up, ours.experts.down)):
            weights[f"experts.local_experts.{index}.linear_fc1.weight"].copy_(up)
            weights[f"experts.local_experts.{index}.linear_fc2.weight"].copy_(down)
    return layer
