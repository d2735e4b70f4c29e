"""The modules of a gpt, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec, RouterSpec
from parallelrun.models.layers import TensorModule, TokenLoss
from parallelrun.models.moe.layer import MoE
from parallelrun.models.moe.spec import has_experts
from parallelrun.models.network import Network, store
from parallelrun.models.transformer.modules import FeedForward, InputEmbedding, LayerFactory, OutputHead, SelfAttention
from parallelrun.models.transformer.spec import ffn_size
from parallelrun.precision import Precision


class GptBlock(TensorModule):
    """x plus attention of its norm, then plus the MLP, or the experts if a router is given, of its norm."""

    def __init__(self, name: str, make: LayerFactory, router: RouterSpec | None = None):
        super().__init__()
        self.attention_norm = make.norm()
        self.attention = SelfAttention(f"{name}.attention", make)
        self.mlp_norm = make.norm()
        if router is None:
            self.mlp = FeedForward(make, ffn_size(make.model), f"{name}.mlp")
        else:
            self.moe = MoE(f"{name}.moe", make, router)
        self.has_experts = router is not None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + (self.moe(normed) if self.has_experts else self.mlp(normed))


class GptNetwork(Network):
    """Blocks `embedding`, `layers.0` ..., `head`."""

    def __init__(self, make: LayerFactory, spec: ModelSpec):
        super().__init__(spec, TokenLoss(make.model.label_smoothing))
        self.embedding = InputEmbedding(make)
        self.layers = nn.ModuleDict()
        for index in range(make.model.layers):
            router = spec.router if has_experts(index, make.model) else None
            self.layers[str(index)] = GptBlock(f"layers.{index}", make, router)
        self.head = OutputHead(make, self.embedding.tokens if make.model.tied_embeddings else None)


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, its parameters uninitialised: call it under `torch.device("meta")`, then keep your blocks."""
    return store(GptNetwork(LayerFactory(config, spec.vocab, precision), spec), precision.stored)
