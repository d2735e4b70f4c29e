"""Role layers: the layers that reduce or split hidden, heads or vocab, in their one-device form.

A tensor strategy replaces them by its own classes with the same parameter names. Those reuse `functions`, so that both
compute the same numbers. Weights are stored in one dtype and rounded to `compute_dtype` where they are used; norms,
softmax and loss compute in at least fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelrun.models import documents as packed
from parallelrun.models import float8
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.functions import activate, cast, linear, normalise, token_loss
from parallelrun.models.local_tokens import ALL


class TensorModule(nn.Module):
    """A module that returns one tensor. torch's own annotation says Any.

    uncompiled: the methods at which torch.compile breaks its graphs.
    """

    uncompiled: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:

        def __call__(self, *inputs: Any) -> Tensor: ...


class RoleLayer(TensorModule):
    """A layer that a tensor strategy may replace, as `layer_role` says.

    communicates: its forward sends something, so that computing it again is not cheap. float8: a linear layer
    multiplies in 8 bits, and how (`models.float8`).
    """

    layer_role: ClassVar[str] = ""
    communicates: ClassVar[bool] = False
    float8 = ""

    def __init__(self, compute_dtype: torch.dtype):
        super().__init__()
        self.compute_dtype = compute_dtype


class NamedWeights(nn.Module):
    """An uninitialised weight (out, in) and maybe a bias (out) of one output of a `ColumnLinear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None


class ColumnLinear(RoleLayer):
    """Linear layers that read one input, whose outputs a tensor strategy may split.

    outputs: name -> features. Parameters `<name>.weight` (out, in) and `<name>.bias` (out): never fused. A single
    output without a name (`{"": features}`) has plain `weight` and `bias`, as an nn.Linear does.
    """

    layer_role = "column_parallel"
    __call__: Any

    def __init__(self, in_features: int, outputs: dict[str, int], bias: bool, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.in_features, self.outputs, self.has_bias = in_features, dict(outputs), bias
        for name, size in outputs.items():
            part = NamedWeights(in_features, size, bias)
            if name:
                setattr(self, name, part)
            else:
                self.weight, self.bias = part.weight, part.bias

    def returned(self, results: tuple[Tensor, ...]) -> Any:
        """The result of forward: a tensor per output in order, or only the tensor of a single output without a name."""
        return results[0] if "" in self.outputs else results

    def forward(self, x: Tensor) -> Any:
        """x (..., in) -> one (..., out) per output, see `returned`."""
        if self.float8:
            return self.returned(
                float8.multiply(x, [*map(self.weights, self.outputs)], self.compute_dtype, self.float8)
            )
        return self.returned(tuple([linear(x, *self.weights(name), self.compute_dtype) for name in self.outputs]))

    def weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one output."""
        part: Any = getattr(self, name) if name else self  # get_submodule costs more than a small product
        return part.weight, part.bias


class UnsplitLinear(RoleLayer):
    """A linear layer between two that need all of hidden. Parameters `weight` (out, in) and `bias` (out)."""

    layer_role = "linear"

    def __init__(self, in_features: int, out_features: int, bias: bool, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.float8:
            return float8.multiply(x, [(self.weight, self.bias)], self.compute_dtype, self.float8)[0]
        return linear(x, self.weight, self.bias, self.compute_dtype)


class RowLinear(UnsplitLinear):
    """A linear layer whose input a tensor strategy may split."""

    layer_role = "row_parallel"


class TokenEmbedding(RoleLayer):
    """Token ids (batch, seq) -> rows of `weight` (vocab, hidden), in the compute dtype."""

    layer_role = "embedding"

    def __init__(self, vocab: int, hidden: int, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.vocab, self.hidden = vocab, hidden
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight).to(self.compute_dtype)


class PositionEmbedding(RoleLayer):
    """Learned positions: x (batch, seq, hidden) plus the rows of `weight` (seq, hidden) of its local tokens, from
    `start` on, which only generation moves. Of packed documents, each begins with the first row."""

    layer_role = "position_embedding"

    def __init__(self, seq: int, hidden: int, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.seq, self.hidden = seq, hidden
        self.weight = nn.Parameter(torch.empty(seq, hidden))
        self.start, self.local_tokens = 0, ALL

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(x.size(1), self.start)

    def rows(self, count: int, start: int) -> Tensor:
        """(count, hidden), or one set a sample: the rows of the tokens held here from the one at `start` on."""
        documents = self.documents()
        if documents is None:
            return self.local_tokens.rows(self.weight, count, start).to(self.compute_dtype)
        positions = documents.positions_of(self.local_tokens.indices(count, self.weight.device, start))
        return functional.embedding(positions, self.weight).to(self.compute_dtype)

    def documents(self) -> DocumentBounds | None:
        """The packed documents of the samples held here; None if samples are no packs."""
        return packed.SCOPE.documents


class HiddenNorm(RoleLayer):
    """LayerNorm or RMSNorm over hidden, computed in at least fp32. kind: layernorm | rmsnorm."""

    layer_role = "norm"

    def __init__(self, kind: str, hidden: int, eps: float, bias: bool, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.kind, self.hidden, self.eps = kind, hidden, eps
        self.weight = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.empty(hidden)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.dtype == self.compute_dtype else x.to(self.compute_dtype)
        return normalise(self.kind, x, self.weight, self.bias, self.eps)


class HeadNorm(HiddenNorm):
    """The norm of each head's features (..., heads, head_dim), by weights that all heads share: on the heads held here,
    it is the same module, and the gradient of its weights a part of the sum over all heads."""

    layer_role = "per_head"


class AllHeadsNorm(HiddenNorm):
    """The norm of all heads' features together, for which a tensor strategy sums statistics. `recompute` saves the same
    tensors without one."""

    communicates: ClassVar[bool] = True


class SharedInput(RoleLayer):
    """x (batch, seq, features), unchanged, before what a tensor strategy splits by something else than features of a
    linear layer: the key that all heads of latent attention share, and, as `ExpertInput`, that of router and experts.

    A tensor strategy gathers a split sequence here, and sums the gradients of split experts or heads.
    """

    layer_role = "shared_input"

    def forward(self, x: Tensor) -> Tensor:
        return cast(x, self.compute_dtype)


class ExpertInput(SharedInput):
    """The input of router and experts."""

    layer_role = "expert_input"


class ExpertOutput(RoleLayer):
    """The output of the experts: rows (tokens, hidden), which it may overwrite -> (batch, seq, hidden).

    A tensor strategy sums the results of split experts here.
    """

    layer_role = "expert_output"

    def forward(self, x: Tensor, num_samples: int) -> Tensor:
        return x.view(num_samples, x.size(0) // num_samples, x.size(1))


class Activation(TensorModule):
    """The elementwise part of an MLP, which works on split features too. kind: gelu | relu | swiglu."""

    layer_role: ClassVar[str] = "activation"

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, *parts: Tensor) -> Tensor:
        return activate(self.kind, *parts)


def role_of(module: nn.Module) -> str:
    """The module's layer role; empty for a user's own module, whose attributes may have the same names, unless
    `mark_role` has given it one."""
    if isinstance(module, (RoleLayer, Activation)):
        return module.layer_role
    return str(module.__dict__.get(_ROLE_MARK, ""))


_ROLE_MARK = "_parallelrun_layer_role"


def mark_role(module: nn.Module, role: str) -> None:
    """Give a module of somebody else's a layer role that changes the layout of its parameters, and not its forward."""
    module.__dict__[_ROLE_MARK] = role


class VocabHead(RoleLayer):
    """x (..., hidden) -> logits (..., vocab). `weight` (vocab, hidden) is the embedding's Parameter when tied; `bias`
    (vocab) may be None. defers: it returns x, of which the loss computes the logits (`chunked_loss`)."""

    layer_role = "head"
    defers = False

    def __init__(
        self, hidden: int, vocab: int, dtype: torch.dtype, tied: TokenEmbedding | None = None, bias: bool = False
    ):
        super().__init__(dtype)
        self.hidden, self.vocab = hidden, vocab
        self.weight = tied.weight if tied is not None else nn.Parameter(torch.empty(vocab, hidden))
        self.bias = nn.Parameter(torch.empty(vocab)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.defers else linear(x, self.weight, self.bias, self.compute_dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """The input (..., hidden) of a deferred product, in the compute dtype."""
        return cast(x, self.compute_dtype)


class TokenLoss(TensorModule):
    """logits (..., vocab), targets int64 (...) -> SUM over targets >= 0 of the cross-entropy, in at least fp32; in
    training with the z-loss of that weight."""

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0):
        super().__init__()
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_loss(logits, targets, self.label_smoothing, self.z_loss if self.training else 0.0)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """The logits (..., vocab) over the whole vocabulary, of which a rank may hold a part."""
        return logits
