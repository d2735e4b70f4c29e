"""The mlp as modules; `spec.py` lists the same parameters. Its parts are those of the gpt."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models import layers
from parallelrun.models.gpt.network import Factory, Mlp, OutputHead
from parallelrun.models.network import Network, store
from parallelrun.precision import Precision


class Embedded(nn.Module):
    """Tokens (batch, seq) -> x (batch, seq, hidden)."""

    def __init__(self, make: Factory):
        super().__init__()
        self.tokens = layers.Embedding(make.vocab, make.model.hidden, make.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Layer(nn.Module):
    """x (batch, [seq,] hidden) plus the MLP of its norm."""

    def __init__(self, name: str, make: Factory):
        super().__init__()
        self.dtype = make.dtype
        self.mlp_norm = make.norm()
        self.mlp = Mlp(f"{name}.mlp", make)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)  # features arrive in whatever dtype they were read
        return x + self.mlp(self.mlp_norm(x))


class MlpNetwork(Network):
    """Blocks `embedding` (when it reads tokens), `layers.0` ..., `head`."""

    def __init__(self, make: Factory, spec: ModelSpec):
        super().__init__(spec, layers.TokenLoss(make.model.label_smoothing))
        self.embedding = Embedded(make) if spec.kind == "tokens" else None
        self.layers = nn.ModuleDict({str(i): Layer(f"layers.{i}", make) for i in range(make.model.layers)})
        self.head = OutputHead(make, self.embedding.tokens if self.embedding is not None and spec.tied else None)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The whole network, its parameters uninitialised: call it under `torch.device("meta")` and keep your blocks."""
    network = MlpNetwork(Factory(config, spec.vocab, precision), spec)
    store(network, precision.stored)
    return network
