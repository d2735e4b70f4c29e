"""The modules of a gpt, written as for one device; `spec.py` lists the same parameters."""

from __future__ import annotations

from torch import Tensor, nn

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.layers import TensorModule, TokenEmbedding, UnsplitLinear
from parallelrun.models.moe.layer import MoE
from parallelrun.models.moe.spec import has_experts
from parallelrun.models.network import Network, assemble
from parallelrun.models.transformer.latent_attention import self_attention
from parallelrun.models.transformer.modules import FeedForward, InputEmbedding, LayerFactory, OutputHead
from parallelrun.models.transformer.spec import ffn_size, window_of
from parallelrun.planner.model.model_spec import ModelSpec


class GptBlock(TensorModule):
    """x plus attention, then plus the MLP, or the experts if a router is given, each with a norm of its input, of its
    result, or of both, as `norm_position` says."""

    def __init__(self, name: str, index: int, make: LayerFactory, spec: ModelSpec):
        super().__init__()
        router = spec.router if has_experts(index, make.model) else None
        place = make.model.norm_position
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


class AheadInput(TensorModule):
    """x (batch, seq, hidden), and the tokens further ahead that a module of multi-token prediction reads (batch, seq)
    -> the sum of both, each with a norm and a projection. table: the embedding, whose weight it shares."""

    def __init__(self, make: LayerFactory, table: TokenEmbedding):
        super().__init__()
        hidden = make.model.hidden
        self.hidden_norm, self.hidden = make.norm(), UnsplitLinear(hidden, hidden, False, make.dtype)
        self.tokens = make.embedding()
        self.tokens.weight = table.weight
        self.token_norm, self.token = make.norm(), UnsplitLinear(hidden, hidden, False, make.dtype)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.hidden(self.hidden_norm(x)) + self.token(self.token_norm(self.tokens(tokens)))


class AheadLayer(GptBlock):
    """A layer with a norm behind it, whose result the head reads as it is."""

    def __init__(self, depth: int, make: LayerFactory, spec: ModelSpec):
        super().__init__(f"mtp.{depth}.layer", make.model.layers + depth, make, spec)
        self.norm = make.norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The full network, on the current device and uninitialised."""
    make, model = LayerFactory(config, spec.vocab, precision), config.model
    embedding = InputEmbedding(make)
    layers = (GptBlock(f"layers.{index}", index, make, spec) for index in range(model.layers))
    ahead: list[nn.Module] = []
    for depth in range(model.mtp_depth):
        ahead += AheadInput(make, embedding.tokens), AheadLayer(depth, make, spec)
    head = OutputHead(make, embedding.tokens if model.tied_embeddings else None)
    return assemble(config, spec, precision, (embedding, *layers, *ahead, head))
