"""Recipes: complete, shareable runs in YAML. Where they lie, and how one from a stranger is read.

A recipe is data that other people send: it may choose registered names and set keys of the schema, nothing else. It is
checked node by node with file and line before Hydra sees it; what may name code or reach out of the run (`_target_`,
`source`, `hydra`, resolvers, an output folder elsewhere) is refused unless the user says `--trust`. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from parallelrun.config.keys import nearest
from parallelrun.errors import ConfigError, EnvironmentProblem, Problem

SIZE_LIMIT = 2**16
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class RecipeFile:
    """A recipe found by name. source: built-in | user."""

    name: str
    path: Path
    source: str

    @property
    def shown(self) -> str:
        """The file as messages name it."""
        return str(self.path) if self.source == "user" else f"recipes/{self.path.name}"

    def is_trusted(self, trust: bool) -> bool:
        """Whether the recipe may name code and write anywhere: ours, or any if the user has said `--trust`."""
        return trust or self.source == "built-in"

    @property
    def description(self) -> str:
        """The first comment line."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in (file.readline(4096) for _ in range(8))]
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
        return next((line for line in comments if line and not line.startswith("@package")), "")


@dataclass(frozen=True)
class Recipe:
    """A recipe that passed the checks: its text, and what it gives."""

    file: RecipeFile
    text: str
    keys: frozenset[str] = field(default_factory=frozenset)
    parents: tuple[str, ...] = ()


def folders(environment: Mapping[str, str] | None = None) -> list[tuple[Path, str]]:
    """(folder, source) in order of precedence: built-in recipes cannot be shadowed."""
    environment = os.environ if environment is None else environment
    found = [(Path(str(resources.files("parallelrun.recipes"))), "built-in"), (Path("recipes"), "user")]
    home = os.path.expanduser("~")
    if home != "~":
        found.append((Path(home) / ".config" / "parallelrun" / "recipes", "user"))
    extra = environment.get("PARALLELRUN_RECIPES", "")
    found += [(Path(folder).expanduser(), "user") for folder in extra.split(os.pathsep) if folder]
    return found


def find(environment: Mapping[str, str] | None = None) -> dict[str, RecipeFile]:
    """Every recipe by name, sorted. An absent or unreadable folder is no error."""
    found: dict[str, RecipeFile] = {}
    for folder, source in folders(environment):
        try:
            files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
        except OSError:
            continue
        for path in files:
            if NAME.fullmatch(path.stem):
                found.setdefault(path.stem, RecipeFile(path.stem, path, source))
    return dict(sorted(found.items()))


def is_path(text: str) -> bool:
    """Whether `recipe=text` means a file rather than a name."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def at_path(text: str) -> RecipeFile:
    """The recipe in the file `text`, under a name that no other recipe has."""
    path = Path(text).expanduser()
    if not path.is_file():
        alternatives = [f"recipe={name}" for name in nearest(path.stem, find())]
        what = f"recipe={text}: {'is a folder' if path.is_dir() else 'no such file'}"
        raise ConfigError(Problem(what, str(path.absolute()), ", ".join(alternatives), "parallelrun ls recipes"))
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return RecipeFile(f"file_{stem}_{digest}", path, "user")


def load(file: RecipeFile, trust: bool = False) -> Recipe:
    """Read and check one recipe. Raises ConfigError with every problem, each with file:line."""
    from parallelrun.config import (  # here: most command lines name no recipe, and YAML takes its time
        recipe_check,
        repeat,
    )

    text = _read(file.path)
    root = recipe_check.parse(text, file.shown)
    check = recipe_check.Check(file.shown, file.is_trusted(trust))
    check.root(root)
    if check.problems:
        raise ConfigError(*check.problems)
    again = repeat.of(text, check.keys)
    if again is not None:
        return Recipe(file, again, repeat.GIVEN)
    return Recipe(file, text, frozenset(check.keys), tuple(check.parents))


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"cannot read the recipe: {error.strerror}", str(path))) from error
    if len(raw) > SIZE_LIMIT:
        raise ConfigError(Problem(f"a recipe has at most {SIZE_LIMIT} bytes", str(path)))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(Problem("not UTF-8 text", f"{path}:{line}")) from error
    for number, line_text in enumerate(text.split("\n"), start=1):
        indentation = line_text[: len(line_text) - len(line_text.lstrip())]
        if "\t" in indentation:
            column = indentation.index("\t") + 1
            raise ConfigError(Problem("a tab in the indentation; use spaces", f"{path}:{number}:{column}"))
    return text
