"""A module whose stages run its own forward: absent blocks are replaced, and masks, positions and tables that the
forward makes are made again by every stage."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.distributed import torch_private
from parallelrun.models import documents as packed
from parallelrun.models import dropout, recompute
from parallelrun.models.module.double import StayDouble
from parallelrun.models.module.outputs import logits_of, undefined
from parallelrun.models.network import Network
from parallelrun.planner.model.model_spec import ModelSpec

ROOT = "module"  # the name of the user's module in the network
READS_VALUES = (
    "__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero",
    "item", "numpy", "tolist",
)  # fmt: skip


@dataclass(frozen=True)
class OwnForward:
    """How a module's forward is divided, by names of its modules. names: those with parameters, in the order of
    forward: before the blocks, the blocks, and behind them; before: those that only the first stage runs, with
    parameters or without; followers: those of `names` at which no stage begins."""

    names: tuple[str, ...]
    before: tuple[str, ...]
    followers: frozenset[str]


WHOLE = OwnForward(("",), (), frozenset())  # one block: the module


class AbsentTensor(Tensor):
    """What another stage has computed, or reads: it has a shape, and no values. What a stage computes from it is
    absent too, so that it cannot pass for a result."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name in READS_VALUES:
            raise undefined("forward reads values that only another stage has", "pp=1", "pp")
        target = (kwargs or {}).get("out", args[0] if _is_in_place(name) else None)
        if target is not None:
            if not isinstance(target, cls):
                raise undefined("forward writes what only another stage has into a tensor, in place", "pp=1", "pp")
            return target
        return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]


def _is_in_place(function: str) -> bool:
    """Whether a function of that name changes its first argument: `add_`, `x += y`, `x[i] = y`."""
    operator = function.startswith("__i") and function != "__invert__"  # __int__ and __index__ read values
    return operator or function == "__setitem__" or (function.endswith("_") and not function.endswith("__"))


def absent(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an absent tensor on the device of `like`, without memory."""
    zero = torch.zeros((), dtype=dtype or like.dtype, device=like.device)
    return zero.expand(tuple(shape)).as_subclass(AbsentTensor)


class _StageEnds(Exception):
    """Raised by the first absent block behind a stage's own: its result is there."""


class StandIn(nn.Module):
    """In place of a module that another stage runs: it returns `answer(name)`. Other attributes are the module's; the
    tensors and modules among them are absent too."""

    def __init__(self, source: nn.Module, name: str, answer: Callable[[str], Any]):
        super().__init__()
        self.__dict__.update(source=source, name=name, answer=answer)  # a submodule's weights would be this stage's

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["source"], name)
        if isinstance(value, nn.Module):
            return StandIn(value, f"{self.name}.{name}", self.answer)
        return absent(value.shape, value) if isinstance(value, Tensor) else value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.answer(self.name)


class OwnForwardNetwork(Network):
    """A network that calls the module. On a stage, the block in front of its first one returns what the stage has
    received, and forward ends behind its last one."""

    def __init__(self, spec: ModelSpec, loss: nn.Module, module: nn.Module, how: OwnForward):
        super().__init__(spec, loss)
        self.module = module
        self.how = how
        self._order = self.block_names
        self._elsewhere: dict[str, nn.Parameter] = {}  # by path: those of modules around blocks that others hold
        self._received: Tensor | None = None
        self._result: list[tuple[Tensor, int]] = []  # of the last block, with the number of its changes

    def keep(self, blocks: Sequence[str]) -> Network:
        self._hold(blocks)
        return self

    def split(self, parts: Sequence[Sequence[str]]) -> list[Network]:
        if self.before_split is not None:
            self.before_split()
        stages: list[Network] = []
        for blocks in parts:
            stage = OwnForwardNetwork(self.spec, self.loss, self.module, self.how)
            stage.recompute, stage.training, stage.own_values = self.recompute, self.training, self.own_values
            stage.rounds_weights, stage.host, stage._elsewhere = self.rounds_weights, self.host, dict(self._elsewhere)
            stage._hold(blocks)
            if stage.recompute != "none":
                stage._recompute()
            if not stage._is_last:
                stage.block(stage.block_names[-1]).register_forward_hook(stage._remember)
            stages.append(stage)
        return stages

    def forward(self, x: Tensor, sample_ids: Any = None, documents: Any = None, ahead: Tensor | None = None) -> Tensor:
        inputs, last = x, self.block_names[-1]
        for path, parameter in self._elsewhere.items():
            around, _, key = path.rpartition(".")
            self.module.get_submodule(around).__dict__[key] = absent(parameter.shape, x, parameter.dtype)
        if not self._is_first:
            self._received = self._like = x
            dtype = torch.int64 if self.spec.kind == "tokens" else x.dtype
            inputs = absent((x.size(0), *self.spec.sample_shape), x, dtype)
        with self._rounding(), dropout.scope(sample_ids), packed.scope(documents), suppress(_StageEnds):
            out = self.module(inputs)
        if not self._is_last:
            out, changes = self._result.pop() if self._result else (None, 0)
            if out is not None and torch_private.num_changes(out) > changes:
                raise undefined(f"forward changes what {last} returns, in place", "x = x + ..., not x += ...", "pp")
        if out is None or self._received is not None:
            message = f"forward does not call {last} behind the modules in front of it, and in front of those behind it"
            raise undefined(f"{message}: model.before names what runs before the blocks", "leave model.blocks out")
        if isinstance(out, AbsentTensor):
            message = f"{last} or what runs before it reads more of earlier stages, or of the inputs, than one tensor"
            raise undefined(f"forward cannot be cut: {message}", "pp=1", "pp")
        result: Tensor = logits_of(out)
        return result

    @property
    def _is_first(self) -> bool:
        return self.block_names[0] == self._order[0]

    @property
    def _is_last(self) -> bool:
        return self.block_names[-1] == self._order[-1]

    def _hold(self, blocks: Sequence[str]) -> None:
        super()._hold(blocks)
        names = {name for name in self._order if name not in blocks}
        if not self._is_first:
            names.update(f"{ROOT}.{name}" for name in self.how.before)
        names.update(name for block in self.spec.blocks if block.name not in blocks for name in block.outside)
        names.update(copy for copy, original in self.spec.tied if original in names)
        paths = {name.removeprefix(f"{ROOT}.") for name in names}
        self.module = _with_stand_ins(self.module, paths, self._answer, self._elsewhere)

    def _answer(self, name: str) -> Any:
        """What the absent module `name` returns."""
        order, full = self._order, f"{ROOT}.{name}"
        if full in order[order.index(self.block_names[-1]) + 1 :]:
            raise _StageEnds
        shape = self.spec.block(full).output_shape if full in order else None
        shape = shape or tuple(self._like.shape)
        elsewhere = absent((self._like.size(0), *shape[1:]) if shape[0] == 1 else shape, self._like)
        result: Tensor | None = elsewhere
        if full == order[order.index(self.block_names[0]) - 1]:
            result, self._received = self._received, None
            if result is None:
                raise undefined(f"forward calls {name} twice, and a stage is run through once", "pp=1", "pp")
        others = self.spec.block(full).num_outputs - 1 if full in order else -1
        return (result, *(elsewhere,) * others) if others >= 0 else result

    def _remember(self, block: nn.Module, inputs: Any, out: Any) -> None:
        """Forward hook of the last block of a stage."""
        x = logits_of(out)
        self._result[:] = [(x, torch_private.num_changes(x))]

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
        return recompute.run(run, hidden, dropout.current_sample_ids(), self.recompute, host=self.host)


def _with_stand_ins(
    module: nn.Module, names: Collection[str], answer: Callable[[str], Any],
    elsewhere: dict[str, nn.Parameter], at: str = "",
) -> nn.Module:  # fmt: skip
    """A copy of `module` that shares all but the modules on the way to those of `names`, which return `answer(name)`.
    It lacks the parameters of `names`, which are added to `elsewhere`."""
    if not names:
        return module
    clone = copy.copy(module)
    clone._modules, clone._parameters = dict(module._modules), dict(module._parameters)
    for name, parameter in module._parameters.items():
        if parameter is not None and f"{at}{name}" in names:
            elsewhere[f"{at}{name}"] = parameter
            del clone._parameters[name]
    for name, child in module._modules.items():
        path = f"{at}{name}"
        if child is not None and path in names:
            clone._modules[name] = StandIn(child, path, answer)
        elif child is not None:
            below = {other for other in names if other.startswith(f"{path}.")}
            clone._modules[name] = _with_stand_ins(child, below, answer, elsewhere, f"{path}.")
    return clone
