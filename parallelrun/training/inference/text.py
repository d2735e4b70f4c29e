"""Writes generated tokens to the terminal as they come: as text, or as their ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from parallelrun.checkpoint.exchange.tokenizer import Codec


def collected(tokens: Iterator[int], prompt: Sequence[int], codec: Codec | None, quiet: bool) -> list[int]:
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
