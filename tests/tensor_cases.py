"""A tensor strategy against one device, layer by layer and model by model: what the tests of the tensor strategies
share."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from parallelrun.base import registry
from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.models import dropout, recompute, rounding
from parallelrun.models.network import Network, compile_blocks
from parallelrun.planner.contract.classes import pipeline_schedule
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.tensor.megatron.runtime import parallelize
from parallelrun.training.verify.measure import tensor_errors
from tests.live_bytes import saving
from tests.plans import tiny_config

BOUND = 1e-10


def gpt_plan(overrides: dict[str, Any], pipeline: str = "none") -> tuple[Config, Plan]:
    """The tiny gpt with `overrides` (see `tests.plans`) under tensor parallelism alone: fp64, one microbatch of two
    samples. pipeline: the kind whose rules the tensor strategy is to follow (zero bubble separates the collectives)."""
    few = {
        "model.layers": 2,
        "precision.name": "fp64",
        "global_batch": 2,
        "dataset.vocab": overrides.get("model.vocab", 32),
    }
    config = tiny_config({**few, **overrides})
    return config, replace(resolve(config), pipeline=pipeline_schedule(pipeline)())


def llama(**overrides: Any) -> dict[str, Any]:
    """Overrides that make the tiny gpt a llama; names take `__` for the dot."""
    options = {
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.position": "rope",
        "model.bias": False,
        "model.tied_embeddings": False,
        "model.kv_heads": 2,
    }
    return {**options, **{key.replace("__", "."): value for key, value in overrides.items()}}


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """fp64 numbers that depend on the name alone; weights of norms lie around 1, all else around 0."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
    return drawn + 1 if "norm" in name and name.endswith("weight") else drawn


def part(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's part of a tensor."""
    for dim, (start, stop) in enumerate(layout.ranges(tuple(whole.shape), mesh.shape.sizes, mesh.coordinate)):
        whole = whole.narrow(dim, start, stop - start)
    return whole.contiguous()


def original_names(spec: ModelSpec) -> dict[str, str]:
    """Copy of a tied parameter -> the parameter it copies."""
    return dict(spec.tied)


def fill(network: nn.Module, plan: Plan, mesh: Mesh | None) -> None:
    """Real weights in place of meta ones: whole ones (mesh None), or this rank's parts."""
    dtype = getattr(torch, plan.precision.stored)
    network.to_empty(device="cpu")
    tied = original_names(plan.spec)
    for name, parameter in network.named_parameters():
        spec = plan.spec.parameters[tied.get(name, name)]
        whole = values(spec.name, spec.shape).to(dtype)
        parameter.data.copy_(whole if mesh is None else part(whole, plan.tensor.layout(spec, plan), mesh))


def networks(config: Config, plan: Plan, mesh: Mesh) -> tuple[Network, Network]:
    """(the model on one device, the same on this rank), with equal weights."""
    with torch.device("meta"):
        alone = registry.load("models", config.model.name, "network").build(config, plan.spec, plan.precision)
        placed = copy.deepcopy(alone)
    parallelize(placed, plan, mesh)
    fill(alone, plan, None)
    fill(placed, plan, mesh)
    for network in (alone, placed):
        recompute.apply(network, plan.recompute)
    return alone, placed


def gradients(network: nn.Module, plan: Plan, mesh: Mesh | None) -> dict[str, Tensor]:
    """Every parameter's gradient; those of a rank are summed over the axes that its Layout is partial over."""
    found = {}
    tied = original_names(plan.spec)
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        grad = parameter.grad.clone()
        if mesh is not None:
            for axis in plan.tensor.layout(plan.spec.parameters[tied.get(name, name)], plan).partial:
                dist.all_reduce(grad, group=mesh.group(axis).process_group)
        found[name] = grad
    return found


def errors_of(ours: dict[str, Tensor], reference: dict[str, Tensor], plan: Plan, mesh: Mesh) -> dict[str, float]:
    """The measure of `verify` per parameter, this rank's part against the same part of the reference."""
    tied = original_names(plan.spec)
    parts = {}
    for name, whole in reference.items():
        parts[name] = part(whole, plan.tensor.layout(plan.spec.parameters[tied.get(name, name)], plan), mesh)
        assert ours[name].shape == parts[name].shape, (name, ours[name].shape, parts[name].shape)
    return tensor_errors(ours, parts)


def batch_of(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens or features, targets, sample ids) of one microbatch; some targets are ignored."""
    generator = torch.Generator().manual_seed(7)
    spec, num_samples = plan.spec, plan.batch.micro_batch
    if spec.kind == "tokens":
        inputs = torch.randint(spec.vocab, (num_samples, spec.seq), generator=generator)
    else:
        inputs = torch.randn((num_samples, spec.hidden), generator=generator, dtype=torch.float64)
        inputs = inputs.to(getattr(torch, plan.precision.compute))
    targets = torch.randint(spec.vocab, inputs.shape[:1] + spec.boundary_shape[:-1], generator=generator)
    targets.view(-1)[1::3] = -1
    return inputs, targets, torch.arange(num_samples) + 11


def train_once(network: Network, plan: Plan) -> Tensor:
    """Loss of one microbatch, after backward."""
    tokens, targets, sample_ids = batch_of(plan)
    loss = network.loss(network(tokens, sample_ids), targets)
    (loss / targets.numel()).backward()
    return loss.detach()


@dataclass(frozen=True)
class Proof:
    """What a rank found: the worst error against one device and where; collectives as counted and as predicted."""

    error: float
    where: str
    counted: list[Collective]
    predicted: list[Collective]


def prove_gpt(overrides: dict[str, Any], pipeline: str = "none", backend: str = "") -> Proof:
    """Body of a rank: one microbatch forward and backward, here and on one device. backend: of torch.compile."""
    config, plan = gpt_plan(overrides, pipeline)
    mesh = build_mesh(plan, torch.device("cpu"))
    alone, placed = networks(config, plan, mesh)
    if backend:
        compile_blocks(placed, backend)
    with CommunicationCounter(mesh) as counter:
        loss = train_once(placed, plan)
    expected = train_once(alone, plan)
    errors = errors_of(gradients(placed, plan, mesh), gradients(alone, plan, None), plan, mesh)
    errors["loss"] = float(abs(loss - expected) / abs(expected))
    where = max(errors, key=lambda name: errors[name])
    return Proof(errors[where], where, counter.rows(), plan.tensor.collectives(plan.spec.blocks, plan))


def saved_by_block(overrides: dict[str, Any], pipeline: str = "none") -> tuple[dict[str, int], dict[str, int]]:
    """Body of a rank: by block, (bytes autograd saves in one forward pass, bytes predicted).

    Counted by storage, without the parameters. The loss belongs to the last block.
    """
    config, plan = gpt_plan(overrides, pipeline)
    mesh = build_mesh(plan, torch.device("cpu"))
    _, placed = networks(config, plan, mesh)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in placed.parameters()}
    x, targets, sample_ids = batch_of(plan)
    counted = {}
    for name in placed.block_names:
        storages: dict[int, torch.UntypedStorage] = {}  # kept: a freed one's address would be used again

        def see(saved: Tensor, storages: dict = storages) -> None:
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage()

        with saving(see), dropout.scope(sample_ids):
            x = placed.block(name)(x)
            if name == placed.block_names[-1]:
                x = placed.loss(x, targets)
        counted[name] = sum(s.nbytes() for address, s in storages.items() if address not in parameters)
    return counted, {block.name: plan.tensor.saved_bytes(block, plan) for block in plan.spec.blocks}


def held_by_layer(overrides: dict[str, Any]) -> tuple[int, int]:
    """Body of a rank: (bytes that a recomputed transformer block leaves allocated with its input, bytes predicted).

    By the allocator's own account, so that it sees what hooks of `recompute` keep. On one device: gloo's threads free
    buffers behind the profiler's back.
    """
    config, plan = gpt_plan(overrides)
    mesh = build_mesh(plan, torch.device("cpu"))
    _, placed = networks(config, plan, mesh)
    tokens, _, sample_ids = batch_of(plan)
    x = placed.block("embedding")(tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with rounding.not_kept():
            y = recompute.run(placed.block("layers.0"), x, sample_ids, plan.recompute)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    kept = allocated - y.untyped_storage().nbytes() + x.untyped_storage().nbytes()
    return kept, plan.tensor.saved_bytes(plan.spec.block("layers.0"), plan)
