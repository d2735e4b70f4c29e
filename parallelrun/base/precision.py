"""The precision table, the same for every strategy and for one device.

Parameters are stored and updated in `stored`, and rounded to `compute` where they are used (a data strategy may keep
them rounded and store those that it updates: `DataStrategy.weight_dtype`); activations and their communication are
in `compute`; gradients are reduced in `reduce`; norms, softmax and loss compute in `accurate`. There is no autocast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

AUTO = "auto"  # bf16 on GPUs that are fastest in it, else fp32 (planner.resolve.default_precision)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Precision:
    """dtype names as in torch. scaled: the loop scales the loss and skips overflowing steps (fp16). others: the
    precision of everything else where only linear layers of blocks multiply in fp8 (`models.float8`). rounding: how
    weights that are stored in `compute` alone are rounded after each update (`optimizer.rounding`)."""

    name: str
    stored: str
    compute: str
    reduce: str
    accurate: str
    scaled: bool = False
    others: str = ""
    rounding: str = ""

    def rounded(self, how: str) -> Precision:
        """With weights and their gradients in the compute dtype alone, unless `how` updates are rounded is none."""
        narrow = self.compute
        return self if how == "none" else replace(self, stored=narrow, reduce=narrow, rounding=how)


TABLE = {
    "fp64": Precision("fp64", "float64", "float64", "float64", "float64"),
    "fp32": Precision("fp32", "float32", "float32", "float32", "float32"),
    "bf16": Precision("bf16", "float32", "bfloat16", "float32", "float32"),
    "fp16": Precision("fp16", "float32", "float16", "float32", "float32", scaled=True),
}
TABLE["fp8"] = replace(TABLE["bf16"], name="fp8", others="bf16")
TABLE["fp8_fp64"] = replace(TABLE["fp64"], name="fp8_fp64", others="fp64")  # what verify compares
