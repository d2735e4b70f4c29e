"""The blocks, layers, parameters and FLOPs of a gpt. `network.py` builds the same parameters."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.moe import spec as moe
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec


class GptDefinition(ModelDefinition):
    """Blocks `embedding`, `layers.0` ..., `mtp.0.input`, `mtp.0.layer` ..., `head`."""

    own_keys = transformer.TEXT_KEYS | transformer.ATTENTION_KEYS | transformer.ROPE_KEYS | {
        "experts", "global_period", "local_rope_theta", "logit_softcap", "mtp_depth", "mtp_weight", "norm_position",
        "window",
    }  # fmt: skip
    packs = True

    def make(self, config: Config, vocab: int) -> ModelSpec:
        model = config.model
        problems = transformer.check(model) or moe.check(model)
        if problems:
            raise ConfigError(*problems)
        embedding = (*transformer.embedding_layers(model, vocab), transformer.dropout_layer("embedding.dropout", model))
        tied, depths = model.tied_embeddings, range(model.mtp_depth)
        only_experts = all(moe.has_experts(index, model) for index in range(model.layers))
        head = transformer.head_layer(model, vocab, tied)
        again = replace(head, parameters=(), tied=head.tied or transformer.TIED[0])  # of each depth, with its weights
        heads = (head, *(replace(again, name=f"mtp.{depth}.head") for depth in depths))
        flops = len(heads) * 2.0 * model.hidden * vocab * model.seq
        tables = tuple((f"mtp.{depth}.input.tokens.weight", transformer.TIED[1]) for depth in depths)
        blocks = (
            BlockSpec("embedding", "embedding", embedding, forward_flops=0.0),
            *(_block(f"layers.{index}", index, model) for index in range(model.layers)),
            *(block for depth in depths for block in _module_ahead(depth, model, vocab)),
            BlockSpec(
                "head", "head", (transformer.norm_layer("head.norm", model), *heads), flops, follows=bool(depths)
            ),
        )
        return transformer.transformer_spec(
            model,
            vocab,
            blocks,
            ffn=0 if only_experts else transformer.ffn_size(model),
            tied=(*tables, *((transformer.TIED,) if tied else ())),
            mtp_depth=model.mtp_depth,
            mtp_weight=model.mtp_weight,
            experts=model.experts,
            router=moe.router_spec(model),
            norm_position=model.norm_position,
            logit_softcap=model.logit_softcap,
        )


def _module_ahead(depth: int, model: ModelConfig, vocab: int) -> tuple[BlockSpec, BlockSpec]:
    """What adds a token further ahead to the representation of the depth before it, and a transformer layer with a norm
    behind it (DeepSeek-V3, 2024, section 2.2)."""
    name, hidden = f"mtp.{depth}", model.hidden

    def projected(part: str) -> tuple[LayerSpec, LayerSpec]:
        weight = f"{name}.input.{part}", hidden, hidden, False, transformer.normal(model), "linear"
        return transformer.norm_layer(f"{name}.input.{part}_norm", model), transformer.linear_layer(*weight)

    tokens = LayerSpec(f"{name}.input.tokens", "embedding", vocab, hidden, tied=transformer.TIED[1])
    layers = (*projected("hidden"), tokens, *projected("token"))
    block = _block(f"{name}.layer", model.layers + depth, model)
    return (
        BlockSpec(f"{name}.input", "embedding", layers, 4.0 * hidden * hidden * model.seq, follows=depth > 0),
        replace(block, layers=(*block.layers, transformer.norm_layer(f"{name}.layer.norm", model)), follows=True),
    )


def _block(name: str, index: int, model: ModelConfig) -> BlockSpec:
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
