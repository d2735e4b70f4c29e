"""The blocks, layers, parameters and FLOPs of an mlp. `network.py` builds the same parameters."""

from __future__ import annotations

from math import sqrt

from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import GATED, BlockSpec, Initialiser, ModelSpec


class MlpDefinition(ModelDefinition):
    """Blocks `embedding` (when it reads tokens), `layers.0` ..., `head`."""

    own_keys = transformer.TEXT_KEYS | {"logit_softcap"}

    def make(self, config: Config, vocab: int) -> ModelSpec:
        model = config.model
        tokens = "features" not in definitions.dataset(config).sample_kinds(config)  # features of images: their pixels
        rows, shape = (model.seq, (model.seq,)) if tokens else (1, ())
        tied = tokens and model.tied_embeddings
        embedding = transformer.embedding_layers(model, vocab)[:1]  # no positions: each token is seen by itself
        blocks = [BlockSpec("embedding", "embedding", tuple(embedding), 0.0, saved_elements=0.0)] if tokens else []
        blocks += [_block(f"layers.{index}", model, rows) for index in range(model.layers)]
        return ModelSpec(
            name=model.preset,
            kind="tokens" if tokens else "features",
            blocks=(*blocks, _head(model, vocab, rows, tied)),
            sample_shape=shape or (model.hidden,),
            boundary_shape=(*shape, model.hidden),
            targets_per_sample=rows,
            vocab=vocab,
            hidden=model.hidden,
            ffn=transformer.ffn_size(model),
            seq=model.seq if tokens else 0,
            num_layers=model.layers,
            z_loss=model.z_loss,
            activation=model.activation,
            norm=model.norm,
            logit_softcap=model.logit_softcap,
            tied=(transformer.TIED,) if tied else (),
        )


def _block(name: str, model: ModelConfig, rows: int) -> BlockSpec:
    ffn = transformer.ffn_size(model)
    # Fan-in scaled (LeCun et al. 1998), the last of each residual branch by depth too, as in the gpt.
    inner = Initialiser("normal", 1 / sqrt(model.hidden))
    outer = Initialiser("normal", 1 / sqrt(ffn * 2 * model.layers))
    up, down, dropout = transformer.mlp_layers(f"{name}.mlp", model, inner, outer)
    products = up.in_features * up.out_features + down.in_features * down.out_features
    # gate, up and what swiglu makes of them; relu(up); or up and gelu(up)
    inside = 3 if model.activation in GATED else 1 if model.activation == "relu" else 2
    return BlockSpec(
        name,
        "mlp",
        (transformer.norm_layer(f"{name}.mlp_norm", model), up, down, dropout),
        forward_flops=2.0 * products * rows,
        saved_elements=float(rows * (2 * model.hidden + inside * ffn)),
    )


def _head(model: ModelConfig, vocab: int, rows: int, tied: bool) -> BlockSpec:
    layers = (transformer.norm_layer("head.norm", model), transformer.head_layer(model, vocab, tied))
    flops = 2.0 * model.hidden * vocab * rows
    return BlockSpec("head", "head", layers, flops, saved_elements=float(rows * (2 * model.hidden + 2 * vocab)))


MODEL = MlpDefinition()
