"""Zero bubble goes through a compiled block's backward twice."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as compiler_settings
from torch import nn
from torch.nn import functional

from parallelrun.distributed import torch_private


class Block(nn.Module):
    """A block that saves results of its own for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_a_compiled_backward_runs_again_after_one_that_kept_the_graph():
    """It is AOTAutograd, under every backend, that lets backward take the saved buffers for its own."""
    with compiler_settings.patch(donated_buffer=True):  # what torch does by itself; restored after the test
        torch_private.keep_compiled_buffers()
        block, x = Block(), torch.randn(2, 5, 8, requires_grad=True)
        wanted = torch.autograd.grad(block(x).sum(), [x, block.up.weight])
        block.compile(backend="aot_eager")
        block(x).sum().backward()  # the first stage's: it is not split, and what compiles it counts for all blocks
        loss = block(x).sum()
        (for_input,) = torch.autograd.grad(loss, [x], retain_graph=True)
        (for_weight,) = torch.autograd.grad(loss, [block.up.weight])
    torch.testing.assert_close((for_input, for_weight), wanted)
