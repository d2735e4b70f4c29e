"""The modules of an mlp, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models.layers import TensorModule, TokenLoss
from parallelrun.models.network import Network, store
from parallelrun.models.transformer.modules import FeedForward, LayerFactory, OutputHead
from parallelrun.models.transformer.spec import ffn_size
from parallelrun.precision import Precision


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


class MlpNetwork(Network):
    """Blocks `embedding` (when it reads tokens), `layers.0` ..., `head`."""

    def __init__(self, make: LayerFactory, spec: ModelSpec):
        super().__init__(spec, TokenLoss(make.model.label_smoothing))
        self.embedding = MlpEmbedding(make) if spec.kind == "tokens" else None
        self.layers = nn.ModuleDict({str(i): MlpBlock(f"layers.{i}", make) for i in range(make.model.layers)})
        self.head = OutputHead(make, self.embedding.tokens if self.embedding is not None and spec.tied else None)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, its parameters uninitialised: call it under `torch.device("meta")`, then keep your blocks."""
    return store(MlpNetwork(LayerFactory(config, spec.vocab, precision), spec), precision.stored)
