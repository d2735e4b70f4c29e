"""Samples of text whose task is not to predict the next token."""

from __future__ import annotations

from dataclasses import dataclass

LABELLED, HALVES = "labelled texts", "halves"


@dataclass(frozen=True)
class TextSamples:
    """kind: `labelled texts` (a text and its class) or `halves` (the first half of the tokens is a source, and the
    second is predicted). num_ids: token ids that the model reads. pad_token: the one behind a text that is too short.
    """

    kind: str
    num_ids: int
    pad_token: int
