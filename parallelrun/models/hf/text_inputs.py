"""How a module of transformers gets the tokens of a sample, where they are not one text for it to continue."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.base import user_code
from parallelrun.models import documents as packed
from parallelrun.models.documents import DocumentBounds
from parallelrun.models.module.outputs import logits_of

Arguments = tuple[tuple[()], dict[str, Tensor]]
_LENGTHS, _PADDING = (5, 1, 3), 2  # of documents that are tried
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 8,
    "moe_intermediate_size": 8, "vocab_size": 32, "pad_token_id": None,
    "sliding_window": 3, "attention_chunk_size": 4,
}  # fmt: skip


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


def restart_positions(module: Any) -> None:
    """Make the module restart its positions in every packed document, from which transformers makes the mask.

    It looks for documents only without a cache of keys and values, and reads values of positions. On the meta device a
    mask of that shape stands for them.
    """

    def restarted(part: nn.Module, inputs: Any, named: Any) -> tuple[Any, dict[str, Any]]:
        documents = packed.SCOPE.documents
        if documents is None:
            return inputs, named
        positions = documents.positions
        mask = torch.ones(*positions.shape, positions.size(1), dtype=torch.bool, device=positions.device).unsqueeze(1)
        changed = {"attention_mask": mask} if positions.is_meta else {"position_ids": positions}
        return inputs, {**named, **changed, "use_cache": False}

    module.base_model.register_forward_pre_hook(restarted, with_kwargs=True)


@lru_cache(maxsize=4)  # a run builds its module several times
def unpackable(auto: Any, pickled: bytes) -> str:
    """Return why a model cannot keep packed documents apart; empty if it can. auto: the class of transformers that
    chooses its class; pickled: its configuration.

    A module with all of its layers, which decide its masks, but small widths computes documents packed and alone.
    """
    settings = pickle.loads(pickled)
    try:
        for key, value in _SMALL.items():
            if getattr(settings, key, None) is not None:
                setattr(settings, key, value)
        with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = auto.from_config(settings, dtype=torch.float32).eval()
            if getattr(module, "_is_stateful", False):
                return "its state goes from token to token, and a mask does not end it"
            for parameter in module.parameters():
                parameter.normal_(std=0.2)  # the class may start some at zero, which would hide what they pass on
            restart_positions(module)
            tokens = torch.randint(_SMALL["vocab_size"], (1, sum(_LENGTHS) + _PADDING))
            with packed.scope(DocumentBounds.of([_LENGTHS], tokens.size(1))):
                together = logits_of(module(tokens))
            parts = tokens.split([*_LENGTHS, _PADDING], dim=1)[:-1]
            alone = torch.cat([logits_of(module(part)) for part in parts], dim=1)
            error = float((together[:, : alone.size(1)] - alone).abs().max() / alone.abs().max())
    except Exception as failure:  # the class's code may raise anything
        return f"it cannot be tried with packed documents: {user_code.reason(failure)}"
    return "" if error < 1e-4 else f"its tokens see other documents (logits differ by {error:.0e})"
