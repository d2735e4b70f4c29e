"""The modules of a bert, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.layers import Activation, TensorModule, TokenEmbedding, UnsplitLinear
from parallelrun.models.network import Network, assemble
from parallelrun.models.transformer.latent_attention import self_attention
from parallelrun.models.transformer.modules import FeedForward, InputEmbedding, LayerFactory
from parallelrun.models.transformer.spec import ffn_size
from parallelrun.planner.model.model_spec import ModelSpec


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
        self.attention = self_attention(f"{name}.attention", make, causal=False)
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
        hidden = make.model.hidden
        self.transform = UnsplitLinear(hidden, hidden, make.model.bias, make.dtype)
        self.activation = Activation(make.model.activation)
        self.norm = make.norm()
        self.head = make.head(tied)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.activation(self.transform(x))))


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, on the current device and uninitialised."""
    make = LayerFactory(config, spec.vocab, precision)
    embedding = BertEmbedding(make)
    layers = (BertBlock(f"layers.{index}", make) for index in range(config.model.layers))
    return assemble(config, spec, precision, (embedding, *layers, MaskedTokenHead(make, embedding.tokens)))
