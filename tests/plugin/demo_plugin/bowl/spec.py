"""The blocks, layers and parameters of a bowl, without torch."""

from __future__ import annotations

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec


class BowlDefinition(ModelDefinition):
    """Blocks `body` and `head`. The inside is twice `model.hidden`."""

    def make(self, config: Config, vocab: int) -> ModelSpec:
        hidden, normal = config.model.hidden, Initialiser("normal", 0.1)
        up = ParameterSpec("body.up.weight", (2 * hidden, hidden), normal, "column_parallel")
        down = ParameterSpec("body.down.weight", (hidden, 2 * hidden), normal, "row_parallel")
        head = ParameterSpec("head.weight", (vocab, hidden), normal, "head")
        body = (
            LayerSpec("body.up", "column_parallel", hidden, 2 * hidden, (up,)),
            LayerSpec("body.down", "row_parallel", 2 * hidden, hidden, (down,)),
        )
        return ModelSpec(
            name="bowl",
            kind="features",
            blocks=(
                BlockSpec("body", "mlp", body, forward_flops=8.0 * hidden**2, saved_elements=5.0 * hidden),
                BlockSpec(
                    "head",
                    "head",
                    (LayerSpec("head", "head", hidden, vocab, (head,)),),
                    forward_flops=2.0 * hidden * vocab,
                    saved_elements=hidden + 2.0 * vocab,
                ),
            ),
            sample_shape=(hidden,),
            boundary_shape=(hidden,),
            targets_per_sample=1,
            vocab=vocab,
            hidden=hidden,
            ffn=2 * hidden,
            num_layers=1,
            activation="relu",
        )


MODEL = BowlDefinition()
