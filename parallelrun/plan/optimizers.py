"""What is known of each optimizer without torch: the keys it reads and the state it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallelrun.config.schema import OptimizerConfig


@dataclass(frozen=True)
class OptimizerKind:
    """own_keys: the keys of `optimizer` that not every optimizer reads. num_states: tensors of state per weight.
    state_names: torch's names of what it keeps of a weight, where it keeps anything."""

    own_keys: tuple[str, ...]
    state_names: frozenset[str]
    num_states: Callable[[OptimizerConfig], int]


OPTIMIZERS = {
    "adamw": OptimizerKind(("betas", "eps"), frozenset({"step", "exp_avg", "exp_avg_sq"}), lambda config: 2),
    "sgd": OptimizerKind(("momentum",), frozenset({"momentum_buffer"}), lambda config: int(config.momentum > 0)),
    "adagrad": OptimizerKind(("eps",), frozenset({"step", "sum"}), lambda config: 1),
}


def readers(key: str) -> str:
    """The optimizers that read a key, as a user would choose one: `optimizer=adamw or optimizer=adagrad`."""
    return " or ".join(f"optimizer={name}" for name, kind in OPTIMIZERS.items() if key in kind.own_keys)
