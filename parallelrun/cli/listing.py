"""`ls` and `show`: what there is, and what a recipe comes to. No torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from parallelrun import registry
from parallelrun.cli.argv import read
from parallelrun.config import presets
from parallelrun.config.keys import nearest
from parallelrun.errors import EXIT_OK, ConfigError, Problem

# What `ls` lists -> the configuration group; singular words are understood too.
KINDS = {
    "recipes": "recipe",
    "models": "model",
    "strategies": "strategy",
    "datasets": "dataset",
    "optimizers": "optimizer",
    "precisions": "precision",
    "clusters": "cluster",
}


def ls(words: list[str]) -> int:
    """`parallelrun ls [kind] [--json]`."""
    parser = argparse.ArgumentParser("parallelrun ls", description="List what there is, with its source.")
    parser.add_argument("kind", nargs="?", default=None, help=", ".join(KINDS))
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(words)
    kinds = list(KINDS) if arguments.kind is None else [_kind(arguments.kind)]
    found = {kind: _rows(kind) for kind in kinds}
    if arguments.json:
        from parallelrun.cli.compute import print_json

        print_json(found)
    else:
        _print_tables(found)
    return EXIT_OK


def _kind(word: str) -> str:
    by_group = {group: kind for kind, group in KINDS.items()}
    kind = by_group.get(word, word)
    if kind not in KINDS:
        suggestion = " or ".join(f"ls {kind}" for kind in nearest(word, [*KINDS, *by_group]) or KINDS)
        raise ConfigError(Problem(f"ls {word}: no such kind", "command line", suggestion))
    return kind


def _rows(kind: str) -> list[dict[str, str]]:
    """The options of the group, then what plug-ins registered under names that no file has."""
    rows = [
        {"name": option.name, "source": option.source, "description": option.description}
        for option in presets.described(KINDS[kind])
    ]
    if kind in ("models", "strategies", "datasets"):
        built_in = {"models": registry.MODELS, "strategies": registry.STRATEGIES, "datasets": registry.DATASETS}[kind]
        for name, path in registry.names(kind).items():
            if name not in built_in:
                rows.append({"name": name, "source": "plugin", "description": path})
    return rows


def _print_tables(found: dict[str, list[dict[str, str]]]) -> None:
    from rich.table import Table

    from parallelrun.report.screen import open_console

    console = open_console()
    for kind, rows in found.items():
        table = Table(title=kind, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("name", no_wrap=True)
        table.add_column("source", no_wrap=True)
        table.add_column("description", overflow="fold")
        for row in rows:
            table.add_row(row["name"], row["source"], row["description"])
        console.print(table)
        console.print()


def show(words: list[str]) -> int:
    """`parallelrun show <recipe> [key=value ...] [--json]`: the configuration it composes to."""
    if not words or "-h" in words or "--help" in words:
        print("usage: parallelrun show <recipe or file.yaml> [key=value ...] [--json]\n\nrecipes:")
        print("\n".join(f"  {option.name:<20} {option.description}" for option in presets.described("recipe")))
        return EXIT_OK if words else 2
    names = [word for word in words if "=" not in word and not word.startswith("-")]
    rest = [word for word in words if word not in names]
    if len(names) > 1:
        raise ConfigError(Problem(f"show {' '.join(names)}: one recipe at a time", "command line"))
    line = read([*(f"recipe={name}" for name in names), *rest])
    config = _composed(line)
    if line.json:
        from dataclasses import asdict

        from parallelrun.cli.compute import print_json

        print_json(asdict(config))
    else:
        from parallelrun.plan.freeze import freeze

        sys.stdout.write(freeze(config))
    return EXIT_OK


def _composed(line: Any) -> Any:
    from parallelrun.config import compose

    found: list[Any] = []
    prepared = compose.prepare(line.overrides, (), "run", line.trust)
    compose.run_hydra(prepared, lambda config: found.append(compose.composed(config, prepared)))
    return found[0].config
