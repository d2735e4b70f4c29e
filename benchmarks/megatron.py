"""parallelrun in shared memory against megatron-core on gloo: the same GPT, forward and backward, paired.

    pip install --no-deps --target /tmp/megatron megatron-core==0.16.1
    PYTHONPATH=/tmp/megatron python -m benchmarks.megatron

megatron-core expects CUDA; `on_cpu` turns its device requests to the CPU, in its own process only. Both sides compute
the loss of the same tokens from the same weights, and the first losses must agree before anything is timed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.pairs import WithTorchsProducts, compare, on_ranks, peers_on_gloo, read_arguments, time_pairs
from benchmarks.plain_gpt import SIZES, Sizes
from parallelrun.models.initialise import logical
from parallelrun.models.moe.layer import MoE
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.step import finish_gradients, forward_backward
from tests.plans import tiny_config

CASES: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2, "strategy.pipeline.kind": "1f1b"}}
BAR = 0.75


class OnCpu(TorchFunctionMode):
    """Rewrites every `device=` that names CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def on_cpu() -> None:
    """Make torch.cuda's bookkeeping harmless, so that megatron-core builds and runs on the CPU."""
    replacements: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device="cpu": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cpu": torch.set_rng_state(new_state),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *unused, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *unused, **options: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(1)


def build_megatron(case: str, sizes: Sizes) -> nn.Module:
    """megatron-core's GPTModel for this rank, local (unfused, torch) layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    with peers_on_gloo():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2 if case == "tp" else 1, pipeline_model_parallel_size=2 if case == "pp" else 1
        )
    on_cpu()
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        activation_func=partial(functional.gelu, approximate="tanh"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=2 if case == "tp" else 1,
        pipeline_model_parallel_size=2 if case == "pp" else 1,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.seq,
        pre_process=case == "tp" or dist.get_rank() == 0,
        post_process=case == "tp" or dist.get_rank() == 1,
        share_embeddings_and_output_weights=False,
    )


def load_weights(model: nn.Module, case: str, sizes: Sizes, training: Training) -> None:
    """Give the megatron side our logical weights: q, k, v interleaved by head, cut along its partition dims."""
    ours = {name: logical(spec, training.config.seed) for name, spec in training.plan.spec.parameters.items()}
    first_layer = sizes.layers // 2 if case == "pp" and dist.get_rank() == 1 else 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = _logical_of(name, ours, sizes, first_layer)
            dim = getattr(parameter, "partition_dim", -1)
            if whole.shape != parameter.shape:
                whole = whole.chunk(2, dim)[dist.get_rank()]
            parameter.copy_(whole)


def _logical_of(name: str, ours: dict[str, Tensor], sizes: Sizes, first_layer: int) -> Tensor:
    ends = {
        "embedding.word_embeddings.weight": "embedding.tokens.weight",
        "embedding.position_embeddings.weight": "embedding.position.weight",
        "decoder.final_layernorm.weight": "head.norm.weight",
        "decoder.final_layernorm.bias": "head.norm.bias",
        "output_layer.weight": "head.head.weight",
    }
    if name in ends:
        return ours[ends[name]]
    _, _, index, *rest, kind = name.split(".")
    layer, module = f"layers.{int(index) + first_layer}", ".".join(rest)
    plain = {
        "input_layernorm": "attention_norm",
        "pre_mlp_layernorm": "mlp_norm",
        "self_attention.linear_proj": "attention.out",
        "mlp.linear_fc1": "mlp.up.up",
        "mlp.linear_fc2": "mlp.down",
    }
    if module in plain:
        return ours[f"{layer}.{plain[module]}.{kind}"]
    assert module == "self_attention.linear_qkv", name
    parts = [ours[f"{layer}.attention.qkv.{part}.{kind}"] for part in "qkv"]
    heads = torch.stack([part.unflatten(0, (sizes.heads, -1)) for part in parts], dim=1)
    return heads.flatten(0, 2)


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
    """A MoELayer at ep = all ranks that computes what `ours` does, top-2 of a softmax over the chosen: its all-to-all
    dispatcher and one MLP an expert (its grouped product needs CUDA). For `benchmarks.experts`."""
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


class Megatron:
    """`step()` is megatron-core's own forward-backward function over the microbatches of one batch."""

    def __init__(self, case: str, sizes: Sizes, training: Training):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.sizes, self.training, self.number = sizes, training, 0
        self.model = build_megatron(case, sizes)
        load_weights(self.model, case, sizes, training)
        self.schedule = get_forward_backward_func()
        self.mask = torch.ones(sizes.seq, sizes.seq, dtype=torch.bool).triu(1)[None, None]
        self.pp_ranks = torch.arange(sizes.seq)[None]
        self.num_microbatches = training.plan.batch.microbatches
        self.loss = 0.0

    def step(self) -> None:
        self.number += 1
        size = self.training.plan.batch.micro_batch
        for parameter in self.model.parameters():
            parameter.grad = None
        with OnCpu():
            outputs = self.schedule(
                forward_step_func=self._forward,
                data_iterator=iter(range(self.num_microbatches)),
                model=[self.model],
                num_microbatches=self.num_microbatches,
                seq_length=self.sizes.seq,
                micro_batch_size=size,
                forward_only=False,
            )
        losses = [output["loss"] for output in outputs]
        self.loss = float(sum(losses) / len(losses)) if losses else 0.0

    def _forward(self, numbers: Any, model: nn.Module) -> Any:
        number, batch = next(numbers), self._batch()
        size = self.training.plan.batch.micro_batch
        tokens = batch.inputs[number * size : (number + 1) * size]
        targets = batch.targets[number * size : (number + 1) * size]
        output = model(tokens, self.pp_ranks, self.mask, labels=targets)

        def mean(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = per_token.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place

        return output, mean

    def _batch(self) -> Any:
        """Every rank of the megatron side reads both inputs and targets."""
        return replace(self.training.reader.samples, has_inputs=True, has_targets=True)[self.number]


def _run(case: str, size: str, pairs: int, warmup: int) -> dict[str, Any]:
    sizes = SIZES[size]
    microbatches = sizes.microbatches if case == "pp" else 1
    config = tiny_config({**sizes.overrides, "microbatches": microbatches, **CASES[case]})
    training = build(config, resolve(config), torch.device("cpu"))
    peer = Megatron(case, sizes, training)
    state: dict[str, Any] = {"step": 0}

    def ours() -> None:
        state["step"] += 1
        state["loss"], _ = forward_backward(training, state["step"])
        finish_gradients(training)

    ours()
    peer.step()
    losses = torch.tensor([float(state["loss"]) / (sizes.batch * sizes.seq), peer.loss], dtype=torch.float64)
    dist.broadcast(losses, src=1)
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[1], f"{case} {size}: the two sides differ: {losses.tolist()}"
    times = time_pairs(ours, WithTorchsProducts(peer.step), pairs, warmup)
    return {"case": case, "size": size, "first_losses": losses.tolist(), "times": times}


def main() -> None:
    arguments = read_arguments(__doc__, "megatron", CASES, SIZES)
    cells = [(case, size) for case in arguments.case.split(",") for size in arguments.size.split(",")]
    results = ((on_ranks(2, _run, case, size, arguments.pairs, arguments.warmup), BAR) for case, size in cells)
    compare(arguments.name, results)


if __name__ == "__main__":
    main()
