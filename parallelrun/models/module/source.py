"""From `model.source` to a module with role layers in it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelrun import user_code
from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, Problem, with_article
from parallelrun.models import layers
from parallelrun.models.vision.batch_norm import BatchNorm

SAMPLE_SETS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # replaced by our BatchNorm


def load(source: str | None) -> Callable[..., nn.Module]:
    """The function that `file.py:function` or `package.module:function` names. Raises ConfigError."""
    if not source or ":" not in source:
        what = f"model.source={source}: it must name a function that builds an nn.Module"
        raise ConfigError(Problem(what, "model.source", "model.source=./net.py:build"))
    place, _, name = source.rpartition(":")
    try:
        module = _from_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the user's code: whatever it raises
        raise _failed(f"model.source={source}", error) from error
    if not callable(getattr(module, name, None)):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)]
        what = f"model.source={source}: {place} has no function {name!r}"
        close = get_close_matches(name, known) or known[:5]
        fix = " or ".join(f"model.source={place}:{one}" for one in close)
        raise ConfigError(Problem(what, "model.source", fix))
    return getattr(module, name)


def _failed(what: str, error: Exception) -> ConfigError:
    """What the user's code has raised, with the lines of theirs that it went through, the innermost first."""
    frames = " <- ".join(reversed(user_code.frames(error)))
    said = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return ConfigError(Problem(f"{what}: {said}", frames or "model.source"))


def build(config: Config, vocab: int) -> nn.Module:
    """The user's module on the current device, its initial values a function of `config.seed` alone.

    Its BatchNorms take statistics over sets of samples that no plan changes, see `model.norm_samples`. Raises
    ConfigError for those that cannot, and for a module with nothing to train.
    """
    make, model = load(config.model.source), config.model
    offered = {"vocab": vocab, "seq": model.seq, "hidden": model.hidden, "layers": model.layers, "heads": model.heads}
    named = inspect.signature(make).parameters
    arguments = {key: value for key, value in offered.items() if key in named} | dict(model.arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            module = make(**arguments)
        except Exception as error:  # the user's code: whatever it raises
            raise _failed(f"{model.source} fails", error) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            Problem(f"{model.source} gave {with_article(type(module).__name__)}, not an nn.Module", "model.source")
        )
    problems = _replace_batch_norms(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        what = f"{model.source} has no parameter that is trained: all are frozen (requires_grad=False)"
        problems.append(Problem(what, "model.source", "leave requires_grad=True on some", kind="undefined"))
    if problems:
        raise ConfigError(*problems)
    return module


def _replace_batch_norms(module: nn.Module) -> list[Problem]:
    """Put BatchNorms over named sets of samples in place of torch's, which keep their values; those that cannot be."""
    problems = []
    made: dict[int, nn.Module] = {}  # one that has two names stays one
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(part, SAMPLE_SETS):
            continue
        reason = _unfit_norm(part)
        if reason or not name:
            what = (
                f"{name or 'the module itself'} is {with_article(type(part).__name__)}{reason or ' and nothing else'}"
            )
            problems.append(
                Problem(what, "model.source", "affine, tracked BatchNorm inside a module", kind="not_built")
            )
            continue
        if id(part) not in made:
            made[id(part)] = _batch_norm(part)
        _replace(module, name, made[id(part)])
    return problems


def _unfit_norm(part: Any) -> str:
    """Why a BatchNorm of torch's cannot be replaced; empty if it can."""
    if type(part) not in SAMPLE_SETS:
        return ", a class of its own"
    if part.running_mean is None or part.momentum is None:
        return " without a moving average of its statistics, which evaluation needs"
    return "" if part.affine else " without weights (affine=False)"


def _batch_norm(part: Any) -> BatchNorm:
    with torch.device("meta"):
        made = BatchNorm(part.num_features, part.eps, part.momentum, torch.float32)
    made.weight, made.bias = part.weight, part.bias
    made.running_mean = nn.Parameter(part.running_mean, requires_grad=False)
    made.running_var = nn.Parameter(part.running_var, requires_grad=False)
    return made


def apply_roles(module: nn.Module, config: Config, compute_dtype: torch.dtype) -> None:
    """Put role layers in place of the modules that `model.roles` names (they take over the Parameters), and dropout by
    hash in place of nn.Dropout. Raises ConfigError naming the layer or pattern."""
    unmatched = dict(config.model.roles)
    parts = {name: part for name, part in module.named_modules() if name}
    for name, part in parts.items():
        pattern = next((pattern for pattern in config.model.roles if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            unmatched.pop(pattern, None)
            _replace(module, name, _role_layer(name, part, config.model.roles[pattern], compute_dtype))
        elif isinstance(part, layers.RoleLayer):  # the user's own use of one
            part.compute_dtype = compute_dtype
        elif type(part) is nn.Dropout:
            site = f"module.{name}"
            _replace(module, name, layers.HashDropout(part.p, config.seed, site, 0, compute_dtype))
    if unmatched:
        pattern = next(iter(unmatched))
        fitting = [name for name, part in parts.items() if isinstance(part, ROLES.get(unmatched[pattern], nn.Module))]
        what = f"model.roles: no module of {config.model.source} is called {pattern!r}"
        raise ConfigError(Problem(what, "model.roles", _roles_with(config, pattern, fitting)))


def _roles_with(config: Config, wrong: str, names: list[str]) -> str:
    """`model.roles={...}` with the module most like `wrong` in its place, as a shell takes it."""
    close = get_close_matches(wrong, names, n=1, cutoff=0.0)
    if not close:
        return "leave model.roles out"
    roles = {close[0] if name == wrong else name: role for name, role in config.model.roles.items()}
    return shlex.quote("model.roles={" + ", ".join(f'"{name}": {role}' for name, role in roles.items()) + "}")


ROLES: dict[str, tuple[type, ...]] = {
    "column_parallel": (nn.Linear,),
    "row_parallel": (nn.Linear,),
    "head": (nn.Linear,),
    "embedding": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
}


def _role_layer(name: str, part: nn.Module, role: str, dtype: torch.dtype) -> layers.RoleLayer:
    if role not in ROLES:
        what = f"model.roles: {role!r} (of {name}) is no layer role; the roles are {', '.join(ROLES)}"
        raise ConfigError(Problem(what, "model.roles"))
    reason = _unfit(part, role)
    if reason:
        raise ConfigError(Problem(f"model.roles: {name} cannot be {role}: {reason}", "model.roles", kind="undefined"))
    made: Any
    source: Any = part
    with torch.device("meta"):
        if role == "column_parallel":
            made = layers.ColumnLinear(source.in_features, {"": source.out_features}, source.bias is not None, dtype)
        elif role == "row_parallel":
            made = layers.RowLinear(source.in_features, source.out_features, source.bias is not None, dtype)
        elif role == "head":
            made = layers.VocabHead(source.in_features, source.out_features, dtype)
        elif role == "embedding":
            made = layers.TokenEmbedding(source.num_embeddings, source.embedding_dim, dtype)
        else:
            kind = "layernorm" if isinstance(part, nn.LayerNorm) else "rmsnorm"
            eps = source.eps if source.eps is not None else torch.finfo(torch.float32).eps
            bias = getattr(source, "bias", None) is not None
            made = layers.HiddenNorm(kind, source.normalized_shape[0], eps, bias, dtype)
    for key, parameter in part.named_parameters(recurse=False):
        setattr(made, key, parameter)
    return made


def _unfit(part: nn.Module, role: str) -> str:
    """Why `part` cannot take `role`; empty if it can."""
    fitting = ROLES[role]
    if type(part) not in fitting:
        return f"it is {with_article(type(part).__name__)}, not a {' or '.join(kind.__name__ for kind in fitting)}"
    source: Any = part
    if role == "head" and source.bias is not None:
        return "a head has no bias; build it with bias=False"
    if role == "embedding" and (source.padding_idx is not None or source.max_norm is not None or source.sparse):
        return "padding_idx, max_norm and sparse are not supported"
    if role == "norm" and (len(source.normalized_shape) != 1 or source.weight is None):
        return "it must normalise the last dim and have a weight"
    return ""


def _replace(root: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, layer)


def _from_file(path: Path) -> Any:
    """Import a file under a name of its own; its folder is on the path meanwhile, for what lies beside it."""
    path = path.resolve()
    found = importlib.util.spec_from_file_location(f"parallelrun_user_{path.stem}", path)
    if found is None or found.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
