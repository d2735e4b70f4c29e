"""Generates tokens, one after the other, with a cache of keys and values, and prints them as they come."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.data.tokenizing.tokenizer import Tokenizer
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.layers import PositionEmbedding
from parallelrun.models.network import Network
from parallelrun.models.transformer.modules import Attention, KeyValueCache
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model import definitions
from parallelrun.training.inference.model import loaded, without_groups


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0: the most likely one; top_k: of so many most likely ones."""

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


class Generator:
    """A trained language model that continues sequences of tokens.

    The context holds the last `seq` tokens at most. When it is full, its older half is dropped. Experts with a capacity
    depend on all tokens of the context, so there it is computed anew for every token.

    ranks: the plan and mesh of tensor-parallel ranks, which all call `tokens` alike and get the same tokens; each has
    the keys and values of its own heads.
    """

    def __init__(self, source: StoredModel, ranks: tuple[Plan, Mesh] | None = None):
        check_causal(source)
        config = without_groups(source.config)
        spec = definitions.model(config).make(config, source.spec.vocab)
        self.vocab, self._seq = spec.vocab, spec.seq
        self._network: Network = loaded(source, config, spec, ranks)
        modules = list(self._network.modules())
        self._attentions = [module for module in modules if isinstance(module, Attention)]
        self._positions = [module for module in modules if isinstance(module, PositionEmbedding)]
        self._caches = bool(self._attentions) and (spec.router is None or not spec.router.limited)

    def tokens(self, prompt: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
        """`count` tokens after the prompt, which must not be empty; each as soon as it is known.

        Raises ConfigError (`check_prompt`).
        """
        check_prompt(prompt, self.vocab)
        draws = torch.Generator().manual_seed(sampling.seed)
        context = list(prompt)[-self._seq :]
        fresh = True
        for _ in range(count):
            logits = self._next_logits(context, fresh)
            token = choose(logits.float().cpu(), sampling, draws)
            yield token
            context.append(token)
            fresh = not self._caches or len(context) > self._seq
            context = context[-(self._seq // 2 or 1) :] if len(context) > self._seq else context

    @torch.inference_mode()
    def _next_logits(self, context: Sequence[int], fresh: bool) -> Tensor:
        """(vocab,): the logits after the context. fresh: nothing of it has been computed."""
        if fresh:
            for attention in self._attentions:
                attention.cache = KeyValueCache(self._seq) if self._caches else None
        new = context if fresh else context[-1:]
        for position in self._positions:
            position.start = len(context) - len(new)
        device = next(self._network.parameters()).device
        last: Tensor = self._network(torch.tensor([list(new)], device=device))[0, -1]
        gather: Any = self._network.loss.whole_logits
        logits: Tensor = gather(last)
        return logits


def check_causal(source: StoredModel) -> None:
    """Raise ConfigError for a model that does not predict next tokens."""
    if source.spec.kind != "tokens" or source.spec.mask_token is not None or source.spec.text is not None:
        raise ConfigError(Problem(f"model={source.config.model.preset} does not predict next tokens", "run"))


def check_prompt(prompt: Sequence[int], vocab: int) -> None:
    """Raise ConfigError for an empty prompt or a token id outside the vocabulary."""
    if not prompt:
        raise ConfigError(Problem("the prompt is empty", "text"))
    if wrong := [token for token in prompt if not 0 <= token < vocab]:
        raise ConfigError(Problem(f"token id {wrong[0]} is outside the vocabulary of {vocab}", "text"))


def choose(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """A token id drawn from logits (vocab,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=draws))


def collected(tokens: Iterator[int], prompt: Sequence[int], codec: Tokenizer | None, quiet: bool) -> list[int]:
    """All the tokens; unless `quiet`, the text is printed as it grows."""
    generated: list[int] = []
    shown = ""
    for token in tokens:
        generated.append(token)
        if quiet:
            continue
        text = codec.decode([*prompt, *generated]) if codec else " ".join(map(str, [*prompt, *generated]))
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(shown):  # a character may be cut
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    if not quiet:
        text = codec.decode([*prompt, *generated]) if codec else shown
        print(text[len(shown) :] if text.startswith(shown) else "")
    return generated
