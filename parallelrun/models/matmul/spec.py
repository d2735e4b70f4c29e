"""The product X (rows x inner) by W (inner x columns) as a spec, so that its plans are checked like any."""

from __future__ import annotations

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec

WEIGHT = "product.weight"


class MatmulDefinition(ModelDefinition):
    """One block with one column-parallel layer; its sample is X, which the lesson splits. `vocab` is unread."""

    own_keys = frozenset({"rows", "inner", "columns"})
    is_lesson = True

    def make(self, config: Config, vocab: int) -> ModelSpec:
        rows, inner, columns = config.model.rows, config.model.inner, config.model.columns
        weight = ParameterSpec(WEIGHT, (columns, inner), Initialiser("normal", 1.0), "column_parallel")
        layer = LayerSpec("product", "column_parallel", inner, columns, (weight,))
        flops = 2.0 * rows * inner * columns
        return ModelSpec(
            name=config.model.preset,
            kind="features",
            blocks=(BlockSpec("product", "product", (layer,), flops, saved_elements=float(rows * inner)),),
            sample_shape=(rows, inner),
            boundary_shape=(rows, inner),
            targets_per_sample=rows,
            vocab=columns,
            num_layers=1,
        )


MODEL = MatmulDefinition()
