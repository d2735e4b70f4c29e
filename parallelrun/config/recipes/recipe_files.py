"""Recipes: complete, shareable runs in YAML. How they are found, and how one from a stranger is read.

A recipe is data: it may choose registered names and set keys of the schema, nothing else. `recipe_check` checks it
node by node, with file and line, before Hydra sees it. Whatever could name code or reach outside the run (`_target_`,
`source`, `hydra`, resolvers, an output folder elsewhere) is refused unless the user says `--trust`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.config.keys import nearest
from parallelrun.config.schema.run_schema import Config

if TYPE_CHECKING:
    from parallelrun.config.recipes.about import About

SIZE_LIMIT = 2**16
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# Keys of a run's config.yaml that say where and how it was started, not what it computed. `world` follows from the
# degrees, so that one of them can be overridden.
_NOT_REPEATED = ("world", "verb", "resume", "runs", "sweep", "plot", "ranks")


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
        """Whether the recipe may name code and write anywhere: built-in, or the user has said `--trust`."""
        return trust or self.source == "built-in"

    @property
    def description(self) -> str:
        """Its purpose, as it says in `about:`, else the first comment line."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in (file.readline(4096) for _ in range(8))]
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        purpose = next((line.partition(":")[2].strip() for line in lines if line.startswith("purpose:")), "")
        comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
        directives = ("@package", "yaml-language-server:")
        return purpose.strip("\"'") or next((line for line in comments if line and not line.startswith(directives)), "")


@dataclass(frozen=True)
class Recipe:
    """A recipe that passed the checks. keys: what it sets; parents: the recipes that it builds on.

    about: what it says about itself. text: what Hydra composes.
    """

    file: RecipeFile
    text: str
    keys: frozenset[str] = frozenset()
    parents: tuple[str, ...] = ()
    about: About | None = None


def find(environment: Mapping[str, str] = os.environ) -> dict[str, RecipeFile]:
    """Every recipe by name, sorted. Built-in recipes cannot be shadowed; missing or unreadable folders are skipped."""
    folders = [(Path(import_module("parallelrun.recipes").__path__[0]), "built-in"), (Path("recipes"), "user")]
    home = os.path.expanduser("~")
    folders += [(Path(home) / ".config" / "parallelrun" / "recipes", "user")] if home != "~" else []
    extra = environment.get("PARALLELRUN_RECIPES", "")
    folders += [(Path(folder).expanduser(), "user") for folder in extra.split(os.pathsep) if folder]
    files_by_name: dict[str, RecipeFile] = {}
    for folder, source in folders:
        try:
            files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
        except OSError:
            continue
        for path in files:
            if NAME.fullmatch(path.stem):
                files_by_name.setdefault(path.stem, RecipeFile(path.stem, path, source))
    return dict(sorted(files_by_name.items()))


def is_path(text: str) -> bool:
    """Whether `recipe=text` means a file rather than a name."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def at_path(text: str) -> RecipeFile:
    """The recipe in the file `text`, under a name that no other recipe has."""
    path = Path(text).expanduser()
    if not path.is_file():
        alternatives = [f"recipe={name}" for name in nearest(path.stem, find())]
        cause = f"recipe={text}: {'is a folder' if path.is_dir() else 'no such file'}"
        raise ConfigError(Problem(cause, str(path.absolute()), ", ".join(alternatives), "parallelrun ls recipes"))
    import hashlib

    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return RecipeFile(f"file_{stem}_{digest}", path, "user")


def load(file: RecipeFile, trust: bool = False) -> Recipe:
    """Read and check one recipe. Raises ConfigError with every problem, each with file:line."""
    from parallelrun.config.recipes import recipe_check  # imported late: it loads YAML, which is slow

    text = _read(file.path)
    root = recipe_check.parse(text, file.shown)
    check = recipe_check.RecipeCheck(file.shown, file.is_trusted(trust))
    check.root(root)
    if check.problems:
        raise ConfigError(*check.problems)
    again = _repeating(text, check.keys)
    if again is not None:  # the model's own dataset and learning rate must not replace those of the run
        return Recipe(file, again, frozenset({"dataset", "optimizer"}))
    return Recipe(file, text, frozenset(check.keys), tuple(check.parents), check.about)


def load_all(files: Mapping[str, RecipeFile], selected: Sequence[str], trust: bool) -> dict[str, Recipe]:
    """The chosen recipes and those that they build on; no other file is opened."""
    loaded: dict[str, Recipe] = {}
    wanted = [name for name in selected if name.lower() != "null"]
    while wanted:
        name = wanted.pop()
        if name in loaded:
            continue
        if name not in files:
            close = nearest(name, files)
            suggestion = ", ".join(f"recipe={option}" for option in close)
            raise ConfigError(Problem(f"recipe={name}: no such recipe", "recipe", suggestion, "parallelrun ls recipes"))
        loaded[name] = load(files[name], trust)
        wanted += loaded[name].parents
    return loaded


def family(name: str, loaded: Mapping[str, Recipe], above: tuple[str, ...] = ()) -> frozenset[str]:
    """The recipe and all that it builds on. Raises ConfigError for a cycle."""
    if name in above:
        cause = f"recipes build on each other in a cycle: {' -> '.join((*above, name))}"
        raise ConfigError(Problem(cause, "recipe"))
    return frozenset({name}).union(*(family(parent, loaded, (*above, name)) for parent in loaded[name].parents))


def _repeating(text: str, keys: Set[str]) -> str | None:
    """The recipe that repeats a run, if `text`, which sets `keys`, is that run's config.yaml; else None."""
    import yaml

    from parallelrun.config import presets

    if not {field.name for field in dataclasses.fields(Config)} <= {key.partition(".")[0] for key in keys}:
        return None
    values = {key: value for key, value in yaml.safe_load(text).items() if key not in _NOT_REPEATED}
    preset = values["strategy"]["name"]
    if preset in presets.options("strategy"):  # Hydra merges mappings with those of the chosen preset
        values = {"defaults": [{"override /strategy": preset}], **values}
    return str(yaml.safe_dump(values, sort_keys=False))


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"cannot read the recipe: {error.strerror}", str(path))) from error
    if len(raw) > SIZE_LIMIT:
        raise ConfigError(Problem(f"the recipe is too large: at most {SIZE_LIMIT} bytes", str(path)))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(Problem("not UTF-8 text", f"{path}:{line}")) from error
    for number, line_text in enumerate(text.split("\n"), start=1):
        column = line_text[: len(line_text) - len(line_text.lstrip())].find("\t") + 1
        if column:
            raise ConfigError(Problem("a tab in the indentation; use spaces", f"{path}:{number}:{column}"))
    return text
