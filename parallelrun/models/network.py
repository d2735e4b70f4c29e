"""Network: a model as a chain of named blocks. Written as for one device.

Pipeline stages are cut between blocks, recomputation and compilation work on blocks, tensor strategies replace the role
layers inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallelrun.base.precision import Precision
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed import shared_memory, torch_private
from parallelrun.models import documents as packed
from parallelrun.models import dropout, recompute, rounding
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.host_copies import HostLink
from parallelrun.models.layers import TensorModule, TokenLoss
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.layers import AHEAD

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Network(nn.Module):
    """Chains its blocks, each of which maps x to x. `loss(logits, targets)` is the SUM over valid targets.

    block_names: the blocks held, in order, each a path for `get_submodule`. blocks: those that `spec` lists, in order;
    none if they are added later. recomputed: the blocks whose activations `recompute.apply` may drop. rounds_weights:
    False if the compute dtype is the stored one, so that there are no rounded copies. before_split: called when the
    network is split, after the tensor strategy has replaced its layers. own_values: from the run's seed to the initial
    values, by name, of the parameters whose initialiser is `own` (a user's module). takes_batch: its input is the
    reader's batch itself, because the user's own loss computes it. host: where the inputs of blocks wait for backward.
    after_weight_gradients: called after each pass that computes weight gradients apart from those of inputs.
    """

    def __init__(self, spec: ModelSpec, loss: nn.Module, blocks: Sequence[nn.Module] = ()):
        super().__init__()
        self.spec = spec
        self.block_names: tuple[str, ...] = tuple(block.name for block in spec.blocks)
        self.recomputed: tuple[str, ...] = tuple(block.name for block in spec.blocks if block.is_recomputed)
        self.recompute = "none"
        self.host: HostLink | None = None
        self.loss = loss
        self.own_values: Callable[[int], dict[str, Tensor]] | None = None
        self.before_split: Callable[[], None] | None = None
        self.rounds_weights = True
        self.takes_batch = False
        self.after_weight_gradients: Callable[[], None] = lambda: None
        for name, block in zip(self.block_names, blocks, strict=bool(blocks)):
            mount(self, name, block)

    def block(self, name: str) -> nn.Module:
        module: nn.Module = self
        for part in name.split("."):
            module = getattr(module, part)  # `get_submodule` makes checks that cost 3 us per block and forward
        return module

    def keep(self, blocks: Sequence[str]) -> Network:
        """Drop every other block with its parameters; returns itself. Raises ValueError for a name it does not hold.

        A tied head that loses its embedding keeps the shared Parameter, under its own name.
        """
        unknown = [name for name in blocks if name not in self.block_names]
        if unknown:
            raise ValueError(f"no block {unknown[0]!r} here; there are {', '.join(self.block_names)}")
        for name in self.block_names:
            if name not in blocks:
                parent, _, leaf = name.rpartition(".")
                delattr(self.get_submodule(parent), leaf)
        self._hold(blocks)
        return self

    def split(self, parts: Sequence[Sequence[str]]) -> list[Network]:
        """One network per list of blocks, in the order given, sharing this one's modules: several stages on a rank.

        A tied weight stays one Parameter if both its holders are here.
        """
        if self.before_split is not None:
            self.before_split()
        stages = []
        for blocks in parts:
            stage = Network(self.spec, self.loss)
            stage.recompute, stage.training, stage.own_values = self.recompute, self.training, self.own_values
            stage.rounds_weights, stage.takes_batch, stage.host = self.rounds_weights, self.takes_batch, self.host
            for name in blocks:
                mount(stage, name, self.get_submodule(name))
            stage._hold(blocks)
            stages.append(stage)
        return stages

    def forward(
        self,
        x: Tensor,
        sample_ids: Tensor | None = None,
        documents: DocumentBounds | None = None,
        ahead: Tensor | None = None,
    ) -> Any:
        """x: one microbatch of inputs, or of the output of the previous block. sample_ids: int64 (batch,), needed when
        dropout is on. documents: those that are packed into its samples. ahead: int64 (batch, 2, depth, seq), the
        tokens that modules of multi-token prediction read, and their targets; None: these modules are left out.

        Returns x behind the last block; with `ahead` logits as a tuple, the model's and those of each depth."""
        names, read = self.block_names, list[Tensor]()
        if self.spec.mtp_depth and ahead is None:
            names = tuple(name for name in names if not name.startswith(AHEAD))
        if self.recompute == "none" or not torch.is_grad_enabled():
            with self._rounding(), dropout.scope(sample_ids), packed.scope(documents):
                for name in names:
                    block, x = (self.block(name), x) if ahead is None else self._bound(name, x, ahead, read)
                    x = block(x)
            return x
        for name in names:
            block, x = (self.block(name), x) if ahead is None else self._bound(name, x, ahead, read)
            if name in self.recomputed:
                x = recompute.run(block, x, sample_ids, self.recompute, documents, self.host)
                continue
            with self._rounding(), dropout.scope(sample_ids), packed.scope(documents):
                x = block(x)
        return x

    def _bound(self, name: str, x: Tensor, ahead: Tensor, read: list[Tensor]) -> tuple[recompute.Block, Tensor]:
        """A block, bound to what it reads of `ahead` or of earlier blocks, and its input. read: by modules of
        multi-token prediction so far."""
        block = self.block(name)
        if name.startswith(AHEAD) and name.endswith(".input"):
            read.append(x)
            return partial(block, tokens=ahead[:, 0, len(read) - 1]), x
        if read and name == self.spec.blocks[-1].name:
            return partial(block, ahead=(*read[1:], x)), read[0]
        return block, x

    def total_loss(self, output: Any, targets: Tensor | None, ahead: Tensor | None) -> Tensor:
        """The summed loss of what forward returns, with the weighted losses of multi-token prediction."""
        loss: Tensor = self.loss(output if ahead is None else output[0], targets)
        if ahead is None:
            return loss
        losses: list[Tensor] = [self.loss(logits, ahead[:, 1, depth]) for depth, logits in enumerate(output[1:])]
        return loss + self.spec.mtp_weight * torch.stack(losses).mean()

    def _rounding(self) -> AbstractContextManager[None]:
        return rounding.not_kept() if self.rounds_weights and torch.is_grad_enabled() else nullcontext()

    def _hold(self, blocks: Sequence[str]) -> None:
        self.block_names = tuple(name for name in self.block_names if name in blocks)
        self.recomputed = tuple(name for name in self.recomputed if name in blocks)


def compile_blocks(network: Network, backend: str = "inductor") -> None:
    """torch.compile every block in place: names stay, equal blocks share one compilation."""
    for module in network.modules():
        for name in module.uncompiled if isinstance(module, TensorModule) else ():
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    shared_memory.keep_out_of_graphs()
    for name in network.block_names:
        network.block(name).compile(backend=backend)


def assemble(config: Config, spec: ModelSpec, precision: Precision, blocks: Sequence[nn.Module]) -> Network:
    """The network of `blocks`, in the order of the spec, with the loss over tokens or classes.

    Call it under `torch.device("meta")` and keep the blocks of the rank: parameters are uninitialised.
    """
    return store(Network(spec, TokenLoss(config.model.label_smoothing, spec.z_loss), blocks), precision.stored)


def store(network: ModuleT, dtype: str) -> ModuleT:
    """Give every parameter the stored dtype of the precision table, named as in torch; returns the network."""
    return network.to(getattr(torch, dtype))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give every parameter uninitialised storage on `device`, unless it is there.

    Parameters are swapped in place, which keeps their identity: ties between modules and stages, and FSDP2's own
    references, stay valid (`Module.to_empty` would create a new Parameter for every name).
    """
    with torch_private.swappable_parameters(module):
        for parameter in module.parameters():
            if parameter.device != device:
                torch.utils.swap_tensors(parameter, torch_private.empty_parameter(parameter, device))


def mount(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path under `root`, with empty containers on the way."""
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, module)
