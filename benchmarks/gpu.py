"""Tokens/s and MFU on one GPU (or several under torchrun), beside a plain-PyTorch loop of the same model.

    python -m benchmarks.gpu                              # gpt2_124m, llama_1b, llama_7b_layers; eager and compiled
    torchrun --nproc-per-node 8 -m benchmarks.gpu --strategy "strategy.data.kind=fsdp"
    python -m benchmarks.gpu --device cpu --model tiny --steps 3      # exercises the script without a GPU

MFU counts 72-form FLOPs (three times the forward's, no recomputation) against the dense bf16 peak of the device named
by its driver; a device that is not in the table gets no MFU rather than a guess.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pairs import write
from benchmarks.plain_gpt import PlainGpt, Sizes, loss_of
from benchmarks.plain_llama import PlainLlama
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

# dense bf16 TFLOP/s without sparsity, from the vendors' data sheets
PEAK_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "seq": 64, "vocab": 256, "batch": 4},
    "gpt2_124m": {"layers": 12, "hidden": 768, "heads": 12, "seq": 1024, "vocab": 50304, "batch": 16},
    "llama_1b": {
        "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "seq": 2048, "vocab": 32000, "batch": 4,
    },
    "llama_7b_layers": {  # 4 of Llama 2 7B's 32 layers: its shapes, within one card's memory in fp32 masters
        "layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "seq": 4096, "vocab": 32000, "batch": 2,
    },
}  # fmt: skip
LR = 3e-4


def config_of(name: str, compiled: bool, precision: str, extra: list[str]):
    """The run's Config: the model's sizes, synthetic tokens, bf16 on fp32 masters."""
    sizes = dict(MODELS[name])
    batch = sizes.pop("batch")
    overrides: dict[str, Any] = {f"model.{key}": value for key, value in sizes.items()}
    overrides |= {"model.tied_embeddings": False, "global_batch": batch, "precision.name": precision}
    overrides |= {"dataset.vocab": sizes["vocab"], "dataset.samples": 256, "compile": compiled, "microbatches": 1}
    if "ffn" in sizes:
        overrides |= {
            "model.norm": "rmsnorm",
            "model.activation": "swiglu",
            "model.position": "rope",
            "model.bias": False,
        }
    for pair in extra:
        key, _, value = pair.partition("=")
        overrides[key] = int(value) if value.isdigit() else value
    if dist.is_initialized() and not {"dp", "tp", "pp"} & overrides.keys():
        overrides["dp"] = dist.get_world_size()
        overrides["global_batch"] = batch * overrides["dp"]
    return tiny_config(overrides)


def plain_step(name: str, compiled: bool, device: torch.device, training: Training) -> Callable[[], Tensor]:
    """A full training step as plain PyTorch: fp32 weights under bf16 autocast, fused AdamW, clipping."""
    sizes = MODELS[name]
    with device:
        if "ffn" in sizes:
            model: nn.Module = PlainLlama(**{key: value for key, value in sizes.items() if key not in ("seq", "batch")})
        else:
            plain = Sizes(name, sizes["layers"], sizes["hidden"], sizes["heads"], sizes["seq"], sizes["vocab"], 0, 1)
            model = PlainGpt(plain)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    state = {"step": 0}

    def step() -> Tensor:
        state["step"] += 1
        batch = training.reader.batch(state["step"])
        assert batch.targets is not None, "one rank reads everything"
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=training.plan.precision.name == "bf16"):
            logits = model(batch.inputs)
        loss = loss_of(logits, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def time_steps(step: Callable[[], Any], steps: int, warmup: int, device: torch.device) -> list[float]:
    """Seconds of each full step, the device synchronised."""
    times = []
    for number in range(warmup + steps):
        _synchronize(device)
        began = time.perf_counter()
        step()
        _synchronize(device)
        if number >= warmup:
            times.append(time.perf_counter() - began)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(name: str, compiled: bool, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row: our step and, on one rank, the plain loop's, on the same tokens."""
    config = config_of(name, compiled, arguments.precision, arguments.overrides)
    training = build(config, resolve(config), device)
    scaler = LossScaler(config.precision, scaled=training.plan.precision.scaled)
    state = {"step": 0}

    def ours() -> None:
        state["step"] += 1
        train_step(training, state["step"], LR, scaler)

    row: dict[str, Any] = {"model": name, "compiled": compiled, "degrees": training.plan.degrees}
    row["ours_s"] = statistics.median(time_steps(ours, arguments.steps, arguments.warmup, device))
    if training.plan.world == 1:
        plain = plain_step(name, compiled, device, training)
        row["plain_s"] = statistics.median(time_steps(plain, arguments.steps, arguments.warmup, device))
        row["ratio"] = row["ours_s"] / row["plain_s"]
    batch = training.plan.batch.global_batch
    row["tokens_per_s"] = batch * training.plan.spec.seq / row["ours_s"]
    flops = 3 * training.plan.spec.forward_flops * batch
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    row["mfu"] = flops / row["ours_s"] / (peak * 1e12 * training.plan.world) if peak else None
    row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_124m,llama_1b,llama_7b_layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--name", default="gpu", help="results/<date>-NAME.json; empty: do not write")
    parser.add_argument("--strategy", dest="overrides", nargs="*", default=[], help="overrides, for example tp=2")
    arguments = parser.parse_args()
    device = (
        torch.device(arguments.device, int(os.environ.get("LOCAL_RANK", 0)))
        if arguments.device == "cuda"
        else torch.device("cpu")
    )
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rows = []
    for name in arguments.model.split(","):
        for mode in arguments.modes.split(","):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            rows.append(measure(name, mode == "compiled", device, arguments))
            print(rows[-1], flush=True)
    if arguments.name and int(os.environ.get("RANK", 0)) == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        print("written to", write(arguments.name, {"device": name}, rows))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
