"""Opens whatever holds the weights of a model: a run, a checkpoint, an export, or a Hugging Face directory."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from parallelrun.base import registry
from parallelrun.base.errors import CheckpointError, ConfigError, Problem
from parallelrun.checkpoint.exchange.paths import absolute, checkpoint_at, has_files
from parallelrun.checkpoint.exchange.weights import CheckpointWeights, FileWeights, LoadedWeights, Weights, stored_names
from parallelrun.checkpoint.resume import CONFIG_FILE, saved_config
from parallelrun.config import from_hf
from parallelrun.config.kept_model import with_kept
from parallelrun.config.keys import named_code
from parallelrun.config.schema.model_schema import DatasetConfig, ModelConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.stored_tensors import files_of_keys
from parallelrun.models.hugging_face import Piece
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.resolve.resolve_config import spec_of

FUNCTION_KEYS = ("norm", "norm_eps", "norm_position", "activation", "position", "rope_theta", "rope_scaling",
                 "rope_factor", "bias", "window", "tied_embeddings", "rope_mscale", "rope_mscale_all_dim",
                 "global_period", "local_rope_theta", "sinks", "attention_softcap", "logit_softcap", "rope_truncate",
                 "query_pre_attn_scalar", "scaled_embedding")  # fmt: skip


@dataclass(frozen=True)
class StoredModel:
    """Weights with the model that they belong to. config: its `model`, and of a run all else too."""

    path: Path
    config: Config
    spec: ModelSpec
    weights: Weights


def open_source(path: str | os.PathLike[str], where: str, trust: bool = False) -> StoredModel:
    """Open a run, checkpoint, export or Hugging Face directory, and compare its tensors with its own configuration.

    where: the key or argument of the user's request, for messages. trust: the configuration may name code, which is run
    to build the model. Raises CheckpointError, ConfigError.
    """
    folder = absolute(path)
    if (folder / from_hf.CONFIG_FILE).is_file():
        return _checked(_of_hugging_face(folder), where)
    if has_files(folder):
        config = _saved(folder, folder, where, trust)
        spec = _spec(config, folder)
        return _checked(StoredModel(folder, config, spec, _plain(folder, spec)), where)
    return _checked(_of_checkpoint(folder, where, trust), where)


def initial_weights(config: Config, spec: ModelSpec) -> Weights | None:
    """The weights that `init.weights` names, checked against the model of `config`; None without it, or on resuming.

    Raises CheckpointError, ConfigError.
    """
    if config.init.weights is None or config.resume:
        return None
    where = "init.from"
    folder = absolute(config.init.weights)
    weights: Weights
    prefix = definitions.model(config).their_prefix
    if (folder / from_hf.CONFIG_FILE).is_file() and prefix is not None:
        weights = _same_names(config, spec, folder, prefix)
    elif (folder / from_hf.CONFIG_FILE).is_file():
        name, family, _, file = from_hf.family_at(folder)
        if name != config.model.name:
            message = f"{file} is of a {name}, and this run trains model={config.model.preset}"
            raise ConfigError(Problem(message, where, f"model.from_hf={folder}"))
        if problems := family.differences(config, spec):
            raise ConfigError(*(replace(problem, suggestion=f"model.from_hf={folder}") for problem in problems))
        weights = FileWeights(folder, spec, family.pieces(config, spec), family.constants(config, spec), family)
    elif has_files(folder):
        weights = _plain(folder, spec)
    else:
        weights = CheckpointWeights(*checkpoint_at(folder, where))
    weights.check(spec, where)
    return weights


def _same_names(config: Config, spec: ModelSpec, folder: Path, prefix: str) -> Weights:
    """The weights of a class of transformers: each rank reads its parts, unless the class stores its parameters in
    another form, in which transformers reads them for every rank as a whole."""
    pieces = [Piece(name, name.removeprefix(prefix)) for name in stored_names(spec, ())]
    if files_of_keys(folder).keys() >= {piece.key for piece in pieces}:
        return FileWeights(folder, spec, pieces, has_more=True)
    module = registry.load("models", config.model.name, "builder").trained_module(config, spec.vocab, folder)
    return LoadedWeights(folder, {prefix + name: parameter.detach() for name, parameter in module.named_parameters()})


def notes_on_initial(config: Config) -> list[str]:
    """Return notes on how this run's model differs from the one whose weights it starts from."""
    if config.init.weights is None or definitions.model(config).their_prefix is not None:
        return []  # none, or those of a class of transformers, which computes what it computes
    folder = absolute(config.init.weights)
    with suppress(ConfigError, CheckpointError):
        source = open_source(folder, "init.from")
        theirs, unread = source.config.model, source.weights.unread
        pairs = [(key, getattr(config.model, key), getattr(theirs, key)) for key in FUNCTION_KEYS]
        changed = [f"model.{key}={ours} (there {other})" for key, ours, other in pairs if ours != other]
        notes = [f"init.from: this run does not compute what {folder} does: {', '.join(changed)}"] if changed else []
        return notes + ([f"init.from: not read from {folder}: {', '.join(unread)}"] if unread else [])
    return []


def _of_hugging_face(folder: Path) -> StoredModel:
    _, family, _, _ = from_hf.family_at(folder)
    model = from_hf.filled(ModelConfig(from_hf=str(folder)))
    config = Config(model=model, dataset=DatasetConfig(name="synthetic"))  # it has the model's token ids
    spec = _spec(config, folder)
    pieces, constants = family.pieces(config, spec), family.constants(config, spec)
    return StoredModel(folder, config, spec, FileWeights(folder, spec, pieces, constants, family))


def _of_checkpoint(folder: Path, where: str, trust: bool) -> StoredModel:
    weights = CheckpointWeights(*checkpoint_at(folder, where))
    run = next((path for path in (weights.path, *weights.path.parents[:2]) if (path / CONFIG_FILE).is_file()), None)
    if run is None:
        message = f"{weights.path} is in no run directory: there is no {CONFIG_FILE} that describes its model"
        raise CheckpointError(Problem(message, where))
    config = _saved(run, weights.path, where, trust)
    vocab = _recorded_vocab(run)
    if vocab is not None:
        config = replace(config, model=replace(config.model, vocab=vocab))
    return StoredModel(weights.path, config, _spec(config, run), weights)


def _checked(source: StoredModel, where: str) -> StoredModel:
    source.weights.check(source.spec, where)
    return source


def _plain(folder: Path, spec: ModelSpec) -> FileWeights:
    """Safetensors files with one-device names."""
    return FileWeights(folder, spec, [Piece(name, name) for name in stored_names(spec, files_of_keys(folder))])


def _saved(folder: Path, path: Path, where: str, trust: bool) -> Config:
    config = saved_config(folder)
    if config is None:
        raise CheckpointError(Problem(f"{path} has neither {from_hf.CONFIG_FILE} nor {CONFIG_FILE}", where))
    if (code := named_code(config)) and not trust:
        message = f"{path} calls the user's own code ({', '.join(code.values())}), which is not loaded from here"
        raise ConfigError(Problem(message, where))
    return with_kept(config, folder)


def _recorded_vocab(run: Path) -> int | None:
    """The vocabulary that a run's plan.json records; the dataset that it follows may be gone."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        vocab = json.loads((run / "plan.json").read_bytes())["model"]["vocab"]
        return vocab if type(vocab) is int and vocab > 0 else None
    return None


def _spec(config: Config, folder: Path) -> ModelSpec:
    """The spec of a configuration's model. Raises ConfigError."""
    if config.model.vocab is not None:
        return definitions.model(config).make(config, config.model.vocab)
    problems: list[Problem] = []
    spec = spec_of(config, problems)
    if spec is None:
        raise ConfigError(*(problems or [Problem(f"{folder} describes no model that can be built", "model")]))
    return spec
