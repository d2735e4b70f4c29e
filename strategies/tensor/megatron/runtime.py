"""Put a one-device network on the ranks of the tensor axis: cut its parameters, replace its role layers. On meta."""

from __future__ import annotations

from parallelrun.distributed.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan

from ..common.cross_entropy import VocabParallelLoss
from ..common.norm import SplitNorm
from ..common.sharding import first_row, has_vocab_head, shard_parameters
from ..common.traffic import AXIS, overlaps
from . import layers
from .operators import TPContext


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    group, axes = mesh.group(AXIS), plan.mesh.mesh_dims_of(AXIS)
    if group.size == 1:
        return
    shard_parameters(network, plan, mesh)
    over_heads = {layer.name for layer in plan.spec.layers() if layer.spans_heads}
    tp = TPContext(group, plan.tensor.sequence_parallel, overlaps(plan))
    for name, layer in list(network.named_modules()):
        if isinstance(layer, single_device.TokenEmbedding):
            start = first_row(layer.vocab, axes, mesh)
            network.set_submodule(name, layers.VocabParallelEmbedding(layer, tp=tp, start=start))
        elif plan.ep_spans_tp and isinstance(layer, (single_device.ExpertInput, single_device.ExpertOutput)):
            continue  # the expert dispatcher divides the tokens
        elif name in over_heads:
            network.set_submodule(name, SplitNorm(layer, group=group))
        elif type(layer) in layers.PARALLEL_LAYERS:  # other norms work on a slice of the sequence as they are
            network.set_submodule(name, layers.PARALLEL_LAYERS[type(layer)](layer, tp=tp))
    if isinstance(network.loss, single_device.TokenLoss) and has_vocab_head(plan):
        vocab = plan.spec.vocab
        network.loss = VocabParallelLoss(network.loss, group, first_row(vocab, axes, mesh), vocab)
