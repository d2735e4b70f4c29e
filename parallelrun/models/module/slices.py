"""Sequence parallelism for a user's module: may each rank hold a slice of the sequence between role layers?

Column-parallel layers and the head gather the sequence; row-parallel layers and the embedding scatter it. The layers
between a scatter and a gather (norms, residuals, dropout, activations) must give the same result on a slice as on the
full sequence. That is tested with real numbers, in one process: each rank's slice goes through the module, and at every
gather it must equal that slice of the result on the full sequence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.model_schema import LoraConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import layers
from parallelrun.models.module import source

KEY = "strategy.tensor.sequence_parallel"
GATHERS, SCATTERS = ("column_parallel", "head"), ("row_parallel", "embedding")


def check(config: Config, vocab: int, seq: int) -> None:
    """Raise ConfigError (`undefined`) naming the layer before which a slice gives another result."""
    num_slices = config.tp or 2
    if seq % num_slices:
        return  # the tensor strategy refuses this, with the nearest legal sizes
    config = replace(config, model=replace(config.model, lora=LoraConfig()))  # adapters act on each token alone
    module = source.build_with_roles(config, vocab, "cpu", torch.float64).double().eval()
    tokens = (torch.arange(2 * seq).view(2, seq) * 7 + 3) % vocab
    size = seq // num_slices
    with torch.no_grad():
        sliced = _SlicedModule(module)
        try:
            expected = sliced.run(tokens)
            parts = [sliced.run(tokens, slice(start, start + size)) for start in range(0, seq, size)]
        except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
            raise _refused(config, f"at {sliced.entered or 'its beginning'}: {error}") from error
    if not all(_equal(part, expected) for part in parts):
        raise _refused(config, "behind its last role layer, which should be the head")


def _refused(config: Config, where: str) -> ConfigError:
    compared = "the same for a slice of the sequence as for the full sequence"
    message = f"{KEY}=true: {source.builder_of(config).title(config)} does not give {compared}, {where}"
    fix = f"layer roles for all layers that mix or number positions, or {KEY}=false"
    return ConfigError(Problem(message, KEY, fix, kind="undefined"))


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)


class _SlicedModule:
    """Runs the module as one rank of sequence parallelism does; other ranks' slices are taken from an unsplit run.

    entered: the name of the module whose forward was called last.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._inputs: dict[str, list[Tensor]] = defaultdict(list)  # of the unsplit run, by layer and call
        self._calls: Counter[str] = Counter()
        self._part: slice | None = None
        self.entered = ""
        for name, layer in module.named_modules():
            layer.register_forward_pre_hook(partial(self._enter, name))
            layer.register_forward_hook(self._leave)

    def run(self, tokens: Tensor, part: slice | None = None) -> Tensor:
        """The output; of the layers between scatters and gathers only the `part` of the sequence. The first run is
        unsplit."""
        self._part = part
        self._calls.clear()
        out: Tensor = self._module(tokens)
        return out

    def _enter(self, name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> Tensor | None:
        """Gather the layer's input, if its role says so. Raises ValueError naming the layer if the input differs."""
        self.entered = name
        role = layers.role_of(layer)
        if role not in GATHERS + SCATTERS:
            return None
        if self._part is None:
            self._inputs[name].append(arguments[0])
            return None
        unsplit = self._inputs[name][self._calls[name]]
        self._calls[name] += 1
        if not _equal(arguments[0], unsplit[:, self._part] if role in GATHERS else unsplit):
            raise ValueError(f"what reaches {name} differs")
        return unsplit

    def _leave(self, layer: Any, arguments: tuple[Any, ...], out: Tensor) -> Tensor | None:
        """Scatter the layer's output, if its role says so."""
        role = layers.role_of(layer)
        if self._part is None:
            return None
        if role == "position_embedding":
            return arguments[0] + layer.weight[self._part]  # type: ignore[no-any-return]
        return out[:, self._part] if role in SCATTERS else None
