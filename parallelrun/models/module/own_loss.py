"""`model.loss=./net.py:loss`: the user's own loss over a batch, instead of the cross-entropy of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.base import user_functions
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.order import derive_key

KEY = "model.loss"
_NOISE = 0x6E6F6973


@dataclass(frozen=True)
class LossBatch:
    """The samples over which `loss(module, batch)` is computed: a microbatch of one data replica, along dim 0.

    inputs: what the dataset yields, a tensor or a dict of tensors. targets: int64, None if the dataset yields none.
    sample_ids: int64 (n,), the global numbers of the samples, the same under every plan. `batch["name"]` is an entry
    of `inputs`.
    """

    inputs: Tensor | Mapping[str, Tensor]
    targets: Tensor | None
    sample_ids: Tensor
    seed: int

    def __len__(self) -> int:
        return self.sample_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return tensors_of(self.inputs)[0].device

    def __getitem__(self, name: str) -> Tensor:
        if isinstance(self.inputs, Tensor):
            raise TypeError(f"the dataset yields tensors, which have no entry {name!r}: use batch.inputs")
        return self.inputs[name]

    def generators(self, stream: int = 0) -> list[torch.Generator]:
        """Return a CPU generator for each sample, keyed by the run's seed, the sample and `stream`. What they draw is
        the same under every plan."""
        keys = [derive_key(self.seed, _NOISE, stream, number) for number in self.sample_ids.tolist()]
        return [torch.Generator().manual_seed(key % 2**63) for key in keys]

    def randn(self, *shape: int, stream: int = 0) -> Tensor:
        """Return normal noise (n, *shape), the same under every plan. Two calls with one `stream` return the same."""
        rows = [torch.randn(shape, generator=generator) for generator in self.generators(stream)]
        return torch.stack(rows).to(self.device)

    def rand(self, *shape: int, stream: int = 1) -> Tensor:
        """Return numbers from [0, 1) of shape (n, *shape), the same under every plan."""
        rows = [torch.rand(shape, generator=generator) for generator in self.generators(stream)]
        return torch.stack(rows).to(self.device)


def tensors_of(inputs: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors of a batch's inputs."""
    return [inputs] if isinstance(inputs, Tensor) else [*inputs.values()]


class _Module:
    """The user's module inside its own loss: a call runs its forward without the hooks of the step around it."""

    def __init__(self, module: nn.Module):
        self._module, self._forward = module, module.forward

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._module)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class OwnLoss(nn.Module):
    """The loss of a network whose only block returns fp64 (2,): the summed loss, and what it is divided by."""

    def forward(self, output: Tensor, targets: Tensor | None) -> Tensor:
        return output[0]


def install(module: nn.Module, config: Config) -> None:
    """Make a call of the module map a batch of the reader to the sum and the count of `model.loss`."""
    function = user_functions.load(KEY, config.model.loss)
    plain = _Module(module)

    def forward(batch: Any) -> Tensor:
        samples = LossBatch(batch.inputs, batch.targets, batch.sample_ids, config.seed)
        return _checked(function(plain, samples), samples.device, str(config.model.loss))

    module.forward = forward


def _checked(out: Any, device: torch.device, title: str) -> Tensor:
    """Return (sum, count) as a tensor. Raises ConfigError for anything else."""
    if not isinstance(out, (tuple, list)) or len(out) != 2 or not isinstance(out[0], Tensor) or out[0].numel() != 1:
        shown = f"a tuple of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        fix = "return losses.sum(), losses.numel()"
        raise ConfigError(Problem(f"{title} gave {shown}, not the pair (summed loss, count)", KEY, fix))
    total, count = out
    if not _is_count(count):
        raise ConfigError(Problem(f"{title} gave the count {count}: it must be a number >= 0", KEY))
    number = torch.as_tensor(count, dtype=torch.float64, device=device).detach().reshape(())
    return torch.stack((total.reshape(()).to(torch.float64), number))


def _is_count(count: Any) -> bool:
    """Whether it is a finite number >= 0, as far as a tensor on the meta device tells."""
    if isinstance(count, Tensor) and (count.numel() != 1 or count.is_meta):
        return count.numel() == 1
    return isinstance(count, (int, float, Tensor)) and isfinite(count) and bool(count >= 0)


def accept_dicts(module: nn.Module) -> None:
    """Pass a dict of inputs to the module's forward by name."""

    def by_name(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Mapping):
            return (), {**named, **arguments[0]}
        return None

    module.register_forward_pre_hook(by_name, with_kwargs=True)
