"""The bert as modules, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models import layers
from parallelrun.models.gpt.network import Attention, Embeddings, Factory, Mlp
from parallelrun.models.network import Network, store
from parallelrun.precision import Precision


class BertEmbeddings(Embeddings):
    """Tokens (batch, seq) -> normed x (batch, seq, hidden)."""

    def __init__(self, make: Factory):
        super().__init__(make)
        self.norm = make.norm()

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.position is not None
        return self.dropout(self.norm(self.position(self.tokens(tokens))))


class Encoder(nn.Module):
    """One post-LN layer: the norm of x plus attention, then the norm of that plus the MLP."""

    def __init__(self, name: str, make: Factory):
        super().__init__()
        self.attention = Attention(f"{name}.attention", make, causal=False)
        self.attention_norm = make.norm()
        self.mlp = Mlp(f"{name}.mlp", make)
        self.mlp_norm = make.norm()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class MaskedHead(nn.Module):
    """x -> what each position's token was: transform, activation, norm, logits (batch, seq, vocab)."""

    def __init__(self, make: Factory, tied: layers.Embedding):
        super().__init__()
        self.transform = make.linear(make.model.hidden)
        self.activation = layers.Activation(make.model.activation)
        self.norm = make.norm()
        self.head = layers.Head(make.model.hidden, make.vocab, make.dtype, tied)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.activation(self.transform(x))))


class Bert(Network):
    """Blocks `embedding`, `layers.0` ..., `head`."""

    def __init__(self, make: Factory, spec: ModelSpec):
        super().__init__(spec, layers.TokenLoss(make.model.label_smoothing))
        self.embedding = BertEmbeddings(make)
        self.layers = nn.ModuleDict({str(i): Encoder(f"layers.{i}", make) for i in range(make.model.layers)})
        self.head = MaskedHead(make, self.embedding.tokens)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The whole network, its parameters uninitialised: call it under `torch.device("meta")` and keep your blocks."""
    network = Bert(Factory(config, spec.vocab, precision), spec)
    store(network, precision.stored)
    return network
