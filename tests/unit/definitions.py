"""The classes and functions of a source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


def definitions(text: str) -> Iterator[Definition]:
    """Look into statements only: nine of ten nodes are expressions, which hold no definition with a body."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            yield node
        for name in _BODIES:
            waiting += getattr(node, name, ())
