"""A module whose stages run its own forward: absent blocks pass their input on, and masks, positions and tables that
the forward makes are made again by every stage."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.models import documents as packed
from parallelrun.models import dropout, recompute
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.module.double import StayDouble
from parallelrun.models.module.outputs import logits_of
from parallelrun.models.network import Network
from parallelrun.planner.model.model_spec import ModelSpec

ROOT = "module"  # the name of the user's module in the network


@dataclass(frozen=True)
class OwnForward:
    """How a module's forward is run in parts. blocks: names of modules, in the order of forward; before: modules
    without parameters that only the first stage runs; inner: the module that maps a batch to the last block's output
    before the output layer; embeddings: the argument that takes the place of the token ids."""

    blocks: tuple[str, ...]
    before: tuple[str, ...] = ()
    inner: str = ""
    embeddings: str = "inputs_embeds"


class PassOn(nn.Module):
    """Stands for an absent block: returns its first argument. It has the plain attributes that a forward may read."""

    def __init__(self, source: nn.Module):
        super().__init__()
        for name, value in vars(source).items():
            if not name.startswith("_") and name not in self.__dict__ and not callable(value):
                self.__dict__[name] = value

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class OwnForwardNetwork(Network):
    """A network that calls the module, or the inner one where later blocks are absent."""

    def __init__(self, spec: ModelSpec, loss: nn.Module, module: nn.Module, how: OwnForward):
        super().__init__(spec, loss)
        self.module = module
        self.how = how

    def keep(self, blocks: Sequence[str]) -> Network:
        self.module = _with_blocks(self.module, self._absent(blocks))
        self._hold(blocks)
        return self

    def split(self, parts: Sequence[Sequence[str]]) -> list[Network]:
        if self.before_split is not None:
            self.before_split()
        stages: list[Network] = []
        for blocks in parts:
            stage = OwnForwardNetwork(self.spec, self.loss, _with_blocks(self.module, self._absent(blocks)), self.how)
            stage.recompute, stage.training, stage.own_values = self.recompute, self.training, self.own_values
            stage.rounds_weights = self.rounds_weights
            stage._hold(blocks)
            if stage.recompute != "none":
                stage._recompute()
            stages.append(stage)
        return stages

    def forward(self, x: Tensor, sample_ids: Tensor | None = None, documents: DocumentBounds | None = None) -> Tensor:
        every = [block.name for block in self.spec.blocks]
        module = self.module if every[-1] in self.block_names else self.module.get_submodule(self.how.inner)
        arguments = (x,) if every[0] in self.block_names else ()
        named = {} if arguments else {self.how.embeddings: x}
        with self._rounding(), dropout.scope(sample_ids), packed.scope(documents):
            out = module(*arguments, **named)
        hidden: Tensor | None = getattr(out, "last_hidden_state", None)
        result: Tensor = logits_of(out) if hidden is None else hidden
        return result

    def _absent(self, blocks: Collection[str]) -> set[str]:
        """The names in the module of what a stage with `blocks` does not run."""
        absent = {name for name in self.block_names if name not in blocks}
        if self.spec.blocks[0].name not in blocks:
            absent |= {f"{ROOT}.{name}" for name in self.how.before}
        return {name.removeprefix(f"{ROOT}.") for name in absent}

    def _recompute(self) -> None:
        """Make the blocks that may be computed again run as `recompute`, which a schedule may still change, says."""
        config: Any = getattr(self.module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a second forward would append its keys and values to the first's
        for name in self.recomputed:
            block = self.block(name)
            again = copy.copy(block)  # has its hooks, which round weights: a second forward calls them too
            block._forward_pre_hooks, block._forward_hooks = OrderedDict(), OrderedDict()
            block.forward = partial(self._run_block, again)

    def _run_block(self, block: nn.Module, hidden: Tensor, *more: Any, **named: Any) -> Tensor:
        def run(x: Tensor) -> Tensor:  # backward calls it outside of the module's forward
            with StayDouble() if x.dtype == torch.float64 else nullcontext():
                out: Tensor = block(x, *more, **named)
                return out

        block.training = self.training
        return recompute.run(run, hidden, dropout.current_sample_ids(), self.recompute)


def network_of(spec: ModelSpec, loss: nn.Module, module: nn.Module, how: OwnForward) -> Network:
    """Return the network of a module on its own forward."""
    prefixed = replace(how, blocks=tuple(f"{ROOT}.{name}" for name in how.blocks))
    return OwnForwardNetwork(spec, loss, module, prefixed)


def _with_blocks(module: nn.Module, absent: Collection[str]) -> nn.Module:
    """A copy of `module` that shares all but the modules on the way to `absent` ones, which pass their input on."""
    if not absent:
        return module
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    for name, child in module._modules.items():
        if child is None or isinstance(child, PassOn):
            continue
        below = {path.removeprefix(f"{name}.") for path in absent if path.startswith(f"{name}.")}
        clone._modules[name] = PassOn(child) if name in absent else _with_blocks(child, below)
    return clone
