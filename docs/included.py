"""Copies files into the code blocks of the pages that show them: `python docs/included.py`.

A block follows the line `<!-- include: path -->`, with the path relative to the repository. A test compares all blocks
with their files.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
BLOCK = re.compile(r"<!-- include: (\S+) -->\n```(\w+)\n.*?```\n", re.S)


def page(text: str) -> str:
    """Return a page with every included block written anew."""

    def block(found: re.Match[str]) -> str:
        path, language = found.groups()
        content = (HERE.parent / path).read_text(encoding="utf-8")
        return f"<!-- include: {path} -->\n```{language}\n{content}```\n"

    return BLOCK.sub(block, text)


def files() -> dict[Path, str]:
    """Return what every page with included files should hold."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.md"))}
    return {path: page(text) for path, text in texts.items() if BLOCK.search(text)}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
        print(path)
