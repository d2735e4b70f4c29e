"""X (rows x inner) by W (inner x columns) as a spec, so that its plans are checked like any. Torch-free."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError
from parallelrun.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec, too_small

WEIGHT = "product.weight"


def make(config: Config, vocab: int) -> ModelSpec:
    """One block, one column layer; its sample is X, which the lesson cuts. `vocab` is unread. Raises ConfigError."""
    model = config.model
    sizes = {"rows": model.rows, "inner": model.inner, "columns": model.columns}
    problems = too_small(sizes)
    if problems:
        raise ConfigError(*problems)
    weight = ParameterSpec(WEIGHT, (model.columns, model.inner), Initialiser("normal", 1.0), "columns")
    layer = LayerSpec("product", "columns", model.inner, model.columns, (weight,))
    flops = 2.0 * model.rows * model.inner * model.columns
    return ModelSpec(
        name=model.preset,
        kind="features",
        blocks=(BlockSpec("product", "product", (layer,), flops, saved_elements=float(model.rows * model.inner)),),
        sample_shape=(model.rows, model.inner),
        boundary_shape=(model.rows, model.inner),
        targets_per_sample=model.rows,
        vocab=model.columns,
        num_layers=1,
    )
