"""What is known of each optimizer without torch: the keys it reads and the state it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallelrun.config.schema import OptimizerConfig


@dataclass(frozen=True)
class OptimizerKind:
    """own_keys: the keys of `optimizer` that not every optimizer reads. num_states: tensors of state per weight."""

    own_keys: tuple[str, ...]
    num_states: Callable[[OptimizerConfig], int]


OPTIMIZERS = {
    "adamw": OptimizerKind(("betas", "eps"), lambda config: 2),
    "sgd": OptimizerKind(("momentum",), lambda config: int(config.momentum > 0)),
    "adagrad": OptimizerKind(("eps",), lambda config: 1),
}


def readers(key: str) -> str:
    """The optimizers that read a key, as a user would choose one: `optimizer=adamw or optimizer=adagrad`."""
    return " or ".join(f"optimizer={name}" for name, kind in OPTIMIZERS.items() if key in kind.own_keys)
