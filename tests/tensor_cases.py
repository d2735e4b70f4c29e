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
from parallelrun.models import dropout, layers, recompute, rounding
from parallelrun.models.moe.layer import MoE
from parallelrun.models.network import Network, compile_blocks
from parallelrun.planner.contract.classes import pipeline_schedule
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.tensor.megatron.runtime import parallelize
from parallelrun.training.verify.measure import tensor_errors
from tests.live_bytes import saving
from tests.plans import tiny_config

BOUND = 1e-10
AUXILIARY = 0.3  # what a routing group's auxiliary loss counts in the loss


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
    for network, shares in ((alone, 1), (placed, plan.mesh.size("tp"))):
        recompute.apply(network, plan.recompute)
        for module in network.modules():
            if isinstance(module, MoE):  # every rank adds the auxiliary loss to what is summed over them
                module.auxiliary_scale = AUXILIARY / shares
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


# One layer alone ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"vocab": 7, "hidden": 12, "heads": 4, "kv_heads": 2, "seq": 8}
QKV = {"q": 16, "k": 8, "v": 8}


def _layer(role: str) -> nn.Module:
    dtype, hidden = torch.float64, SIZES["hidden"]
    if role == "column_parallel":
        return layers.ColumnLinear(hidden, QKV, True, dtype)
    if role == "row_parallel":
        return layers.RowLinear(16, hidden, True, dtype)
    if role == "embedding":
        return layers.TokenEmbedding(SIZES["vocab"], hidden, dtype)
    if role == "table":  # another embedding than that of the vocabulary, as users' modules have
        return layers.TokenEmbedding(3, hidden, dtype)
    if role == "position_embedding":
        return layers.PositionEmbedding(SIZES["seq"], hidden, dtype)
    if role == "norm":
        return layers.HiddenNorm("layernorm", hidden, 1e-5, True, dtype)
    assert role == "head"
    return layers.VocabHead(hidden, SIZES["vocab"], dtype)


def _spec_of(role: str, network: nn.Module) -> ModelSpec:
    """The spec of a network whose one block `alone` is a layer of that role."""
    heads = {"q": SIZES["heads"], "k": SIZES["kv_heads"], "v": SIZES["kv_heads"]}
    layer_role = str(network.get_submodule("alone").layer_role)
    parameters = tuple(
        ParameterSpec(name, tuple(p.shape), Initialiser("normal"), layer_role, heads.get(name.split(".")[1]))
        for name, p in network.named_parameters()
    )
    return ModelSpec(
        name="alone",
        kind="tokens",
        blocks=(BlockSpec("alone", role, (LayerSpec("alone", role, 1, 1, parameters),), 0.0),),
        sample_shape=(SIZES["seq"],),
        boundary_shape=(SIZES["seq"], SIZES["hidden"]),
        targets_per_sample=SIZES["seq"],
        **SIZES,
    )


def _activations(role: str, plan: Plan) -> tuple[Layout, list[Layout]]:
    """Layouts (batch, seq, features) of what goes into the layer and of what comes out."""
    axes = plan.mesh.mesh_dims_of("tp")
    between = Layout(((), axes if plan.tensor.sequence_parallel else (), ()))
    split = Layout(((), (), axes))
    if role == "column_parallel":
        weights = [p for p in plan.spec.parameters.values() if p.name.endswith("weight")]
        return between, [Layout(((), (), plan.tensor.layout(weight, plan).dims[0])) for weight in weights]
    return (split if role == "row_parallel" else between), [split if role == "head" else between]


def _run(layer: nn.Module, x: Tensor, wanted: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """(outputs, input gradient) with `wanted` as the outputs' gradients; parameters get theirs."""
    x = x.clone().requires_grad_(x.is_floating_point())
    outputs = layer(x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    torch.autograd.backward(outputs, wanted)
    return [output.detach() for output in outputs], x.grad


def prove_layers(
    roles: tuple[str, ...], overrides: dict[str, Any], pipeline: str = "none"
) -> dict[str, dict[str, float]]:
    """Body of a rank: by role, the errors of outputs, input gradient and every parameter's gradient of one layer."""
    return {role: _prove_layer(role, overrides, pipeline) for role in roles}


def _prove_layer(role: str, overrides: dict[str, Any], pipeline: str) -> dict[str, float]:
    _, plan = gpt_plan({"model.kv_heads": SIZES["kv_heads"], **overrides}, pipeline)
    with torch.device("meta"):
        bare = nn.Module()
        bare.alone = _layer(role)
        bare.to(torch.float64)
        plan = replace(plan, spec=_spec_of(role, bare))
        alone = Network(plan.spec, nn.Identity())
        alone.add_module("alone", bare.alone)
        placed = copy.deepcopy(alone)
    mesh = build_mesh(plan, torch.device("cpu"))
    parallelize(placed, plan, mesh)
    fill(alone, plan, None)
    fill(placed, plan, mesh)
    into, out_of = _activations(role, plan)
    if role in ("embedding", "table"):
        whole_x = x = batch_of(plan)[0] % alone.get_parameter("alone.weight").size(0)
    else:
        whole_x = values("x", (2, SIZES["seq"], 16 if role == "row_parallel" else SIZES["hidden"]))
        x = part(whole_x, into, mesh)
    with torch.no_grad():
        shapes = alone(whole_x)
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    wanted = [values(f"gradient {number}", tuple(shape.shape)) for number, shape in enumerate(shapes)]
    mine = [part(whole, layout, mesh) * _share(layout, mesh) for whole, layout in zip(wanted, out_of)]
    expected, expected_x = _run(alone, whole_x, wanted)
    outputs, grad_x = _run(placed, x, mine)
    reference = {f"output {n}": part(e, layout, mesh) for n, (e, layout) in enumerate(zip(expected, out_of))}
    errors = tensor_errors({f"output {n}": output for n, output in enumerate(outputs)}, reference)
    if grad_x is not None and expected_x is not None:
        errors |= tensor_errors({"input gradient": grad_x}, {"input gradient": part(expected_x, into, mesh)})
    return errors | errors_of(gradients(placed, plan, mesh), gradients(alone, plan, None), plan, mesh)


def _share(layout: Layout, mesh: Mesh) -> float:
    """Copies of a kv head serve different query heads: their outputs' gradients are parts that sum to the whole."""
    copies = mesh.shape.size("tp_copy")
    if "tp_kv" not in layout.axes or "tp_copy" in layout.axes:
        return 1.0
    return 2.0 * (mesh.coordinate["tp_copy"] + 1) / (copies * (copies + 1))
