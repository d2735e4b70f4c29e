"""Multi-head latent attention (DeepSeek-V2, 2024; DeepSeek-V3, 2024), written as for one device.

It ends in the product of plain attention, on expanded keys and values, which the cache of generation holds too. Fused
kernels take one size of heads, so zeros stand behind a value of fewer features than its key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.models import functions, layers
from parallelrun.models.transformer.latent_spec import latent_sizes, score_growth
from parallelrun.models.transformer.modules import Attention, LayerFactory, SelfAttention, rotary


class LatentAttention(Attention):
    """Attention whose keys and values are products of a latent of each token, and whose queries are of another (or,
    without `model.q_lora_rank`, of x).

    Of a query and key, the first `nope` features have no position; the last `rope` are turned in pairs (2i, 2i + 1),
    and those of the key are the same for all heads. A tensor strategy splits the heads and copies the latents.
    """

    def __init__(self, name: str, make: LayerFactory, causal: bool = True, window: int | None = None):
        super().__init__()
        model, sizes = make.model, latent_sizes(make.model)
        assert sizes is not None, "the model has plain attention"
        self.sizes, self.value_dim = sizes, sizes.value
        self.rotary, self.growth = rotary(model, window is not None), score_growth(model)
        if sizes.q_rank is not None:
            self.q_a = make.unsplit(sizes.q_rank)
            self.q_a_norm = make.norm(sizes.q_rank)
        self.kv_a = make.unsplit(sizes.kv_rank + sizes.rope)
        self.kv_a_norm = make.norm(sizes.kv_rank)
        self.shared_key = layers.SharedInput(make.dtype)
        if sizes.q_rank is not None:
            self.q_b = make.heads(sizes.q_rank, sizes.head_dim)
        else:
            self.q = make.heads(model.hidden, sizes.head_dim)
        self.kv_b = make.heads(sizes.kv_rank, sizes.nope + sizes.value)
        self.close(name, make, model.heads * sizes.value, causal, window)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.sizes
        query_latent = x if sizes.q_rank is None else self.q_a_norm(self.q_a(x))
        latent, shared = self.kv_a(x).split((sizes.kv_rank, sizes.rope), dim=-1)
        latent = self.kv_a_norm(latent)
        turned_key = self._turned(self.shared_key(shared).unsqueeze(1))
        query = _by_head(self.q(x) if sizes.q_rank is None else self.q_b(query_latent), sizes.head_dim)
        plain, turned = query.split((sizes.nope, sizes.rope), dim=-1)
        query = torch.cat((plain, self._turned(turned)), dim=-1)
        if self.growth != 1.0:
            query = query * self.growth
        plain, value = _by_head(self.kv_b(latent), sizes.nope + sizes.value).split((sizes.nope, sizes.value), dim=-1)
        key = torch.cat((plain, turned_key.expand(-1, plain.size(1), -1, -1)), dim=-1)
        return query, key, functional.pad(value, (0, sizes.head_dim - sizes.value))

    def _turned(self, x: Tensor) -> Tensor:
        """x (batch, heads, seq, rope) turned by position, with the first features of all pairs in front of the second:
        scores are sums over features, whose order does not matter if it is that of query and key."""
        return functions.rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), self.rotary, self.positions(x))


def _by_head(x: Tensor, features: int) -> Tensor:
    """x (batch, seq, heads x features) -> (batch, heads, seq, features)."""
    return x.view(*x.shape[:2], -1, features).transpose(1, 2)


def self_attention(name: str, make: LayerFactory, causal: bool = True, window: int | None = None) -> Attention:
    """The self-attention of a layer of the model that `make` builds."""
    kind = SelfAttention if latent_sizes(make.model) is None else LatentAttention
    return kind(name, make, causal, window)
