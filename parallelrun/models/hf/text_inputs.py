"""How a module of transformers gets the tokens of a sample whose task is not to predict the next one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

Arguments = tuple[tuple[()], dict[str, Tensor]]


def mask_padding(module: nn.Module, pad_token: int) -> None:
    """Make the module attend to all tokens but padding, which only follows a text."""

    def masked(part: nn.Module, inputs: Any, named: Any) -> Arguments:
        (tokens,) = inputs
        return (), {"input_ids": tokens, "attention_mask": (tokens != pad_token).long()}

    module.register_forward_pre_hook(masked, with_kwargs=True)


def halve(module: nn.Module) -> None:
    """Make the module read the first half of the tokens (batch, seq) in its encoder, the second in its decoder."""

    def halved(part: nn.Module, inputs: Any, named: Any) -> Arguments:
        (tokens,) = inputs
        size = tokens.size(1) - tokens.size(1) // 2
        return (), {"input_ids": tokens[:, :size], "decoder_input_ids": tokens[:, size:]}

    module.register_forward_pre_hook(halved, with_kwargs=True)
