"""Facts about each optimizer without torch: the keys it reads, what it updates, the state it keeps, the rate's scale.

`optimizer.lr_scale=linear` multiplies the learning rate by the number of data replicas (Goyal et al. 2017; Horovod's
examples). The single-device reference keeps the resulting number: it is a setting of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config, OptimizerConfig
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import LayerSpec, ModelSpec, ParameterSpec

LR_SCALE = "optimizer.lr_scale"
LINEAR = "linear"
ADAMW, MUON = "adamw", "muon"


@dataclass(frozen=True)
class OptimizerKind:
    """own_keys: the keys of `optimizer` that not every optimizer reads. num_states: state tensors per weight.
    state_names: torch's names of the state of one weight. elementwise: an element's update depends on no other's."""

    own_keys: tuple[str, ...]
    state_names: frozenset[str]
    num_states: Callable[[OptimizerConfig], int]
    elementwise: bool = True


OPTIMIZERS = {
    ADAMW: OptimizerKind(("betas", "eps"), frozenset({"step", "exp_avg", "exp_avg_sq"}), lambda config: 2),
    "sgd": OptimizerKind(("momentum",), frozenset({"momentum_buffer"}), lambda config: int(config.momentum > 0)),
    "adagrad": OptimizerKind(("eps",), frozenset({"step", "sum"}), lambda config: 1),
    "lion": OptimizerKind(("betas",), frozenset({"exp_avg"}), lambda config: 1),
    MUON: OptimizerKind(
        ("betas", "eps", "momentum", "adjust_lr_fn"), frozenset({"momentum_buffer"}), lambda config: 1, False
    ),
}


def is_matrix(spec: ParameterSpec) -> bool:
    """Whether a parameter has two dims or more, besides that of experts: it is no bias, nor a norm's weight."""
    return len(spec.shape) > 1 + (spec.layer_role == "expert")


def update_rule(spec: ParameterSpec, plan: Plan) -> str:
    """The optimizer that updates a parameter: the plan's, but AdamW for what is no matrix under Muon."""
    return ADAMW if plan.optimizer == MUON and spec.name not in muon_matrices(plan) else plan.optimizer


def num_states(spec: ParameterSpec, plan: Plan) -> int:
    """The tensors of state of a parameter. Under Muon `plan.optimizer_states` are a matrix's; AdamW has one more."""
    return plan.optimizer_states + (update_rule(spec, plan) != plan.optimizer)


@cached("weights_cache")
def muon_matrices(plan: Plan) -> frozenset[str]:
    """The names of the parameters that Muon updates: weights of hidden products, an expert's each by itself.

    The matrix is the logical one, q, k, v, gate and up apart, as Jordan's and Moonlight's Muon split fused ones; a
    convolution's kernels are rows. Embeddings, output layers, adapters, norms and biases are AdamW's, and so is
    what a user's module has but `nn.Linear` and kernels of 4 dims.
    """
    layers = plan.spec.layers()
    return frozenset(p.name for layer in layers for p in layer.parameters if _is_muon_matrix(p, layer, plan.spec))


def _is_muon_matrix(parameter: ParameterSpec, layer: LayerSpec, spec: ModelSpec) -> bool:
    role = parameter.layer_role
    is_known = role in ("column_parallel", "row_parallel", "router", "expert")
    is_product = is_known or role == "linear" or "row_parallel" in layer.possible_roles
    is_product |= not role and len(parameter.shape) == 4
    has_classes = parameter.shape[0] == spec.vocab  # as rows; an inner layer may be as wide
    is_output = has_classes and (not is_known or layer == spec.blocks[-1].layers[-1])
    return is_product and is_matrix(parameter) and not parameter.is_adapter and not is_output


def readers(key: str) -> str:
    """The optimizers that read a key, as a user types them: `optimizer=adamw or optimizer=adagrad`."""
    return " or ".join(f"optimizer={name}" for name, kind in OPTIMIZERS.items() if key in kind.own_keys)


def check_lr_scale(config: Config) -> list[Problem]:
    """Check that the scale is a number above 0, `linear`, or unset."""
    scale = config.optimizer.lr_scale
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is None or scale == LINEAR or (is_number and isfinite(scale) and scale > 0):
        return []
    message = f"{LR_SCALE}={scale} is neither {LINEAR} nor a finite number above 0"
    return [Problem(message, LR_SCALE, f"{LR_SCALE}={LINEAR}")]


def with_lr_scale(config: Config, plan: Plan) -> Config:
    """`config` with the scale as a number under `plan`."""
    if config.optimizer.lr_scale != LINEAR:
        return config
    return replace(config, optimizer=replace(config.optimizer, lr_scale=float(plan.mesh.size("dp"))))


def filled_lr_scale(config: Config, num_replicas: int) -> tuple[str, ...]:
    """The sentence that reports a scale computed from the plan; empty otherwise."""
    if config.optimizer.lr_scale != LINEAR:
        return ()
    return (f"lr_scale={num_replicas} (filled: {LINEAR}, dp {num_replicas})",)
