"""Sequence parallelism for a user's module: may each rank hold a slice of the sequence between role layers?

Column-parallel layers and the head gather the sequence; row-parallel layers and the embedding scatter it. The layers
between a scatter and a gather (norms, residuals, dropout, activations) must give the same result on a slice as on the
full sequence. That is tested with real numbers, in one process: each rank's slice goes through the module, and at every
gather it must equal that slice of the result on the full sequence.
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
GATHERS, SCATTERS = ("column_parallel", "head"), ("row_parallel", "embedding")


def check(config: Config, vocab: int, seq: int) -> None:
    """Raise ConfigError (`undefined`) naming the layer before which a slice gives another result."""
    num_slices = config.tp or 2
    if seq % num_slices:
        return  # the tensor strategy refuses this, with the nearest legal sizes
    with torch.device("cpu"):
        module = source.build(config, vocab)
        source.apply_roles(module, config, torch.float64)
    module.double().eval()
    tokens = (torch.arange(2 * seq).view(2, seq) * 7 + 3) % vocab
    size = seq // num_slices
    with torch.no_grad():
        inputs, expected = _run_unsplit(module, tokens)
        for start in range(0, seq, size):
            run = _SliceRun(inputs, slice(start, start + size))
            try:
                found = run(module, tokens)
            except Exception as error:  # the user's code may raise anything
                raise _refused(config, f"at {run.entered or 'its beginning'}: {error}") from error
            if not _equal(found, expected):
                raise _refused(config, "behind its last role layer, which should be the head")


def _refused(config: Config, where: str) -> ConfigError:
    compared = "the same for a slice of the sequence as for the full sequence"
    what = f"{KEY}=true: {config.model.source} does not give {compared}, {where}"
    fix = f"layer roles for all layers that mix or number positions, or {KEY}=false"
    return ConfigError(Problem(what, KEY, fix, kind="undefined"))


def _equal(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def _role_layers(module: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in module.named_modules() if getattr(part, "layer_role", "")}


def _run_unsplit(module: nn.Module, tokens: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
    """(the inputs of every role layer, call by call; the output)."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0]))
        for name, part in _role_layers(module).items()
    ]
    out = module(tokens)
    for hook in hooks:
        hook.remove()
    return seen, out


class _SliceRun:
    """Runs the module as one rank of sequence parallelism does; other ranks' slices are taken from the unsplit run.

    entered: the name of the module whose forward was called last.
    """

    def __init__(self, inputs: dict[str, list[Tensor]], part: slice):
        self._inputs, self._part = inputs, part
        self._calls: dict[str, int] = defaultdict(int)
        self.entered = ""

    def __call__(self, module: nn.Module, tokens: Tensor) -> Tensor:
        layers: dict[str, Any] = _role_layers(module)
        hooks = [
            part.register_forward_pre_hook(lambda *_, name=name: setattr(self, "entered", name))
            for name, part in module.named_modules()
        ]
        for name, layer in layers.items():
            layer.forward = self._forward_of(name, layer)
        try:
            out: Tensor = module(tokens)
            return out
        finally:
            for layer in layers.values():
                del layer.forward
            for hook in hooks:
                hook.remove()

    def _forward_of(self, name: str, layer: Any) -> Callable[..., Any]:
        original, part = layer.forward, self._part
        if layer.layer_role in GATHERS:
            return lambda x: original(self._gathered(name, x, part))
        if layer.layer_role in SCATTERS:
            return lambda x: original(self._gathered(name, x, slice(None)))[:, part]
        if layer.layer_role == "position_embedding":
            return lambda x: x + layer.weight[part]
        return original  # type: ignore[no-any-return]

    def _gathered(self, name: str, x: Tensor, part: slice) -> Tensor:
        """The layer's input in the unsplit run, if x equals its `part`. Raises ValueError naming the layer."""
        unsplit = self._inputs[name][self._calls[name]]
        self._calls[name] += 1
        if not _equal(x, unsplit[:, part]):
            raise ValueError(f"what reaches {name} differs")
        return unsplit
