"""The modules of a bert, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models.layers import Activation, TensorModule, TokenEmbedding, TokenLoss
from parallelrun.models.network import Network, store
from parallelrun.models.transformer.modules import FeedForward, InputEmbedding, LayerFactory, SelfAttention
from parallelrun.models.transformer.spec import ffn_size
from parallelrun.precision import Precision


class BertEmbedding(InputEmbedding):
    """Tokens (batch, seq) -> normed x (batch, seq, hidden)."""

    def __init__(self, make: LayerFactory):
        super().__init__(make)
        self.norm = make.norm()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.norm(self.embed(tokens)))


class BertBlock(TensorModule):
    """The norm of x plus attention, then the norm of that plus the MLP."""

    def __init__(self, name: str, make: LayerFactory):
        super().__init__()
        self.attention = SelfAttention(f"{name}.attention", make, causal=False)
        self.attention_norm = make.norm()
        self.mlp = FeedForward(make, ffn_size(make.model), f"{name}.mlp")
        self.mlp_norm = make.norm()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class MaskedTokenHead(TensorModule):
    """x -> logits (batch, seq, vocab) of the original tokens: transform, activation, norm, tied decoder."""

    def __init__(self, make: LayerFactory, tied: TokenEmbedding):
        super().__init__()
        self.transform = make.linear(make.model.hidden)
        self.activation = Activation(make.model.activation)
        self.norm = make.norm()
        self.head = make.head(tied)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.activation(self.transform(x))))


class BertNetwork(Network):
    """Blocks `embedding`, `layers.0` ..., `head`."""

    def __init__(self, make: LayerFactory, spec: ModelSpec):
        super().__init__(spec, TokenLoss(make.model.label_smoothing))
        self.embedding = BertEmbedding(make)
        self.layers = nn.ModuleDict({str(i): BertBlock(f"layers.{i}", make) for i in range(make.model.layers)})
        self.head = MaskedTokenHead(make, self.embedding.tokens)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, its parameters uninitialised: call it under `torch.device("meta")`, then keep your blocks."""
    return store(BertNetwork(LayerFactory(config, spec.vocab, precision), spec), precision.stored)
