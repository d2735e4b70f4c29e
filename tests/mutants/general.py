"""Planted bugs of data strategies, pipelines, experts and one-dimensional tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from parallelrun.distributed import comm


def _before_all_reduce(purpose: str, change: Callable[[torch.Tensor, Any], None]) -> None:
    """Apply `change(tensor, group)` to what is about to be summed for `purpose`."""
    right = comm.all_reduce

    def wrong(tensor: torch.Tensor, group: Any, label: str, **options: Any) -> Any:
        if label == purpose:
            change(tensor, group)
        return right(tensor, group, label, **options)

    comm.all_reduce = wrong


def _no_work() -> SimpleNamespace:
    """What a collective that sends nothing returns."""
    return SimpleNamespace(wait=lambda: None)


def _without_all_reduce(purpose: str) -> None:
    right = comm.all_reduce

    def wrong(tensor: torch.Tensor, group: Any, label: str, **options: Any) -> Any:
        return _no_work() if label == purpose else right(tensor, group, label, **options)

    comm.all_reduce = wrong


def dropped_gradient_reduce() -> None:
    """Every replica keeps its own gradient."""
    from parallelrun.strategies.data.common.reducer import BucketedRuntime

    BucketedRuntime.start_sum = lambda self, tensor, group: _no_work()


def doubled_gradient_reduce() -> None:
    """The sum is sent twice: gradients are dp times too large."""
    _before_all_reduce("gradients", lambda tensor, group: tensor.mul_(group.size))


def mean_for_sum() -> None:
    """Divided by dp although the loss is already divided by the global count."""
    _before_all_reduce("gradients", lambda tensor, group: tensor.div_(group.size))


def wrong_group() -> None:
    """Tensor-parallel sums run over the data group."""
    from parallelrun.distributed.mesh import Mesh

    right = Mesh.group
    Mesh.group = lambda self, axis: right(self, "dp" if axis == "tp" else axis)


def max_for_sum() -> None:
    """Row-parallel products are combined by the maximum."""
    right = comm.all_reduce

    def wrong(tensor: torch.Tensor, group: Any, label: str, op: str = "sum", **options: Any) -> Any:
        return right(tensor, group, label, op="max" if label == "activations" else op, **options)

    comm.all_reduce = wrong


def input_gradient_not_reduced() -> None:
    """Megatron's f without its backward sum: the loss of the first step is exact."""
    from parallelrun.strategies.tensor.megatron import operators

    operators._start_reduce = lambda grad, ctx: lambda: grad


def skipped_block() -> None:
    """The last stage begins one block too late."""
    from parallelrun.models.network import Network

    right = Network.forward

    def wrong(self: Network, x: torch.Tensor, *about: Any) -> torch.Tensor:
        names = self.block_names
        if "head" in names and "embedding" not in names:
            self.block_names = names[1:]
        out = right(self, x, *about)
        self.block_names = names
        return out

    Network.forward = wrong


def untied_embedding() -> None:
    """The two copies of the tied weight are not summed."""
    _without_all_reduce("tied")


def bias_added_by_every_rank() -> None:
    """The row bias is added before the sum: tp times."""
    from parallelrun.models import layers as single_device
    from parallelrun.strategies.tensor.megatron import layers, operators

    def wrong(self: layers.RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        partial = single_device.linear(x, self.weight, self.bias, self.compute_dtype)
        return operators.reduce_or_scatter(partial, self.tp)

    layers.RowParallelLinear.forward = wrong


def bias_of_channels_added_by_every_rank() -> None:
    from parallelrun.strategies.tensor.megatron import layers, operators

    layers.RowParallelConvolution.forward = lambda self, x: operators.reduce_or_scatter(
        self.convolve(x, self.bias), self.tp
    )


def convolutions_of_own_channels() -> None:
    """Input channels in a group for each rank, whose results are not summed: another model, AlexNet of 2012."""
    from parallelrun.strategies.tensor.megatron import layers

    right = layers.reduce_or_scatter
    layers.reduce_or_scatter = lambda x, tp: x if x.dim() == 4 else right(x, tp)


def statistics_of_the_first_channels() -> None:
    """Every rank takes the running statistics of the first rank's channels for its own."""
    from parallelrun.models.vision.batch_norm import BatchNorm

    right = BatchNorm.take_statistics

    def wrong(self: BatchNorm) -> torch.Tensor | None:
        seen = right(self)
        if seen is not None:
            torch.distributed.broadcast(seen, 0)
        return seen

    BatchNorm.take_statistics = wrong


def norm_counts_replicas() -> None:
    """Replicated parameters count once per rank in the gradient norm."""
    from parallelrun.training.loop import gradients

    gradients.owns = lambda *arguments: True


def label_smoothing_by_shard() -> None:
    """Smoothing spreads over the local vocabulary (Megatron-LM, until today)."""
    from parallelrun.strategies.tensor.common import cross_entropy

    right = cross_entropy.VocabParallelLoss.forward

    def wrong(self: cross_entropy.VocabParallelLoss, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.vocab = logits.size(-1)
        return right(self, logits, targets)

    cross_entropy.VocabParallelLoss.forward = wrong


def fsdp_divides() -> None:
    """FSDP2's own division by the number of ranks is left on."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None


def fsdp_divides_below_the_root() -> None:
    """The divide factor is set on the root only: it does not reach the blocks."""
    from torch.distributed.fsdp import FSDPModule

    right = FSDPModule.set_gradient_divide_factor
    seen: list[Any] = []

    def wrong(self: Any, factor: float) -> None:
        seen.append(self)
        if len(seen) == 1:
            right(self, factor)

    FSDPModule.set_gradient_divide_factor = wrong


def partial_norms() -> None:
    """Under sequence parallel the norms' gradients stay sums over a slice of the sequence."""
    _without_all_reduce("partial")


def stale_weights() -> None:
    """ZeRO-1 without the gather: a rank sees only its own shard's update."""
    from parallelrun.strategies.data.zero1 import runtime

    runtime.ZeRO1Runtime.finish_update = lambda self: None


def local_count() -> None:
    """The loss is divided by the replica's own count, not the global one."""
    from parallelrun.training.loop import step

    right = step.count_valid

    def wrong(*args: Any) -> tuple[int, int]:
        _, mine = right(*args)
        return mine, mine

    step.count_valid = wrong


def same_samples_everywhere() -> None:
    """Every replica reads the first replica's samples."""
    from parallelrun.training.loop import reader

    right = reader.Reader.__init__

    def wrong(self: reader.Reader, *arguments: Any, **keywords: Any) -> None:
        right(self, *arguments[:4], replica=0, **keywords)

    reader.Reader.__init__ = wrong


def initial_weights_by_rank() -> None:
    """Each rank draws its own weights."""
    import torch.distributed as dist

    from parallelrun.models import initialise

    right = initialise.materialise
    initialise.materialise = lambda parts, plan, mesh, seed, given: right(
        parts, plan, mesh, seed + dist.get_rank(), given
    )


def _instead_of_the_ring(change: Callable[..., Any]) -> None:
    """`change(the right all_reduce, tensor, group, *rest)` is what the ring way calls."""
    from parallelrun.strategies.data.common.allreduce import runtime

    runtime.all_reduce = partial(change, runtime.all_reduce)


def doubled_gradients_of_the_ring() -> None:
    """Each rank's own part is added once more."""
    _instead_of_the_ring(lambda right, tensor, *rest: right(tensor.mul_(2), *rest))


def own_gradients_kept() -> None:
    """What arrives is thrown away: the sum is made in another tensor."""
    _instead_of_the_ring(lambda right, tensor, *rest: right(tensor.clone(), *rest))


def ring_over_the_wrong_group() -> None:
    """Gradients are summed over tp."""
    from parallelrun.distributed.mesh import Mesh
    from parallelrun.strategies.data.ring import runtime

    right = runtime.RUNTIME.attach

    class Wrong:
        def __init__(self, mesh: Mesh):
            self.group, self.coordinate = lambda axis: mesh.group("tp" if axis == "dp" else axis), mesh.coordinate

    runtime.RUNTIME.attach = lambda parts, plan, mesh: right(parts, plan, Wrong(mesh))


def expert_gradients_summed_over_dp() -> None:
    """Experts are taken for what all of dp has copies of: gradients of different experts are added."""
    from parallelrun.strategies.data.common import buckets

    buckets.replica_axis = lambda layout, plan: "dp"


def expert_gradients_not_summed() -> None:
    """Experts are taken for what has no copies."""
    from parallelrun.strategies.data.common import buckets

    right = buckets.is_summed
    buckets.is_summed = lambda held, plan: "ep" not in held.layout.axes and right(held, plan)


def weights_of_other_choices() -> None:
    """The weights of somebody else's router are taken token by token, its experts choice by choice."""
    from parallelrun.models.moe import own_experts

    right = own_experts.Routing

    def wrong(**fields: Any) -> Any:
        by_token = fields["weights"].view(-1, fields["num_tokens"]).t().flatten()
        return right(**{**fields, "weights": by_token})

    own_experts.Routing = wrong


def expert_gradients_ep_times_too_large() -> None:
    """Experts as means over their copies of sums over ep, everything else as means over dp: the loss is exact
    (DeepSpeed #5259, Megatron-LM #5956)."""
    from parallelrun.training.loop import step

    right = step.finish_gradients

    def wrong(training: Any) -> None:
        right(training)
        for parameter in training.parameters:
            if "ep" in parameter.layout.axes:
                parameter.tensor.grad.mul_(training.plan.mesh.size("ep"))

    step.finish_gradients = wrong


def experts_summed_with_other_experts() -> None:
    """Groups of as many ranks, but across ep: ZeRO sums different experts and shares out their updates."""
    from parallelrun.distributed.mesh import Mesh

    right = Mesh.group
    Mesh.group = lambda self, axis: right(self, "ep" if axis == "expert_dp" else axis)


def chunks_of_experts_in_a_row() -> None:
    """Chunks inside of every expert are taken as if they lay one after the other, as chunks of dim 0 do."""
    from parallelrun.strategies.data.common.zero_runtime import ChunkedWeight

    right = ChunkedWeight.pieces
    ChunkedWeight.pieces = lambda self, regions, whole: (
        [(regions, whole.reshape(regions.shape))] if self.dim else right(self, regions, whole)
    )


def own_chunk_of_experts_stays_old() -> None:
    """The optimizer's copy of a chunk inside of several experts is not brought back into the weight."""
    from parallelrun.strategies.data.zero1.runtime import ZeRO1Runtime

    right = ZeRO1Runtime.finish_update

    def wrong(self: ZeRO1Runtime) -> None:
        places = [
            one.weight.detach().chunk(chunks.group.size, one.dim)[chunks.group.index]
            for chunks in self._chunks
            for one in chunks.weights
            if one.dim
        ]
        old = [place.clone() for place in places]
        right(self)
        for place, value in zip(places, old):
            place.copy_(value)

    ZeRO1Runtime.finish_update = wrong


def fsdp_divides_experts() -> None:
    """The divide factor does not reach the units of experts."""
    from torch.distributed.fsdp import FSDPModule

    right = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda self, factor: (
        None if hasattr(self, "experts") else right(self, factor)
    )


def latent_weights_not_summed() -> None:
    """The weights that give the latents keep the gradient of a rank's own slice of the sequence."""
    from parallelrun.base.layout import Layout
    from parallelrun.strategies.tensor.megatron.plan import Megatron1D

    right = Megatron1D.layout

    def wrong(self: Megatron1D, parameter: Any, plan: Any) -> Layout:
        found = right(self, parameter, plan)
        return Layout(found.dims) if parameter.layer_role == "linear" else found

    Megatron1D.layout = wrong


def chunk_averaged() -> None:
    """A chunk of the loss is the mean over its tokens, of which chunks have different numbers."""
    from parallelrun.models import chunked_loss

    defer = chunked_loss.defer_logits

    def averaged(network: Any, chunks: int) -> None:
        defer(network, chunks)
        right = network.loss.loss.forward
        network.loss.loss.forward = lambda logits, targets: right(logits, targets) * (6 / targets.numel())

    import parallelrun.training.loop.build as build

    build.defer_logits = averaged


def chunks_without_the_cap() -> None:
    """The logits of chunks have no soft cap."""
    from parallelrun.models.chunked_loss import ChunkedLoss

    ChunkedLoss._loss = lambda self, logits, targets: self.loss(logits, targets)


def gradient_of_the_last_chunk() -> None:
    """Each chunk overwrites the gradient of the head's weights."""
    from parallelrun.models import chunked_loss

    right = chunked_loss._Logits.backward

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.sums[0].zero_()
        return right(ctx, grad)

    chunked_loss._Logits.backward = staticmethod(backward)


def inputs_of_the_next_block() -> None:
    """A block gets back from the host what was moved there after its own input."""
    from parallelrun.models.host_copies import HostCopy, HostLink

    right = HostLink.put

    def put(self: HostLink, tensor: torch.Tensor) -> HostCopy:
        before = self._last and self._last()
        copy = right(self, tensor)
        if before and before._host is not None and copy._host is not None:
            before._host = copy._host.clone()
        return copy

    HostLink.put = put


def offloaded_gradients_of_the_first_step() -> None:
    """The update on the host goes on with the gradients that it has."""
    from parallelrun.models import host_copies
    from parallelrun.models.optimizers import optimizer

    right = optimizer.Optimizer.step

    def step(self: Any, lr: float) -> None:
        first = self.__dict__.setdefault("first", {})
        for name, tensor in self._tensors.items():
            tensor.grad.copy_(first.setdefault(name, host_copies.host_copy(tensor.grad)))
        right(self, lr)

    optimizer.Optimizer.step = step


def windows_of_the_next_layers() -> None:
    """Layers have the windows of those behind them."""
    from parallelrun.models.gpt import network

    right = network.window_of
    network.window_of = lambda index, model: right(index + 1, model)
