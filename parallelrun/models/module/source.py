"""From the module that other people's code builds to one with role layers, hashed dropout and our BatchNorm in it."""

from __future__ import annotations

import shlex
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import layers
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.module import lora, own_loss
from parallelrun.models.module.outputs import return_logits
from parallelrun.models.moe import own_experts
from parallelrun.models.vision.batch_norm import BatchNorm

REPLACED_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ROLES: dict[str, tuple[type, ...]] = {
    "column_parallel": (nn.Linear,),
    "row_parallel": (nn.Linear,),
    "head": (nn.Linear,),
    "embedding": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
    "per_head": (nn.Module,),
    own_experts.ROLE: (nn.Module,),
}


def build(config: Config, vocab: int) -> nn.Module:
    """The module on the current device, its initial values a function of `config.seed` alone. It returns its logits.

    Its BatchNorms take statistics over sets of samples that no plan changes, see `model.norm_samples`. Raises
    ConfigError for those that cannot, and for a module that has nothing to train.
    """
    builder = builder_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module: nn.Module = builder.make_module(config, vocab)
        lora.add(module, config, vocab, builder.title(config))
    problems = _replace_batch_norms(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        message = f"{builder.title(config)} has no parameter that is trained: all are frozen (requires_grad=False)"
        problems.append(Problem(message, "model.source", "leave requires_grad=True on some", kind="undefined"))
    if problems:
        raise ConfigError(*problems)
    if config.model.loss:
        own_loss.install(module, config)
    else:
        own_loss.accept_dicts(module)
        return_logits(module)
    return module


def builder_of(config: Config) -> Any:
    """The module with `make_module`, `roles_of` and `title` of a model that is built from other people's code."""
    return registry.load("models", config.model.name, "builder")


def _replace_batch_norms(module: nn.Module) -> list[Problem]:
    """Replace torch's BatchNorms by ours, which take over their values. Returns a problem for each that cannot be."""
    problems = []
    replaced: dict[int, nn.Module] = {}  # one that has two names stays one module
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(part, REPLACED_NORMS):
            continue
        reason = _unfit_norm(part) or ("" if name else " and nothing else")
        if reason:
            message = f"{name or 'the module itself'} is {with_article(type(part).__name__)}{reason}"
            fix = "affine, tracked BatchNorm inside a module"
            problems.append(Problem(message, "model.source", fix, kind="not_built"))
            continue
        if id(part) not in replaced:
            replaced[id(part)] = _batch_norm(part)
        module.set_submodule(name, replaced[id(part)])
    return problems


def _unfit_norm(part: Any) -> str:
    """Why one of torch's BatchNorms cannot be replaced; empty if it can. Statistics of evaluation are part of the model
    here, and a class of its own may compute anything."""
    if type(part) not in REPLACED_NORMS:
        return ", a class of its own"
    if part.running_mean is None or part.momentum is None:
        return " without a moving average of its statistics, which evaluation needs"
    return "" if part.affine else " without weights (affine=False)"


def _batch_norm(part: Any) -> BatchNorm:
    with torch.device("meta"):
        norm = BatchNorm(part.num_features, part.eps, part.momentum, torch.float32)
    norm.weight, norm.bias = part.weight, part.bias
    norm.running_mean = nn.Parameter(part.running_mean, requires_grad=False)
    norm.running_var = nn.Parameter(part.running_var, requires_grad=False)
    return norm


def build_with_roles(
    config: Config, vocab: int, device: str = "meta", compute_dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The user's module on `device`, with the role layers of `model.roles`."""
    with torch.device(device):
        module = build(config, vocab)
        apply_roles(module, config, compute_dtype)
    return module


def apply_roles(module: nn.Module, config: Config, compute_dtype: torch.dtype) -> None:
    """Replace the modules that `model.roles` names by role layers, which take over their Parameters, and nn.Dropout by
    dropout by hash. Raises ConfigError naming the layer or pattern."""
    roles = builder_of(config).roles_of(config, module)
    unmatched = dict(roles)
    parts = {name: part for name, part in module.named_modules() if name}
    for name, part in parts.items():
        pattern = next((pattern for pattern in roles if fnmatchcase(name, pattern)), None)
        if isinstance(part, lora.Factor):
            continue  # its role is that of its layer
        if pattern is not None:
            unmatched.pop(pattern, None)
            role = roles[pattern]
            _check_role(name, part, role)
            layer = _role_layer(part, role, compute_dtype)
            lora.carry(part, layer, role, config, partial(_role_layer, role=role, dtype=compute_dtype))
            module.set_submodule(name, layer)
        elif isinstance(part, layers.RoleLayer):  # the user's module has a role layer of ours itself
            part.compute_dtype = compute_dtype
        elif type(part) is nn.Dropout:
            site = f"module.{name}"
            module.set_submodule(name, HashDropout(part.p, config.seed, site, 0, compute_dtype))
    if unmatched:
        pattern = next(iter(unmatched))
        fitting = [name for name, part in parts.items() if isinstance(part, ROLES.get(unmatched[pattern], nn.Module))]
        message = f"model.roles: no module of {builder_of(config).title(config)} is called {pattern!r}"
        raise ConfigError(Problem(message, "model.roles", _roles_with(roles, pattern, fitting)))


def _roles_with(roles: dict[str, str], wrong: str, names: list[str]) -> str:
    """`model.roles={...}`, quoted for a shell, with `wrong` replaced by the most similar of `names`."""
    close = get_close_matches(wrong, names, n=1, cutoff=0.0)
    if not close:
        return "leave model.roles out"
    entries = (f'"{close[0] if name == wrong else name}": {role}' for name, role in roles.items())
    return shlex.quote(f"model.roles={{{', '.join(entries)}}}")


def _check_role(name: str, part: nn.Module, role: str) -> None:
    if role not in ROLES:
        message = f"model.roles: {role!r} (of {name}) is no layer role; the roles are {', '.join(ROLES)}"
        raise ConfigError(Problem(message, "model.roles"))
    reason = unfit(part, role)
    if reason:
        raise ConfigError(Problem(f"model.roles: {name} cannot be {role}: {reason}", "model.roles", kind="undefined"))


def _role_layer(part: nn.Module, role: str, dtype: torch.dtype) -> nn.Module:
    """The layer of ours with the role and the Parameters of `part`; `part` itself for a role of its weights alone."""
    if role in ("per_head", own_experts.ROLE):
        layers.mark_role(part, role)
        if role == own_experts.ROLE and next(part.parameters()).is_meta:
            own_experts.run_on_meta(part)
        return part
    layer: layers.RoleLayer
    source: Any = part
    bias = getattr(source, "bias", None) is not None
    with torch.device("meta"):
        if role == "column_parallel":
            layer = layers.ColumnLinear(source.in_features, {"": source.out_features}, bias, dtype)
        elif role == "row_parallel":
            layer = layers.RowLinear(source.in_features, source.out_features, bias, dtype)
        elif role == "head":
            layer = layers.VocabHead(source.in_features, source.out_features, dtype)
        elif role == "embedding":
            layer = layers.TokenEmbedding(source.num_embeddings, source.embedding_dim, dtype)
        else:
            kind = "layernorm" if isinstance(part, nn.LayerNorm) else "rmsnorm"
            eps = source.eps if source.eps is not None else torch.finfo(torch.float32).eps
            layer = layers.HiddenNorm(kind, source.normalized_shape[0], eps, bias, dtype)
    for key, parameter in part.named_parameters(recurse=False):
        setattr(layer, key, parameter)
    return layer


def unfit(part: nn.Module, role: str) -> str:
    """Why `part` cannot have `role`; empty if it can."""
    fitting = ROLES[role]
    if role == "per_head":
        return ""
    if role == own_experts.ROLE:
        return own_experts.unfit(part)
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
