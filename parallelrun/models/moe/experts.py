"""The experts of one layer: the same MLP many times, each with its own weights and its own rows.

Rows are sorted by expert: either equally many for each (a batched product) or any number (a grouped product;
MegaBlocks, Gale et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.distributed import torch_private
from parallelrun.models.functions import cast
from parallelrun.models.layers import Activation, RoleLayer
from parallelrun.models.rounding import rounded
from parallelrun.planner.model.model_spec import GATED


class Experts(RoleLayer):
    """`num_experts` MLPs. Parameters `up` (experts, ffn, hidden), `down` (experts, hidden, ffn) and, for gated
    activations, `gate` as `up`; with biases, of each `<name>_bias` (experts, out).

    A tensor strategy may cut ffn (the result is then a part of a sum, to which each rank adds its share of the last
    bias), an expert dispatcher the experts.
    """

    layer_role = "expert"

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn: int,
        activation: str,
        compute_dtype: torch.dtype,
        biases: Iterable[str] = (),
    ):
        super().__init__(compute_dtype)
        self.ffn = ffn
        self.gate = nn.Parameter(torch.empty(num_experts, ffn, hidden)) if activation in GATED else None
        self.up = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.gate_bias = self.up_bias = self.down_bias = None
        for name in biases:
            setattr(self, name, nn.Parameter(torch.empty(num_experts, hidden if name == "down_bias" else ffn)))
        self.activation = Activation(activation)

    @property
    def num_experts(self) -> int:
        """The number of experts held here."""
        return self.up.size(0)

    def forward(self, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        """counts None: rows (experts, n, hidden). Else rows (n, hidden) sorted by expert and int64 counts (experts,),
        which sum to n; some may be 0. Returns the same shape."""
        rows = rows if rows.dtype == self.compute_dtype else rows.to(self.compute_dtype)
        pairs = ((self.gate, self.gate_bias), (self.up, self.up_bias))
        opened = [self._product(rows, weight, bias, counts) for weight, bias in pairs if weight is not None]
        share = None if self.down_bias is None else self.down_bias * (self.up.size(1) / self.ffn)
        return self._product(self.activation(*opened), self.down, share, counts)

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None) -> Tensor:
        weight = rounded(weight, self.compute_dtype)
        if counts is None:
            product = torch.bmm(rows, weight.transpose(1, 2))
            return product if bias is None else product + cast(bias, product.dtype).unsqueeze(1)
        product = grouped_multiply(rows, weight, counts)
        if bias is None:
            return product
        return product + cast(bias, product.dtype).repeat_interleave(counts, 0, output_size=rows.size(0))


def grouped_multiply(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows (n, in), sorted by expert, times weights (experts, out, in): (n, out). counts: int64 (experts,), sum n.

    One kernel where torch has one for the dtype and sizes, else a product for each expert.
    """
    if torch_private.has_grouped_product(rows, weights):
        return torch_private.grouped_product(rows, weights, counts)
    return one_by_one(rows, weights, counts)


def one_by_one(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_multiply` with a product for each expert; experts without rows stay in the graph, with zero
    gradients."""
    parts = zip(rows.split(counts.tolist()), weights.unbind(0))
    return torch.cat([functional.linear(part, weight) for part, weight in parts])
