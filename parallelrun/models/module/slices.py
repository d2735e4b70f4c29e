"""Sequence parallel for a user's module: may each rank hold a slice of the sequence between role layers?

Column layers and the head gather the sequence, row layers and the embedding scatter it. What stands between a scatter
and a gather (norms, residuals, dropout, activations) must give the same whatever slice it sees. A module does not say
so; so it is tried, with real numbers and in one process: each rank's slice goes through the module, and at every
gather it must be that slice of what the whole sequence gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, Problem
from parallelrun.models.module import source

KEY = "strategy.tensor.sequence_parallel"
GATHERS, SCATTERS = ("columns", "head"), ("row", "embedding")


class _Different(Exception):
    """A rank's slice is not that slice of the whole."""


def check(config: Config, vocab: int, seq: int) -> None:
    """Raise ConfigError (`undefined`) naming the layer before which a slice of the sequence is not enough."""
    num_slices = config.tp or 2
    if seq % num_slices:
        return  # the tensor strategy says so, with the nearest legal sizes
    with torch.device("cpu"):
        module = source.build(config, vocab)
        source.apply_roles(module, config, torch.float64)
    module.double().eval()
    tokens = (torch.arange(2 * seq).view(2, seq) * 7 + 3) % vocab
    size = seq // num_slices
    with torch.no_grad():
        seen, out = _run_whole(module, tokens)
        for start in range(0, seq, size):
            entered = [""]
            run = _Slice(seen, slice(start, start + size), entered)
            try:
                found = run(module, tokens)
            except Exception as error:  # the user's code: whatever it raises
                raise _refused(config, f"at {entered[-1] or 'its beginning'}: {error}") from error
            if found.shape != out.shape or not torch.allclose(found, out, rtol=1e-9, atol=1e-12):
                raise _refused(config, "behind its last role layer, which should be the head")


def _refused(config: Config, where: str) -> ConfigError:
    what = (
        f"{KEY}=true: {config.model.source} does not give the same for a slice of the sequence as for the whole, "
        f"{where}"
    )
    fix = f"layer roles for all that mixes or numbers positions, or {KEY}=false"
    return ConfigError(Problem(what, KEY, fix, kind="undefined"))


def _roles(module: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in module.named_modules() if getattr(part, "layer_role", "")}


def _run_whole(module: nn.Module, tokens: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
    """(the inputs of every role layer, call by call; the output)."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0]))
        for name, part in _roles(module).items()
    ]
    out = module(tokens)
    for hook in hooks:
        hook.remove()
    return seen, out


class _Slice:
    """The module as one rank of sequence parallel runs it; what other ranks would send is taken from the whole run."""

    def __init__(self, seen: dict[str, list[Tensor]], part: slice, entered: list[str]):
        self._seen, self._part, self._entered = seen, part, entered
        self._calls: dict[str, int] = defaultdict(int)

    def __call__(self, module: nn.Module, tokens: Tensor) -> Tensor:
        layers: dict[str, Any] = _roles(module)
        hooks = [
            part.register_forward_pre_hook(lambda *_, name=name: self._entered.append(name))
            for name, part in module.named_modules()
        ]
        for name, layer in layers.items():
            layer.forward = self._form(name, layer)
        try:
            return module(tokens)
        finally:
            for layer in layers.values():
                del layer.forward
            for hook in hooks:
                hook.remove()

    def _form(self, name: str, layer: Any) -> Callable[..., Any]:
        original = layer.forward

        def gather(x: Tensor) -> Any:
            return original(self._same(name, x, self._whole(name)[:, self._part]))

        def scatter(x: Tensor) -> Tensor:
            return original(self._same(name, x, self._whole(name)))[:, self._part]

        def place(x: Tensor) -> Tensor:
            return x + layer.weight[self._part]

        if layer.layer_role in GATHERS:
            return gather
        if layer.layer_role in SCATTERS:
            return scatter
        return place if layer.layer_role == "position" else original

    def _whole(self, name: str) -> Tensor:
        number = self._calls[name]
        self._calls[name] += 1
        return self._seen[name][number]

    def _same(self, name: str, found: Tensor, expected: Tensor) -> Tensor:
        """The whole input, if what was found is the part of it that was expected."""
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
            raise _Different(f"what reaches {name} differs")
        return self._seen[name][self._calls[name] - 1]
