"""The metrics of runs: the name of each on screens, pages and axes, and how its numbers are written."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.report.figures import bytes_text, digits, seconds_text

SECONDS, BYTES, RATE, SHARE, DAYS, NUMBER = "seconds", "bytes", "rate", "share", "days", "number"


@dataclass(frozen=True)
class Metric:
    """label: in comparisons and on axes; column: the title of a table's column, the label if empty; unit: of the
    constants above, empty if the key names it (see `unit_of`)."""

    label: str
    column: str = ""
    unit: str = ""

    @property
    def title(self) -> str:
        return self.column or self.label


# In the order in which they are shown. Keys of metrics.jsonl, summary.json, bench.json, verify.json and of plans.
METRICS = {
    "loss": Metric("training loss", "loss"),
    "val_loss": Metric("validation loss", "val loss"),
    "val_top1": Metric("top-1 accuracy", "top-1"),
    "lr": Metric("learning rate"),
    "grad_norm": Metric("gradient norm"),
    "step_time_median_s": Metric("step time, median", "step time"),
    "median_s": Metric("step time, median", "step time"),
    "step_time_p95_s": Metric("step time, 95th percentile"),
    "p95_s": Metric("step time, 95th percentile"),
    "predicted.step_s": Metric("predicted step time", "predicted"),
    "step_time_predicted_s": Metric("predicted step time"),
    "tokens_per_s": Metric("tokens/s"),
    "samples_per_s": Metric("samples/s"),
    "compute_s": Metric("computing"),
    "comm_exposed_s": Metric("waiting to communicate"),
    "bubble_s": Metric("pipeline bubble"),
    "data_s": Metric("waiting for data", "data"),
    "optimizer_s": Metric("optimizer"),
    "bubble_predicted": Metric("predicted bubble", unit=SHARE),
    "efficiency": Metric("efficiency", unit=SHARE),
    "training_days": Metric("days of training", "days", DAYS),
    "training_price": Metric("price of training", "price", RATE),
    "peak_memory_bytes": Metric("peak memory of a rank", "peak memory"),
    "memory_bytes": Metric("memory of the largest rank", "memory"),
    "fits": Metric("fits"),
    "wire_bytes_per_step": Metric("bytes sent in a step", "sent a step"),
    "max_vio": Metric("MaxVio of experts", "max vio"),
    "drop_rate": Metric("dropped assignments", "dropped"),
    "staleness_mean": Metric("staleness, mean"),
    "passed": Metric("verified"),
    "max_error.loss": Metric("error of the losses"),
    "max_error.grads": Metric("error of the gradients"),
    "max_error.params": Metric("error of the updates", "error"),
}
_SUFFIXES = {"_per_s": RATE, "_s": SECONDS}


def label_of(key: str) -> str:
    """Return the label of a metric, and the key itself of any other result."""
    return METRICS[key].label if key in METRICS else key


def unit_of(key: str) -> str:
    """Return the unit of a result: that of its metric, else the one that its key names, else NUMBER."""
    if key in METRICS and METRICS[key].unit:
        return METRICS[key].unit
    if "bytes" in key:
        return BYTES
    return next((unit for suffix, unit in _SUFFIXES.items() if key.endswith(suffix)), NUMBER)


def metric_text(key: str, value: float, significant: int = 3) -> str:
    """Return a result for people, with its unit, in at least so many significant digits."""
    match unit_of(key):
        case "bytes":
            return bytes_text(value, significant)
        case "seconds":
            return seconds_text(value, significant)
        case "rate":
            return f"{value:,.0f}" if value >= 100 and significant == 3 else digits(value, significant)
        case "share":
            return f"{value:.{significant - 3}%}"
        case "days":
            return digits(value, significant)
    return f"{value:.{significant + 3}g}"
