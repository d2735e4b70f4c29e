"""The blocks, layers, parameters and FLOPs of a gpt. `network.py` builds the same parameters."""

from __future__ import annotations

from math import sqrt

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.moe import spec as moe
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec


class GptDefinition(ModelDefinition):
    """Blocks `embedding`, `layers.0` ..., `head`."""

    own_keys = transformer.TEXT_KEYS | transformer.ATTENTION_KEYS | transformer.ROPE_KEYS | {
        "experts", "global_period", "local_rope_theta", "logit_softcap", "norm_position", "window",
    }  # fmt: skip
    packs = True

    def make(self, config: Config, vocab: int) -> ModelSpec:
        model = config.model
        problems = transformer.check(model) or moe.check(model)
        if problems:
            raise ConfigError(*problems)
        embedding = (*transformer.embedding_layers(model, vocab), transformer.dropout_layer("embedding.dropout", model))
        tied = model.tied_embeddings
        only_experts = all(moe.has_experts(index, model) for index in range(model.layers))
        head = (transformer.norm_layer("head.norm", model), transformer.head_layer(model, vocab, tied))
        blocks = (
            BlockSpec("embedding", "embedding", embedding, forward_flops=0.0),
            *(_block(index, model) for index in range(model.layers)),
            BlockSpec("head", "head", head, forward_flops=2.0 * model.hidden * vocab * model.seq),
        )
        return transformer.transformer_spec(
            model,
            vocab,
            blocks,
            ffn=0 if only_experts else transformer.ffn_size(model),
            tied=(transformer.TIED,) if tied else (),
            experts=model.experts,
            router=moe.router_spec(model),
            norm_position=model.norm_position,
            logit_softcap=model.logit_softcap,
        )


def _block(index: int, model: ModelConfig) -> BlockSpec:
    name = f"layers.{index}"
    # Weights whose output is added to the residual stream are scaled down by depth, so that it keeps its scale (GPT-2).
    residual = Initialiser("normal", model.init_std / sqrt(2 * model.layers))
    products = 0

    def normed(part: str, branch: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        layer = transformer.norm_layer(f"{name}.{part}_norm", model)
        if model.norm_position == "both":
            return (layer, *branch, transformer.norm_layer(f"{name}.{part}_post_norm", model))
        return (layer, *branch) if model.norm_position == "pre" else (*branch, layer)

    if moe.has_experts(index, model):
        inside = moe.moe_layers(f"{name}.moe", model, residual)
        products = sum(moe.multiplied(x, model) for x in inside if x.layer_role in ("router", "expert"))
    else:
        inside = transformer.mlp_layers(f"{name}.mlp", model, transformer.normal(model), residual)
    layers = (
        *normed("attention", transformer.attention_layers(f"{name}.attention", model, residual)),
        *normed("mlp", inside),
    )
    attention = transformer.attention_spec(model, transformer.window_of(index, model))
    flops = transformer.transformer_flops(layers, model, products, attention.attended)
    return BlockSpec(name, "transformer", layers, flops, attention=attention)


MODEL = GptDefinition()
