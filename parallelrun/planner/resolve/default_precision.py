"""The number format of a run for which none was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parallelrun.base.precision import AUTO
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.degrees import device_of


def with_precision(config: Config, gpus: int | None) -> tuple[Config, list[str]]:
    """(`config` with the precision that `auto` stands for, a sentence if that is bf16); as it is where one was chosen.

    bf16 on GPUs, unless the cluster's peaks say that they are not faster in it (V100); else fp32, as verify, which has
    a precision of its own. gpus: of this host.
    """
    if config.precision.name != AUTO:
        return config, []
    peaks, is_fast = config.cluster.peak_tflops, device_of(config, gpus) == "cuda" and config.verb != "verify"
    if isinstance(peaks, Mapping):
        is_fast = is_fast and (peaks.get("bf16") or 0) > (peaks.get("fp32") or 0)
    text = "precision=bf16 (filled: on GPUs, fp32 master weights)"
    precision = replace(config.precision, name="bf16" if is_fast else "fp32")
    return replace(config, precision=precision), [text] if is_fast else []
