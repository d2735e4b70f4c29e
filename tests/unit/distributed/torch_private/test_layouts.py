"""The operations below torch's public ones against plain ones, on tensors of any strides, small sizes and none."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import OptimizerConfig
from parallelrun.distributed import torch_private
from parallelrun.models.moe.experts import grouped_multiply, one_by_one
from parallelrun.models.network import allocate
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.model.model_spec import Initialiser, ParameterSpec
from tests.matrix import FULL
from tests.stand_in_gpu import OnGpu, stand_in_gpu

DRAWS = 150 if FULL else 60
BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.2}  # of sums of up to 9 products


class Draws:
    """Sizes and tensors from a seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64):
        self.random, self.dtype = torch.Generator().manual_seed(seed), dtype

    def size(self, low: int = 1, high: int = 9) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers with strides of some kind."""
        plain = torch.randn(shape, generator=self.random, dtype=torch.float64).to(self.dtype)
        dim, kind = self.size(0, len(shape) - 1), self.size(0, 5)
        if kind == 0 and shape[dim]:  # numbers of one place are read several times
            return plain.narrow(dim, 0, 1).expand(shape)
        if kind == 1:  # every second number of a larger tensor
            steps = [slice(None)] * len(shape)
            steps[dim] = slice(None, None, 2)
            return plain.repeat_interleave(2, dim)[tuple(steps)]
        if kind == 2:  # a part, whose first number is not at the beginning of its storage
            return torch.cat((plain.narrow(dim, 0, min(1, shape[dim])), plain), dim).narrow(
                dim, min(1, shape[dim]), shape[dim]
            )
        if kind in (3, 4):  # dims in another order
            return plain.transpose(dim, -1).contiguous().transpose(dim, -1)
        return plain


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    query, key, value = (x.double() for x in (query, key, value))
    copies = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.transpose(-2, -1) * query.size(-1) ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _check(result: Tensor, expected: Tensor, what: object) -> None:
    assert result.shape == expected.shape, what
    same = result.double()
    torch.testing.assert_close(same, expected.double(), rtol=0, atol=BOUNDS[result.dtype], msg=lambda m: f"{what}: {m}")


@dataclass(frozen=True)
class AttentionCase:
    """Tensors of one call and of its gradients. lse, expected: in fp64; expected: the result and the gradients."""

    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    out: Tensor
    lse: Tensor
    expected: tuple[Tensor, ...]

    @classmethod
    def drawn(cls, draws: Draws, width: int, causal: bool, grouped: bool) -> AttentionCase:
        """Heads of `width` features; every fifth case has no query, or no key. grouped: heads may share keys."""
        batch, kv_heads, empty = draws.size(0, 3), draws.size(1, 2), draws.size(0, 4)
        heads = kv_heads * (draws.size(1, 2) if grouped else 1)
        seq = 0 if empty == 0 else draws.size()
        num_keys = seq if causal else 0 if empty == 1 else draws.size()
        query, gradient = (draws.tensor(batch, heads, seq, width) for _ in range(2))
        key, value = (draws.tensor(batch, kv_heads, num_keys, width) for _ in range(2))
        leaves = [x.double().requires_grad_() for x in (query, key, value)]
        if num_keys:
            out, lse = _plain_attention(*leaves, causal)
        else:
            out, lse = 0 * leaves[0], torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
        gradients = torch.autograd.grad(out, leaves, gradient.double(), allow_unused=True, materialize_grads=True)
        transposed = out.detach().to(draws.dtype).mT.contiguous().mT
        return cls((query, key, value), gradient, transposed, lse.detach(), (out.detach(), *gradients))


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.float64, 0), (torch.float32, 0), (torch.float32, 4), (torch.bfloat16, 8)]
)
def test_attention(dtype: torch.dtype, step: int) -> None:
    """step: heads have a multiple of so many features, and are on the stand-in for a GPU; 0: 1 to 9, on the CPU."""
    with stand_in_gpu() if step else contextlib.nullcontext():
        for seed in range(DRAWS):
            draws, causal = Draws(seed, dtype), seed % 2 == 0
            width = draws.size(1, 3) * step or draws.size()
            case = AttentionCase.drawn(draws, width, causal, grouped=not step)
            wide = case.lse.to(torch.promote_types(dtype, torch.float32))
            tensors = (*case.inputs, case.gradient, case.out, wide)
            query, key, value, gradient, out, lse = map(OnGpu, tensors) if step else tensors
            assert torch_private.has_fused_attention(query, key)
            mine, statistic = torch_private.fused_attention(query, key, value, causal)
            gradients = torch_private.fused_attention_backward(gradient, query, key, value, out, lse, causal)
            for result, exact in zip((mine, *gradients, statistic), (*case.expected, case.lse)):
                result = result.inner if isinstance(result, OnGpu) else result
                _check(result, exact, (seed, [(*x.shape, x.stride()) for x in case.inputs]))


def test_a_kernel_of_a_gpu_refuses_what_it_does_not_serve() -> None:
    with stand_in_gpu():
        for dtype, width, kv_heads, serves in (
            (torch.float32, 4, 2, True), (torch.float32, 4, 1, False), (torch.float32, 6, 2, False),
            (torch.bfloat16, 8, 1, True), (torch.bfloat16, 4, 2, False), (torch.bfloat16, 264, 2, False),
            (torch.float64, 8, 2, False),
        ):  # fmt: skip
            query, key = (OnGpu(torch.ones(1, heads, 3, width, dtype=dtype)) for heads in (2, kv_heads))
            assert torch_private.has_fused_attention(query, key) == serves, (dtype, width, kv_heads)


def test_grouped_products_and_their_gradients() -> None:
    for seed in range(DRAWS):
        draws = Draws(seed, torch.float32)
        counts = torch.tensor([draws.size(0, 4) for _ in range(draws.size(1, 3))])
        inner, outer = (draws.size(1, 9) if seed % 2 else 4 * draws.size(1, 3) for _ in range(2))
        rows, weights = draws.tensor(int(counts.sum()), inner), draws.tensor(len(counts), outer, inner)
        leaves = [rows.requires_grad_(), weights.requires_grad_()]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        result, expected = grouped_multiply(*leaves, counts), one_by_one(*exact, counts)
        _check(result, expected, seed)
        grad = draws.tensor(*result.shape)
        found = torch.autograd.grad(result, leaves, grad), torch.autograd.grad(expected, exact, grad.double())
        for mine, theirs in zip(*found):
            _check(mine, theirs, (seed, grad.stride(), rows.stride(), weights.stride()))


def test_groups_that_the_kernel_does_not_serve() -> None:
    rows, weights = torch.ones(3, 8), torch.ones(2, 4, 8)
    assert torch_private.has_grouped_product(rows, weights)
    shifted = torch.ones(2 * 4 * 8 + 1)[1:].view(2, 4, 8)  # its first number is no multiple of 16 bytes
    for other, one in ((rows, shifted), (torch.ones(25)[1:].view(3, 8), weights), (rows, torch.ones(1024, 4, 8))):
        assert not torch_private.has_grouped_product(other, one)
    for other, one in ((rows[:0], weights), (rows.double(), weights), (rows[:, :6], weights[..., :6])):
        assert not torch_private.has_grouped_product(other, one)


def _local(name: str, tensor: Tensor) -> LocalParameter:
    spec = ParameterSpec(name, tuple(tensor.shape), Initialiser("ones"), "row_parallel")
    return LocalParameter(name, tensor, spec, Layout.replicated(tensor.dim()))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
def test_updates_of_weights_of_any_strides(name: str) -> None:
    """The network's weights are made contiguous when they get storage, their state when it is loaded."""
    config = OptimizerConfig(name=name, momentum=0.9, weight_decay=0.1)
    for seed in range(20):
        draws = Draws(seed)
        shape = draws.size(0, 3), draws.size(), draws.size()
        values, gradients = draws.tensor(*shape), [draws.tensor(*shape) for _ in range(4)]
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(draws.tensor(*shape).to("meta"))
        allocate(module, torch.device("cpu"))
        weight = module.weight.data.copy_(values)
        exact = values.clone(memory_format=torch.contiguous_format)
        own, plain = (Optimizer(config, [_local("weight", x)]) for x in (weight, exact))
        for number, gradient in enumerate(gradients):
            weight.grad, exact.grad = (gradient.clone(memory_format=torch.contiguous_format) for _ in range(2))
            if number == 2:  # as from a checkpoint
                own = Optimizer(config, [_local("weight", weight)])
                strided = {k: v.mT.contiguous().mT if v.dim() else v for k, v in plain.state("weight").items()}
                own.load_state("weight", strided)
            own.step(0.1), plain.step(0.1)
            assert torch.equal(weight, exact), seed


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
def test_an_optimizer_refuses_strides(name: str) -> None:
    transposed, plain = torch.ones(3, 2).t(), torch.ones(2, 3)
    with pytest.raises(AssertionError, match="not contiguous"):
        Optimizer(OptimizerConfig(name=name), [_local("weight", transposed)])
    optimizer, plain.grad = Optimizer(OptimizerConfig(name=name), [_local("weight", plain)]), transposed
    with pytest.raises(AssertionError, match="gradient"):
        optimizer.step(0.1)
