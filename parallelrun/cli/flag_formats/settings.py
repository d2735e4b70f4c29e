"""A setting of another runner, and the functions that a table names: those that read a written value, and those that
compute a value from several settings (`call`), which get the row's value and the translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallelrun.config.values import BOOLEANS

if TYPE_CHECKING:
    from parallelrun.cli.flag_formats.table import Translation

_MICRO, _ACCUMULATED = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Setting:
    """One setting of the other runner. where: the file; empty for a default of that runner."""

    name: str
    value: Any
    where: str = ""

    @property
    def text(self) -> str:
        """As it is written, for messages."""
        value = " ".join(map(str, self.value)) if isinstance(self.value, list) else self.value
        if self.name.startswith(("-", "$")):
            return self.name if value is True else f"{self.name} {'not given' if value is False else value}"
        return f"{self.name} = {str(value).lower() if isinstance(value, bool) else value}"


class NoCounterpart(Exception):
    """A value that parallelrun has nothing for; its text says why."""


class LeftOpen(Exception):
    """A setting that does not decide its key; its text says why."""


def number(value: Any) -> float:
    """A number; `1_000` is one, too."""
    try:
        return float("" if isinstance(value, bool) else str(value))
    except ValueError:
        raise ValueError("not a number") from None


def whole(value: Any) -> int:
    """A whole number; `1e3` is one, too."""
    count = number(value)
    if not count.is_integer():
        raise ValueError("not a whole number")
    return int(count)


def power_of_two(value: Any) -> float:
    return 2.0 ** whole(value)


def text(value: Any) -> str:
    if isinstance(value, (list, dict, bool)):
        raise ValueError("not one text")
    return str(value)


def anything(value: Any) -> Any:
    """The value as it is, which may also be set outside the file."""
    return value


def one_path(value: Any) -> str:
    if isinstance(value, list):
        raise NoCounterpart("a mixture of several files")
    if "$" in str(value):
        raise NoCounterpart("it is set outside the file")
    return text(value)


def flag(value: Any) -> bool:
    """A switch, which may be written as a word."""
    states = {**BOOLEANS, "1": True, "0": False}
    if str(value).lower() not in states:
        raise ValueError("not true or false")
    return states[str(value).lower()]


def choice(options: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """The reader of one of several words, in either case; or of a switch, if `options` are {on: ..., off: ...}."""
    if True in options:
        return lambda value: options.get(flag(value))
    lowered = {name.lower(): option for name, option in options.items()}

    def read(value: Any) -> Any:
        if str(value).lower() not in lowered:
            raise NoCounterpart(f"only {', '.join(options)} can be translated")
        return lowered[str(value).lower()]

    return read


def betas(beta2: float, run: Translation) -> list[float]:
    beta1 = run["--adam-beta1"]
    return [run["optimizer.beta1"] if beta1 is None else beta1, beta2]


def dp_of_deepspeed(total: int, run: Translation) -> int:
    micro, accumulated = run[_MICRO], run[_ACCUMULATED]
    if total < micro * accumulated or total % (micro * accumulated):
        raise ValueError(f"not a multiple of {_MICRO} = {micro} times {_ACCUMULATED} = {accumulated}")
    return int(total // (micro * accumulated))


def dp_of_megatron(_: int, run: Translation) -> int:
    """From the launcher's world size; torchrun's own defaults are 1."""
    tp, pp, cp = (run[f"--{axis}-parallel-size"] or 1 for axis in ("tensor-model", "pipeline-model", "context"))
    world = (run["--nproc-per-node"] or 1) * (run["--nnodes"] or 1)
    if world % (tp * pp * cp):
        axes = "tp x pp" if cp == 1 else "tp x pp x cp"
        raise ValueError(f"{world} ranks are not a multiple of {axes} = {tp * pp * cp}")
    return int(world // (tp * pp * cp))


def min_lr_ratio(min_lr: float, run: Translation) -> float:
    if min_lr and not run["--lr"]:
        raise LeftOpen("it is a share of --lr, which is not known")
    return round(min_lr / run["--lr"], 12) if min_lr else 0


def share_of_decay(share: float, run: Translation) -> int:
    """Without an end of its own, the decay ends with the last step."""
    last = run["--lr-decay-iters"] or run.values.get("steps")
    if not last:
        raise LeftOpen("the number of steps is not known")
    warmup: int = round(share * last)
    return warmup


def ffn_of_swiglu(_: str, run: Translation) -> int:
    return int(4 * run["--hidden-size"] * 2 / 3) // 64 * 64  # as Megatron-LM's arguments.py does


def virtual_stages(layers_each: int, run: Translation) -> int | None:
    pp, layers = run["--pipeline-model-parallel-size"] or 1, run["--num-layers"] or 1
    if pp == 1 or not layers_each or layers % (pp * layers_each):
        raise ValueError(f"{layers} layers are not {pp} ranks times whole virtual stages of so many")
    return layers // (pp * layers_each) if layers > pp * layers_each else None
