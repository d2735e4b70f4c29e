"""The parameters of a layer with experts, and which layers have them. Torch-free; `layer.py` builds the same.

Sources: GShard (Lepikhin et al. 2020): every second layer, two matrices an expert; Mixtral (Jiang et al. 2024): gated
experts in every layer; DeepSeek-V3 (2024): the first layers dense, many small experts and a shared one.
"""

from __future__ import annotations

from parallelrun.config.schema import ModelConfig
from parallelrun.errors import Problem
from parallelrun.model_spec import Initialiser, LayerSpec, ParameterSpec, RouterSpec, too_small
from parallelrun.models.transformer.spec import ffn_size

SIZES = {"experts": 0, "expert_ffn": 1, "expert_period": 1, "dense_layers": 0, "shared_experts": 0}  # least values


def has_experts(index: int, model: ModelConfig) -> bool:
    """Whether layer `index` has experts: after the dense layers, the last of every `expert_period` layers."""
    if not model.experts or index < model.dense_layers:
        return False
    return (index - model.dense_layers) % model.expert_period == model.expert_period - 1


def expert_ffn(model: ModelConfig) -> int:
    """Inner width of one expert: as given, else the MLP's."""
    return model.expert_ffn if model.expert_ffn is not None else ffn_size(model)


def expert_weights(model: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Shapes of the weights that all experts of a layer hold together, by name: (experts, out, in) each."""
    ffn, hidden = expert_ffn(model), model.hidden
    opened = {"gate": (model.experts, ffn, hidden)} if model.activation == "swiglu" else {}
    return {**opened, "up": (model.experts, ffn, hidden), "down": (model.experts, hidden, ffn)}


def inside_dim(weight: ParameterSpec) -> int:
    """The dim of an expert's weight (see `expert_weights`) that has the expert's inner width."""
    return 2 if weight.name.endswith(".down") else 1


def shared_ffn(model: ModelConfig) -> int:
    """Inner width of the shared expert: that of `shared_experts` experts."""
    return model.shared_experts * expert_ffn(model)


def router_spec(model: ModelConfig) -> RouterSpec | None:
    """The router of every layer with experts; None if no layer has any."""
    return RouterSpec(**vars(model.router)) if model.experts else None


def check(model: ModelConfig) -> list[Problem]:
    """Problems of the experts' sizes that no plan could solve. `plan/routing.py` checks the router."""
    negative = {key: getattr(model, key) for key in ("experts", "dense_layers", "shared_experts")}
    problems = [
        Problem(f"model.{key}={size} must be at least 0", f"model.{key}", f"model.{key}=0")
        for key, size in negative.items()
        if size < 0
    ]
    if not model.experts:
        return problems
    problems += too_small({"expert_ffn": expert_ffn(model), "expert_period": model.expert_period})
    if not problems and not any(has_experts(index, model) for index in range(model.layers)):
        what = (
            f"model.experts={model.experts}, but none of {model.layers} layers has any: the first is layer "
            f"{model.dense_layers + model.expert_period - 1} (counted from 0)"
        )
        key = "model.expert_period" if model.dense_layers < model.layers else "model.dense_layers"
        value = 1 if key == "model.expert_period" else max(0, model.layers - model.expert_period)
        problems.append(Problem(what, key, f"{key}={value}", kind="arithmetic"))
    return problems


def router_and_experts(name: str, model: ModelConfig, normal: Initialiser, residual: Initialiser) -> list[LayerSpec]:
    """The layers from `expert_input` to `expert_output`, without a shared expert.

    normal, residual: initialisers of the weights that read the residual stream and of those that are added to it.
    """
    hidden, experts = model.hidden, model.experts
    router = [ParameterSpec(f"{name}.router.weight", (experts, hidden), normal, "router")]
    if model.router.bias_rate > 0:
        bias = f"{name}.router.selection_bias"
        router.append(ParameterSpec(bias, (experts,), Initialiser("zeros"), "router", frozen=True))
    weights = tuple(
        ParameterSpec(f"{name}.experts.{part}", shape, residual if part == "down" else normal, "expert")
        for part, shape in expert_weights(model).items()
    )
    return [
        LayerSpec(f"{name}.enter", "expert_input", hidden, hidden),
        LayerSpec(f"{name}.router", "router", hidden, experts, tuple(router)),
        LayerSpec(f"{name}.experts", "expert", hidden, hidden, weights),
        LayerSpec(f"{name}.leave", "expert_output", hidden, hidden),
    ]


def multiplied(layer: LayerSpec, model: ModelConfig) -> int:
    """Number of weights by which a router or expert layer multiplies one token: those of `top_k` experts."""
    weights = sum(parameter.numel for parameter in layer.parameters if not parameter.frozen)
    return weights if layer.layer_role == "router" else weights // model.experts * model.router.top_k
