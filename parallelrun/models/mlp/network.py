"""The modules of an mlp, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.layers import TensorModule
from parallelrun.models.network import Network, assemble
from parallelrun.models.transformer.modules import FeedForward, LayerFactory, OutputHead
from parallelrun.models.transformer.spec import ffn_size
from parallelrun.planner.model.model_spec import ModelSpec


class MlpEmbedding(TensorModule):
    """Tokens (batch, seq) -> x (batch, seq, hidden)."""

    def __init__(self, make: LayerFactory):
        super().__init__()
        self.tokens = make.embedding()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class MlpBlock(TensorModule):
    """x (batch, [seq,] hidden) plus the MLP of its norm."""

    def __init__(self, name: str, make: LayerFactory):
        super().__init__()
        self.dtype = make.dtype
        self.mlp_norm = make.norm()
        self.mlp = FeedForward(make, ffn_size(make.model), f"{name}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)  # features arrive in the dtype in which they were read
        return x + self.mlp(self.mlp_norm(x))


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, on the current device and uninitialised."""
    make = LayerFactory(config, spec.vocab, precision)
    embeddings = [MlpEmbedding(make)] if spec.kind == "tokens" else []
    layers = (MlpBlock(f"layers.{index}", make) for index in range(config.model.layers))
    head = OutputHead(make, embeddings[0].tokens if spec.tied else None)
    return assemble(config, spec, precision, (*embeddings, *layers, head))
