"""`ls` lists the options of every group, the keys, the matrix of compositions; `show` prints a recipe, composed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from parallelrun.base import registry
from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli import help
from parallelrun.cli.argv import read
from parallelrun.cli.help import CELLS, KEYS, KINDS, ON_REQUEST, TRACKERS
from parallelrun.cli.json_output import print_json
from parallelrun.config import presets
from parallelrun.config.keys import known_keys, nearest


def ls(words: list[str]) -> int:
    """`parallelrun ls [kind] [--json]`."""
    parser = argparse.ArgumentParser(
        "parallelrun ls", description="List options with source and description, keys, or the matrix of compositions."
    )
    parser.add_argument("kind", nargs="?", default=None, help=", ".join([*KINDS, TRACKERS, *ON_REQUEST]))
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(words)
    if arguments.kind == CELLS:
        from parallelrun.cli.tools import cells

        cells.main(arguments.json)
        return EXIT_OK
    kinds = [*KINDS, TRACKERS] if arguments.kind is None else [_kind(arguments.kind)]
    special = {KEYS: _keys, TRACKERS: _trackers}
    rows_of_kind = {kind: special[kind]() if kind in special else _options(kind) for kind in kinds}
    if arguments.json:
        print_json(rows_of_kind)
    else:
        _print_tables(rows_of_kind)
    return EXIT_OK


def _kind(word: str) -> str:
    by_group = {**{group: kind for kind, group in KINDS.items()}, "tracker": TRACKERS}
    kind = by_group.get(word, word)
    if kind not in (*KINDS, TRACKERS, *ON_REQUEST):
        suggestion = " or ".join(
            f"ls {kind}" for kind in nearest(word, [*KINDS, TRACKERS, *ON_REQUEST, *by_group]) or KINDS
        )
        raise ConfigError(Problem(f"ls {word}: no such kind", "command line", suggestion))
    return kind


def _options(kind: str) -> list[dict[str, str]]:
    """The options of the group, then what plug-ins registered under names that no file has."""
    rows = [asdict(option) for option in presets.described(KINDS[kind])]
    return rows + (_plug_ins(kind) if kind in registry.BUILT_IN else [])


def _plug_ins(kind: str) -> list[dict[str, str]]:
    plugins = {name: path for name, path in registry.names(kind).items() if registry.is_plug_in(kind, name)}
    return [{"name": name, "source": "plugin", "description": path} for name, path in plugins.items()]


def _trackers() -> list[dict[str, str]]:
    """The trackers, each with the first line of its module's text."""
    texts = {name: str(registry.load(TRACKERS, name).__doc__).splitlines()[0] for name in registry.BUILT_IN[TRACKERS]}
    rows = [{"name": name, "source": "built-in", "description": text} for name, text in texts.items()]
    return rows + _plug_ins(TRACKERS)


def _keys() -> list[dict[str, str]]:
    """Every key that users type, with its values and its one-line help."""
    bounds = (("least", ">= "), ("above", "> "), ("most", "<= "), ("below", "< "))
    rows = []
    for key in known_keys().values():
        limits = [f"{sign}{getattr(key, name)}" for name, sign in bounds if getattr(key, name) is not None]
        plausible = f"{key.plausible[0]:g} to {key.plausible[1]:g} {key.unit}" if key.plausible else ", ".join(limits)
        values = " | ".join(key.choices) or f"{key.kind} {plausible}".strip()
        if not key.is_of_presets:
            rows.append({"name": key.name, "values": values, "description": key.help})
    return rows


def _print_tables(rows_of_kind: dict[str, list[dict[str, str]]]) -> None:
    from parallelrun.report.screen import open_console, table

    console = open_console()
    for kind, rows in rows_of_kind.items():
        names = ("name", "values" if kind == KEYS else "source", "description")
        drawn = table(*names, rule=False, title=kind, title_justify="left", padding=(0, 2, 0, 0))
        for column in drawn.columns[:2]:
            column.no_wrap = True
        for row in rows:
            drawn.add_row(*(row[name] for name in names))
        console.print(drawn, end="\n\n")


def show(words: list[str]) -> int:
    """`parallelrun show <recipe> [key=value ...] [--json]`: the configuration that it composes to."""
    if (code := help.answered(words, _show_help)) is not None:
        return code
    names = [word for word in words if "=" not in word and not word.startswith("-")]
    if len(names) > 1:
        raise ConfigError(Problem(f"show {' '.join(names)}: show one recipe at a time", "command line"))
    line = read([*(f"recipe={name}" for name in names), *(word for word in words if word not in names)])
    from parallelrun.config import compose

    composed, _ = compose.compose_once(compose.prepare(line.overrides, (), "run", line.trust))
    if line.json:
        print_json(asdict(composed.config))
    else:
        from parallelrun.planner.resolve.freeze import freeze

        sys.stdout.write(freeze(composed.config))
    return EXIT_OK


def _show_help() -> str:
    usage = "usage: parallelrun show <recipe or file.yaml> [key=value ...] [--json]"
    recipes = (f"  {option.name:<20} {option.description}" for option in presets.described("recipe"))
    return "\n".join([usage, "", "recipes:", *recipes])
