"""Overrides -> Config, through Hydra. The only module that runs Hydra."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import from_hf, hydra_settings, hydra_task, presets, short_names, sweeps, values
from parallelrun.config.overrides import Override
from parallelrun.config.recipes import recipe_files as recipes
from parallelrun.config.recipes import untrusted
from parallelrun.config.recipes.recipe_files import Recipe
from parallelrun.config.schema.model_schema import DatasetConfig, ModelConfig
from parallelrun.config.schema.run_schema import Config, StrategyConfig
from parallelrun.config.schema.strategy_keys import complete_class

_SCHEMA = "base_schema"
# Groups of Hydra's own that a single run without Hydra flags does not use; without them, it composes a third faster.
_UNUSED = tuple(f"hydra/{group}=[]" for group in (
    "env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output", "sweeper",
))  # fmt: skip


@dataclass(frozen=True)
class Composed:
    """A configuration and its origin. given: the keys that the user or a recipe set; overrides: as typed."""

    config: Config
    given: frozenset[str]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """argv for Hydra, and the facts about recipes and overrides that are needed after composition."""

    argv: tuple[str, ...]
    recipe_keys: Mapping[str, frozenset[str]]
    shown: Mapping[str, str]  # our name for a recipe file -> the path that the user typed
    untrusted: Mapping[str, str] = field(default_factory=dict)  # recipe that may not name code -> file to blame
    typed: frozenset[str] = frozenset()  # keys whose values the user typed
    num_points: int | None = None  # of a sweep, if it is known


def prepare(overrides: Sequence[Override], flags: Sequence[str], verb: str, trust: bool) -> Prepared:
    """Register the schema and the chosen recipes, and write Hydra's argv. Raises ConfigError for a bad recipe."""
    unknown = [hydra_settings.unknown_key(override.key) for override in overrides if override.is_hydra]
    if problems := [problem for problem in unknown if problem]:
        raise ConfigError(*problems)
    points = sweeps.num_points(overrides)
    files = recipes.find() if flags or any(override.key == "recipe" for override in overrides) else {}
    words = [*flags, *(override.text for override in overrides if override.is_hydra)]
    own_files = presets.user_recipes(words)
    shown: dict[str, str] = {}
    selected: list[str] = []
    argv = [*flags, f"verb={verb}"]
    for override in overrides:
        if override.key != "recipe":
            argv.append(override.hydra())
            continue
        names = []
        for value in sweeps.recipes_of(override, {**own_files, **files}):
            own = own_files.get(value) if value not in files else None  # a built-in recipe cannot be shadowed
            if own or recipes.is_path(value):
                file = recipes.at_path(str(own.path) if own else value)
                files[file.name], shown[file.name] = file, value
                value = file.name
            names.append(value)
        selected += names
        argv.append(f"{override.sign}recipe={','.join(names)}")
    loaded = recipes.load_all(files, selected, trust)
    nodes = {name: _node(recipe) for name, recipe in loaded.items()}
    unused: dict[str, Any] = dict.fromkeys(files if flags else ())  # Hydra's flags may list all recipes
    _register({**unused, **nodes}, argv)
    if "--hydra-help" in flags:  # it understands no overrides
        argv = list(flags)
    families = {name: recipes.family(name, loaded) for name in loaded}
    keys = {name: frozenset().union(*(loaded[member].keys for member in family)) for name, family in families.items()}
    for override in overrides:
        if override.is_own_group:
            keys |= presets.user_keys(words, override.key)
    strangers = _untrusted(families, loaded, nodes, trust)
    typed = frozenset(override.key for override in overrides if "${" not in override.value)
    return Prepared(tuple(argv), keys, shown, strangers, typed, points)


def prepare_completion(words: Sequence[str]) -> Prepared:
    """For Hydra's shell completion: recipes have names, and none is opened."""
    _register(dict.fromkeys(recipes.find()), words)
    return Prepared(tuple(words), {}, {})


def _register(nodes: Mapping[str, Any], argv: Sequence[str]) -> None:
    """Give Hydra the schema, the user's own clusters and these recipes by name; those of an earlier composition are
    forgotten. None: a recipe whose contents nobody will ask for. argv: a cluster that it names must be readable."""
    store, schema = ConfigStore.instance(), complete_class()
    stored: Any = store.repo.get(f"{_SCHEMA}.yaml")
    if stored is None or OmegaConf.get_type(stored.node) is not schema:
        store.store(name=_SCHEMA, node=schema)
    for group in ("recipe", presets.CLUSTER):
        store.repo.pop(group, None)
    for name, node in nodes.items():
        store.store(name=name, node={} if node is None else node, group="recipe", package="_global_")
    for path in presets.own_clusters().glob("*.yaml"):
        try:
            if presets.own_file(presets.CLUSTER, path.stem):
                store.store(name=path.stem, node=OmegaConf.load(path), group=presets.CLUSTER)
        except (OSError, ValueError, yaml.YAMLError):
            if any(path.stem in word for word in argv):
                raise


def run_hydra(prepared: Prepared, task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra answer its flags, or compose and call `task`, once for every point of a sweep.

    Raises Hydra's own exceptions (HYDRA_FULL_ERROR); `cli.errors` rewords them.
    """
    hydra_settings.check(prepared.argv, prepared.untrusted)
    main = hydra.main(config_path="pkg://parallelrun.conf", config_name="config", **hydra_settings.VERSION_BASE)
    with _process_state(prepared.argv):
        main(task)()


def compose_once(prepared: Prepared) -> tuple[Composed, Path | None]:
    """(the configuration of a single run without Hydra flags, the run directory asked for).

    Takes a third of the time of `run_hydra` and creates no directory: `hydra.main` composes twice, first to detect a
    sweep.
    """
    keys = {word.lstrip("+~") for word in prepared.argv}.union(*prepared.recipe_keys.values())
    words = [*prepared.argv, *(() if any(key.startswith("hydra") for key in keys) else _UNUSED)]
    with hydra.initialize_config_module("parallelrun.conf", **hydra_settings.VERSION_BASE):
        task_config = hydra.compose("config", words, return_hydra_config=True)
    with hydra_settings.as_running(task_config):
        with read_write(task_config), open_dict(task_config):
            del task_config["hydra"]
        return composed(task_config, prepared), hydra_task.run_directory()


def composed(task_config: DictConfig, prepared: Prepared) -> Composed:
    """The Config of the task that Hydra has just started, checked against the schema."""
    config = OmegaConf.to_object(task_config)
    if not isinstance(config, Config):
        cause = "the primary configuration must have base_schema first in its defaults"
        raise ConfigError(Problem(cause, "config.yaml"))
    if problems := values.of_interpolations(config):
        raise ConfigError(*problems)
    hydra_config = HydraConfig.get()
    hydra_settings.refuse_chdir(hydra_config)
    choices = hydra_config.runtime.choices
    names = (text.lstrip("+~").partition("=")[0].partition("@")[0] for text in hydra_config.overrides.task)
    user_keys = set(names) - {"verb"}
    recipe = str(choices.get("recipe"))
    if recipe != "None" and recipe not in prepared.recipe_keys:
        cause = f"recipe={recipe} was not checked: a recipe must be chosen on the command line"
        raise ConfigError(Problem(cause, "recipe"))
    keys = prepared.recipe_keys.get(recipe, frozenset())
    if recipe in prepared.untrusted:
        problems = untrusted.check(config, keys, prepared.typed, prepared.untrusted[recipe])
        if problems:
            raise ConfigError(*problems)
    user_keys |= keys
    for group, option in choices.items():
        user_keys |= prepared.recipe_keys.get(f"{group}={option}", frozenset())
    config = _with_file_names(config, choices)
    config = replace(config, model=from_hf.filled(config.model, user_keys))
    config, user_keys = short_names.fold(_with_choices_of_model(config, user_keys), user_keys)
    if config.strategy.router and "model.own_router" not in user_keys and _preset_has_router():
        config = replace(config, model=replace(config.model, own_router=True))
    overrides = tuple(hydra_task.point_overrides(prepared.shown))
    return Composed(config, frozenset(user_keys), overrides)


def _with_choices_of_model(config: Config, user_keys: Set[str]) -> Config:
    """`config` with the dataset and learning rate of the model's preset, unless the user or a recipe chose them."""
    model = config.model
    if model.suited_lr is not None and not user_keys & {"optimizer", "optimizer.name", "optimizer.lr"}:
        config = replace(config, optimizer=replace(config.optimizer, lr=model.suited_lr))
    if model.dataset is None or user_keys & {"dataset", "dataset.name"}:
        return config
    own = {key.partition(".")[2] for key in user_keys if key.startswith("dataset.")}
    fields = {**presets.values("dataset", model.dataset), **{key: getattr(config.dataset, key) for key in own}}
    return replace(config, dataset=replace(DatasetConfig(), **fields))


def _preset_has_router() -> bool:
    """Whether the file of the chosen model, ours or of a folder of the user's, sets the router."""
    runtime = HydraConfig.get().runtime
    folders = [Path(place.path) for place in runtime.config_sources if place.schema == "file"]
    files = [folder / "model" / f"{runtime.choices.get('model')}.yaml" for folder in (presets.folder(), *folders)]
    file = next((file for file in files if file.is_file()), None)
    return file is not None and "router" in yaml.safe_load(file.read_text(encoding="utf-8"))


def _with_file_names(config: Config, choices: Mapping[str, Any]) -> Config:
    """`config` in which a user's own model or strategy without a name is named after its file."""
    model, strategy = config.model, config.strategy
    if choices.get("model") not in presets.options("model") and model.preset == ModelConfig().preset:
        model = replace(model, preset=str(choices["model"]))
    if choices.get("strategy") not in presets.options("strategy") and strategy.name == StrategyConfig().name:
        strategy = replace(strategy, name=str(choices["strategy"]))
    return replace(config, model=model, strategy=strategy)


def _node(recipe: Recipe) -> DictConfig:
    try:
        node = cast(DictConfig, OmegaConf.create(recipe.text))
        node.pop("about", None)  # the recipe's words about itself are no part of the run
        return node
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        cause = f"not readable: {str(error).strip().splitlines()[0]}"
        raise ConfigError(Problem(cause, recipe.file.shown)) from error


def _untrusted(
    families: Mapping[str, Set[str]], loaded: Mapping[str, Recipe], nodes: Mapping[str, DictConfig], trust: bool
) -> dict[str, str]:
    """Each recipe that is not trusted, or builds on one, with that one's file. Raises ConfigError."""
    blamed = {}
    for name, family in families.items():
        files = [loaded[member].file for member in sorted(family) if not loaded[member].file.is_trusted(trust)]
        if files:
            blamed[name] = loaded[name].file.shown if loaded[name].file in files else files[0].shown
            plain = [cast(dict[str, Any], OmegaConf.to_container(nodes[member], resolve=False)) for member in family]
            problems = untrusted.check_growth(plain, blamed[name])
            if problems:
                raise ConfigError(*problems)
    return blamed


@contextmanager
def _process_state(argv: Sequence[str]) -> Iterator[None]:
    """Give Hydra our argv and environment variable, and restore them and the logging that it sets up."""
    old_argv, old_full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    loggers = [logging.getLogger(name) for name in (None, "hydra")]  # Hydra's own handlers keep a reference to stdout
    old_logging = [(logger.level, list(logger.handlers)) for logger in loggers]
    sys.argv = ["parallelrun", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        for logger, (level, handlers) in zip(loggers, old_logging):
            logger.setLevel(level)
            logger.handlers[:] = handlers
        sys.argv = old_argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if old_full is not None:
            os.environ["HYDRA_FULL_ERROR"] = old_full
