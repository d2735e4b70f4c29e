"""Put a one-device network on the ranks of the tensor axis: cut its parameters, replace its role layers. On meta."""

from __future__ import annotations

from parallelrun.layout import Layout
from parallelrun.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..common.cross_entropy import VocabParallelLoss
from ..common.product_strategy import AXIS, overlaps
from ..common.sharding import has_vocab_head, replace_module, shard_parameters
from . import layers


def parallelize(network: Network, plan: Plan, mesh: Mesh) -> None:
    """Cut every parameter of `network` by its Layout and replace its role layers and its loss, in place.

    Names stay. A tied weight stays one Parameter. Nothing is done at tp=1.
    """
    group = mesh.group(AXIS)
    if group.size == 1:
        return
    shard_parameters(network, plan, mesh)
    tp = layers.TPContext(group, plan.tensor.sequence_parallel, overlaps(plan))
    for name, layer in list(network.named_modules()):
        if isinstance(layer, single_device.TokenEmbedding):
            replace_module(
                network, name, layers.VocabParallelEmbedding(layer, tp, _vocab_start(layer.vocab, plan, mesh))
            )
        elif type(layer) in layers.PARALLEL_LAYERS:  # norms work on a slice of the sequence as they are
            replace_module(network, name, layers.PARALLEL_LAYERS[type(layer)](layer, tp))
    if isinstance(network.loss, single_device.TokenLoss) and has_vocab_head(plan):
        start, vocab = _vocab_start(plan.spec.vocab, plan, mesh), plan.spec.vocab
        network.loss = VocabParallelLoss(network.loss.label_smoothing, group, start, vocab)


def _vocab_start(vocab: int, plan: Plan, mesh: Mesh) -> int:
    """The first row of a vocabulary (embedding, head) that this rank holds."""
    layout = Layout((plan.mesh.mesh_dims_of(AXIS),))
    return layout.ranges((vocab,), plan.mesh.sizes, mesh.coordinate)[0][0]
