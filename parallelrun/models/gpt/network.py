"""The modules of a gpt, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.layers import TensorModule
from parallelrun.models.moe.layer import MoE
from parallelrun.models.moe.spec import has_experts
from parallelrun.models.network import Network, assemble
from parallelrun.models.transformer.latent_attention import self_attention
from parallelrun.models.transformer.modules import FeedForward, InputEmbedding, LayerFactory, OutputHead
from parallelrun.models.transformer.spec import ffn_size, window_of
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.router import RouterSpec


class GptBlock(TensorModule):
    """x plus attention, then plus the MLP, or the experts if a router is given, each with a norm of its input, of its
    result, or of both, as `norm_position` says."""

    def __init__(self, index: int, make: LayerFactory, router: RouterSpec | None = None):
        super().__init__()
        name, place = f"layers.{index}", make.model.norm_position
        self.has_experts, self.norms_input, self.norms_both = router is not None, place != "post", place == "both"
        if self.norms_input:  # modules are listed as they run
            self.attention_norm = make.norm()
        self.attention = self_attention(f"{name}.attention", make, window=window_of(index, make.model))
        if self.norms_both:
            self.attention_post_norm = make.norm()
        if not self.norms_input:
            self.attention_norm = make.norm()
        else:
            self.mlp_norm = make.norm()
        if router is None:
            self.mlp = FeedForward(make, ffn_size(make.model), f"{name}.mlp")
        else:
            self.moe = MoE(f"{name}.moe", make, router)
        if self.norms_both:
            self.mlp_post_norm = make.norm()
        if not self.norms_input:
            self.mlp_norm = make.norm()

    def forward(self, x: Tensor) -> Tensor:
        inside = self.moe if self.has_experts else self.mlp
        if self.norms_both:
            x = x + self.attention_post_norm(self.attention(self.attention_norm(x)))
            return x + self.mlp_post_norm(inside(self.mlp_norm(x)))
        if self.norms_input:
            x = x + self.attention(self.attention_norm(x))
            return x + inside(self.mlp_norm(x))
        x = x + self.attention_norm(self.attention(x))
        return x + self.mlp_norm(inside(x))


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, on the current device and uninitialised."""
    make, model = LayerFactory(config, spec.vocab, precision), config.model
    embedding = InputEmbedding(make)
    routers = (spec.router if has_experts(index, model) else None for index in range(model.layers))
    layers = (GptBlock(index, make, router) for index, router in enumerate(routers))
    head = OutputHead(make, embedding.tokens if model.tied_embeddings else None)
    return assemble(config, spec, precision, (embedding, *layers, head))
