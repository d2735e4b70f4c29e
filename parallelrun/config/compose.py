"""Overrides -> Config, through Hydra, once. The only module that imports Hydra."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from parallelrun.config import config_folder, presets, recipe_result, recipes, sweeps
from parallelrun.config.keys import nearest
from parallelrun.config.overrides import Override, unquoted
from parallelrun.config.recipes import Recipe
from parallelrun.config.schema import Config, DatasetConfig, ModelConfig, StrategyConfig
from parallelrun.errors import ConfigError, Problem


@dataclass(frozen=True)
class Composed:
    """A configuration and how it came about. given: the keys that the user or a recipe set; overrides: as typed."""

    config: Config
    given: frozenset[str]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """argv for Hydra, and what is needed to tell afterwards what was given."""

    argv: tuple[str, ...]
    recipe_keys: Mapping[str, frozenset[str]]
    shown: Mapping[str, str]  # the name that a recipe file got -> the path that the user typed
    untrusted: Mapping[str, str] = field(default_factory=dict)  # recipe that may not name code -> file to blame
    typed: frozenset[str] = frozenset()  # keys with a value of the user's own


def prepare(overrides: Sequence[Override], flags: Sequence[str], verb: str, trust: bool) -> Prepared:
    """Register the schema and the chosen recipes, and write Hydra's argv. Raises ConfigError for a bad recipe."""
    sweeps.check_points(overrides)
    store = _store_with_schema()
    files = recipes.find() if flags or any(override.key == "recipe" for override in overrides) else {}
    own_files = config_folder.recipes(flags)
    shown: dict[str, str] = {}
    chosen: list[str] = []
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
                files[file.name] = file
                shown[file.name] = value
                value = file.name
            names.append(value)
        chosen += names
        argv.append(f"{override.sign}recipe={','.join(names)}")
    loaded = _load_all(files, chosen, trust)
    nodes = {name: _node(recipe) for name, recipe in loaded.items()}
    for name, node in nodes.items():
        store.store(group="recipe", name=name, node=node, package="_global_", provider="parallelrun")
    if flags:  # Hydra may be asked what there is
        for name in files.keys() - loaded.keys():
            store.store(group="recipe", name=name, node={}, package="_global_", provider="parallelrun")
    if "--hydra-help" in flags:  # it knows Hydra's own configuration only
        argv = list(flags)
    families = {name: _family(name, loaded, ()) for name in loaded}
    keys = {name: frozenset().union(*(loaded[one].keys for one in family)) for name, family in families.items()}
    for override in overrides:
        if override.is_own_group:
            keys |= config_folder.keys(flags, override.key)
    untrusted = _untrusted(families, loaded, nodes, trust)
    typed = frozenset(override.key for override in overrides if "${" not in override.value)
    return Prepared(tuple(argv), keys, shown, untrusted, typed)


def _store_with_schema() -> ConfigStore:
    """Hydra's store of configurations, with ours registered once per process: a fifth of the time of composing."""
    store = ConfigStore.instance()
    if "base_schema.yaml" not in store.repo:
        store.store(name="base_schema", node=Config)
    return store


def prepare_completion(words: Sequence[str]) -> Prepared:
    """For the shell's TAB: every recipe has a name, and none is opened."""
    store = _store_with_schema()
    for name in recipes.find():
        store.store(group="recipe", name=name, node={}, package="_global_", provider="parallelrun")
    return Prepared(tuple(words), {}, {})


def run_hydra(prepared: Prepared, task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra answer its flags, or compose and call `task`, once for every point of a sweep. Raises what Hydra does.

    Hydra's own errors come up as exceptions (HYDRA_FULL_ERROR), so that `cli.errors` can word them.
    """
    _check_hydra(prepared)
    main = hydra.main(config_path="pkg://parallelrun.conf", config_name="config", **_version_base())
    with _process_state(prepared.argv):
        main(task)()


def _check_hydra(prepared: Prepared) -> None:
    """Raise ConfigError where an untrusted recipe changes Hydra's own configuration, which names code and folders.

    Hydra instantiates its launcher and sweeper before it starts a task of ours, so this is checked before Hydra runs.
    A primary configuration of the user's own (`--config-name`) cannot be composed here; its recipes' texts are checked.
    """
    if not prepared.untrusted or _flag_values(prepared.argv, "--config-name", "-cn", "--config-path", "-cp"):
        return
    folders = ",".join(f"'file://{os.path.abspath(one)}'" for one in _flag_values(prepared.argv, "--config-dir", "-cd"))
    own = [word for word in prepared.argv if word.startswith(("hydra.", "hydra/", "+hydra", "++hydra"))]
    own += [f"hydra.searchpath=[{folders}]"] if folders else []
    with hydra.initialize_config_module("parallelrun.conf", **_version_base()):
        plain = _hydra_settings(own)
        for name, where in prepared.untrusted.items():
            if _hydra_settings([*own, f"recipe={name}"]) != plain:
                raise ConfigError(Problem("a recipe may not set hydra", where, command=recipe_result.TRUST))


def _flag_values(argv: Sequence[str], *names: str) -> list[str]:
    """The values of a flag of Hydra's, written as `--flag value` or `--flag=value`."""
    apart = [value for flag, value in pairwise(argv) if flag in names]
    return apart + [word.partition("=")[2] for word in argv if word.partition("=")[0] in names and "=" in word]


def _hydra_settings(overrides: list[str]) -> dict[str, Any]:
    """Hydra's own configuration under some overrides, without what merely repeats them."""
    node = hydra.compose("config", overrides, return_hydra_config=True)["hydra"]
    settings = cast(dict[str, Any], OmegaConf.to_container(node, resolve=False))
    settings["job"].pop("override_dirname")
    return {key: value for key, value in settings.items() if key not in ("overrides", "runtime")}


def compose_plainly(prepared: Prepared) -> tuple[Composed, Path | None]:
    """(what `run_hydra` composes in a single run without flags of Hydra's, the run directory asked for).

    Half the time, and no directory made: `hydra.main` composes twice, once only to learn whether it is a sweep.
    """
    with hydra.initialize_config_module("parallelrun.conf", **_version_base()):
        task_config = hydra.compose("config", list(prepared.argv), return_hydra_config=True)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(task_config)
    try:
        with read_write(task_config), open_dict(task_config):
            del task_config["hydra"]
        return composed(task_config, prepared), run_directory()
    finally:
        HydraConfig.instance().cfg = before


def _version_base() -> dict[str, Any]:
    """Hydra 1.3 must be told not to behave like 1.1; 1.4 warns when it is told."""
    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}


def composed(task_config: DictConfig, prepared: Prepared) -> Composed:
    """The Config of the task that Hydra has just started, checked against the schema."""
    config = OmegaConf.to_object(task_config)
    if not isinstance(config, Config):
        what = "the primary configuration must have base_schema first in its defaults"
        raise ConfigError(Problem(what, "config.yaml"))
    task = HydraConfig.get().overrides.task
    given = {override.lstrip("+~").partition("=")[0].partition("@")[0] for override in task} - {"verb"}
    recipe = str(HydraConfig.get().runtime.choices.get("recipe"))
    if recipe != "None" and recipe not in prepared.recipe_keys:
        raise ConfigError(Problem(f"recipe={recipe} was not read; choose it on the command line", "recipe"))
    keys = prepared.recipe_keys.get(recipe, frozenset())
    if recipe in prepared.untrusted:
        problems = recipe_result.check(config, keys, prepared.typed, prepared.untrusted[recipe])
        if problems:
            raise ConfigError(*problems)
    given |= keys
    for group, option in HydraConfig.get().runtime.choices.items():
        given |= prepared.recipe_keys.get(f"{group}={option}", frozenset())
    config = _titled(config, HydraConfig.get().runtime.choices)
    config, given = _fold_path(_with_own_choices(config, given), given)
    if config.strategy.router and "model.own_router" not in given and _preset_has_router():
        config = replace(config, model=replace(config.model, own_router=True))
    return Composed(config, frozenset(given), tuple(point_overrides(prepared)))


def sweeping() -> bool:
    """Whether the running task is a point of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def point_number() -> int:
    """The number of the running point of a sweep, from 0."""
    return int(HydraConfig.get().job.num)


def point_overrides(prepared: Prepared) -> list[str]:
    """The running point's overrides, as the user would type them; nothing about the sweep itself."""
    task = HydraConfig.get().overrides.task
    return [_as_typed(text, prepared.shown) for text in task if not text.startswith(("verb=", "sweep."))]


def run_directory() -> Path | None:
    """The directory a user asked for with `hydra.run.dir=...`, else None."""
    directory = str(HydraConfig.get().run.dir)
    return None if directory == "." else Path(directory).expanduser()


def _as_typed(text: str, shown: Mapping[str, str]) -> str:
    key, _, value = text.partition("=")
    if key == "recipe":
        return f"recipe={shown.get(value, value)}"
    return f"{key.removeprefix('++')}={unquoted(value)}"


def _with_own_choices(config: Config, given: Set[str]) -> Config:
    """The dataset and the learning rate that the model's preset names, where neither the user nor a recipe chose."""
    model = config.model
    if model.suited_lr is not None and not given & {"optimizer", "optimizer.name", "optimizer.lr"}:
        config = replace(config, optimizer=replace(config.optimizer, lr=model.suited_lr))
    if model.dataset is None or given & {"dataset", "dataset.name"}:
        return config
    own = {
        key: value for key, value in presets.values("dataset", model.dataset).items() if f"dataset.{key}" not in given
    }
    kept = {key.partition(".")[2] for key in given if key.startswith("dataset.")}
    asked = {key: getattr(config.dataset, key) for key in kept}
    return replace(config, dataset=replace(DatasetConfig(), **own, **asked))


def _preset_has_router() -> bool:
    """Whether the file of the chosen model says how tokens are routed: ours, or of a folder that the user named."""
    runtime = HydraConfig.get().runtime
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    files = [folder / "model" / f"{runtime.choices.get('model')}.yaml" for folder in (presets.folder(), *folders)]
    file = next((file for file in files if file.is_file()), None)
    return file is not None and "router" in yaml.safe_load(file.read_text(encoding="utf-8"))


def _titled(config: Config, choices: Mapping[str, Any]) -> Config:
    """A model or strategy of the user's own folder that does not say its name has its file's."""
    model, strategy = config.model, config.strategy
    if choices.get("model") not in presets.options("model") and model.preset == ModelConfig().preset:
        model = replace(model, preset=str(choices["model"]))
    if choices.get("strategy") not in presets.options("strategy") and strategy.name == StrategyConfig().name:
        strategy = replace(strategy, name=str(choices["strategy"]))
    return replace(config, model=model, strategy=strategy)


def _fold_path(config: Config, given: set[str]) -> tuple[Config, set[str]]:
    """`path` is a short name of dataset.path; a recipe may use it too."""
    if config.path is None:
        return config, given
    if config.dataset.path not in (None, config.path):
        what = f"path={config.path} contradicts dataset.path={config.dataset.path}"
        raise ConfigError(Problem(what, "path", "one of the two", kind="contradiction"))
    dataset = replace(config.dataset, path=os.path.expanduser(config.path))
    return replace(config, path=None, dataset=dataset), (given - {"path"}) | {"dataset.path"}


def _load_all(files: Mapping[str, recipes.RecipeFile], chosen: Sequence[str], trust: bool) -> dict[str, Recipe]:
    """The chosen recipes and those they build on; the others are not even opened."""
    loaded: dict[str, Recipe] = {}
    wanted = [name for name in chosen if name.lower() != "null"]
    while wanted:
        name = wanted.pop()
        if name in loaded:
            continue
        if name not in files:
            close = nearest(name, files) or list(files)[:6]
            suggestion = ", ".join(f"recipe={option}" for option in close)
            raise ConfigError(Problem(f"recipe={name}: no such recipe", "recipe", suggestion, "parallelrun ls recipes"))
        loaded[name] = recipes.load(files[name], trust)
        wanted += loaded[name].parents
    return loaded


def _family(name: str, loaded: Mapping[str, Recipe], above: tuple[str, ...]) -> frozenset[str]:
    """The recipe and all that it builds on. Raises ConfigError for a circle."""
    if name in above:
        raise ConfigError(Problem(f"recipes build on each other in a circle: {' -> '.join((*above, name))}", "recipe"))
    return frozenset({name}).union(*(_family(parent, loaded, (*above, name)) for parent in loaded[name].parents))


def _node(recipe: Recipe) -> DictConfig:
    try:
        node = OmegaConf.create(recipe.text)
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        what = f"not readable: {str(error).strip().splitlines()[0]}"
        raise ConfigError(Problem(what, recipe.file.shown)) from error
    assert isinstance(node, DictConfig)
    return node


def _untrusted(
    families: Mapping[str, Set[str]], loaded: Mapping[str, Recipe], nodes: Mapping[str, DictConfig], trust: bool
) -> dict[str, str]:
    """Each recipe that is not trusted, or builds on one, with that one's file. Raises ConfigError where one grows."""
    found = {}
    for name, family in families.items():
        files = [loaded[one].file for one in sorted(family) if not loaded[one].file.is_trusted(trust)]
        if files:
            found[name] = loaded[name].file.shown if loaded[name].file in files else files[0].shown
            plain = [cast(dict[str, Any], OmegaConf.to_container(nodes[one], resolve=False)) for one in family]
            problems = recipe_result.check_growth(plain, found[name])
            if problems:
                raise ConfigError(*problems)
    return found


@contextmanager
def _process_state(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv and one environment variable and sets up logging; all are given back as they were."""
    old_argv, old_full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    loggers = [logging.getLogger(name) for name in (None, "hydra")]  # Hydra's own handlers hold today's stdout
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
        if old_full is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = old_full
