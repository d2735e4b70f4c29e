"""The parameters of a layer with experts, and which layers have them. `layer.py` builds the same.

Sources: GShard (Lepikhin et al. 2020): every second layer, two matrices an expert; Mixtral (Jiang et al. 2024): gated
experts in every layer; DeepSeek-V3 (2024): the first layers dense, many small experts and a shared one.
"""

from __future__ import annotations

from parallelrun.base.errors import Problem
from parallelrun.config.schema.model_schema import ModelConfig
from parallelrun.models.transformer import spec as transformer
from parallelrun.planner.model.model_spec import GATED, Initialiser, LayerSpec, ModelSpec, ParameterSpec
from parallelrun.planner.model.model_spec.router import RouterSpec


def has_experts(index: int, model: ModelConfig) -> bool:
    """Whether layer `index` has experts: after the dense layers, the last of every `expert_period` layers."""
    if not model.experts or index < model.dense_layers:
        return False
    return (index - model.dense_layers) % model.expert_period == model.expert_period - 1


def has_own_router(spec: ModelSpec) -> bool:
    """Whether the experts are somebody else's module, which a tensor strategy leaves whole."""
    return spec.router is not None and spec.router.is_own


def expert_ffn(model: ModelConfig) -> int:
    """Inner width of one expert: as given, else the MLP's."""
    return model.expert_ffn if model.expert_ffn is not None else transformer.ffn_size(model)


def expert_weights(model: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Shapes of the weights that all experts of a layer hold together, by name: (experts, out, in) each."""
    ffn, hidden = expert_ffn(model), model.hidden
    opened = {"gate": (model.experts, ffn, hidden)} if model.activation in GATED else {}
    return {**opened, "up": (model.experts, ffn, hidden), "down": (model.experts, hidden, ffn)}


def expert_biases(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes of their biases, by name: (experts, out) each."""
    shapes = expert_weights(model).items() if model.expert_bias else ()
    return {f"{part}_bias": shape[:2] for part, shape in shapes}


def inside_dim(weight: ParameterSpec) -> int:
    """The dim of an expert's weight (see `expert_weights`) that has the expert's inner width; -1: of its last bias, of
    which every rank with a part of that width adds its share."""
    return {"down": 2, "down_bias": -1}.get(weight.name.rpartition(".")[2], 1)


def shared_ffn(model: ModelConfig) -> int:
    """Inner width of the shared expert: that of `shared_experts` experts."""
    return model.shared_experts * expert_ffn(model)


def router_spec(model: ModelConfig) -> RouterSpec | None:
    """The router of every layer with experts; None if no layer has any."""
    return RouterSpec(**vars(model.router)) if model.experts else None


def check(model: ModelConfig) -> list[Problem]:
    """Problems of the experts' sizes that no plan could solve. `pieces/router_settings.py` checks the router."""
    if model.experts and model.shared_gate and not model.shared_experts:
        message = "model.shared_gate=true: there is no shared expert"
        return [Problem(message, "model.shared_gate", "model.shared_experts=1", kind="undefined")]
    if not model.experts or any(has_experts(index, model) for index in range(model.layers)):
        return []
    message = (
        f"model.experts={model.experts}, but none of {model.layers} layers has any: the first is layer "
        f"{model.dense_layers + model.expert_period - 1} (counted from 0)"
    )
    key = "model.expert_period" if model.dense_layers < model.layers else "model.dense_layers"
    value = 1 if key == "model.expert_period" else max(0, model.layers - model.expert_period)
    return [Problem(message, key, f"{key}={value}", kind="arithmetic")]


def moe_layers(name: str, model: ModelConfig, residual: Initialiser) -> tuple[LayerSpec, ...]:
    """Router, experts, shared expert if there is one, and dropout. residual: the initialiser of the weights whose
    output is added to the residual stream."""
    hidden, experts, normal = model.hidden, model.experts, transformer.normal(model)
    router = [ParameterSpec(f"{name}.router.weight", (experts, hidden), normal, "router")]
    if model.expert_bias:
        router.append(ParameterSpec(f"{name}.router.bias", (experts,), Initialiser("zeros"), "router"))
    if model.router.bias_rate > 0:
        bias = f"{name}.router.selection_bias"
        router.append(ParameterSpec(bias, (experts,), Initialiser("zeros"), "router", frozen=True))
    weights = tuple(
        ParameterSpec(f"{name}.experts.{part}", shape, residual if part == "down" else normal, "expert")
        for part, shape in expert_weights(model).items()
    )
    weights += tuple(
        ParameterSpec(f"{name}.experts.{part}", shape, Initialiser("zeros"), "expert")
        for part, shape in expert_biases(model).items()
    )
    shared: tuple[LayerSpec, ...] = ()
    if model.shared_experts:
        shared = transformer.up_and_down(f"{name}.shared", model, shared_ffn(model), normal, residual)
    if model.shared_experts and model.shared_gate:
        gate = transformer.linear_layer(f"{name}.shared_gate", hidden, 1, False, normal, "linear")
        shared = (*shared, gate)
    return (
        LayerSpec(f"{name}.enter", "expert_input", hidden, hidden),
        LayerSpec(f"{name}.router", "router", hidden, experts, tuple(router)),
        LayerSpec(f"{name}.experts", "expert", hidden, hidden, weights),
        LayerSpec(f"{name}.leave", "expert_output", hidden, hidden),
        *shared,
        transformer.dropout_layer(f"{name}.dropout", model),
    )


def multiplied(layer: LayerSpec, model: ModelConfig) -> int:
    """Number of weights by which a router or expert layer multiplies one token: those of `top_k` experts."""
    weights = sum(parameter.numel for parameter in layer.parameters if not parameter.name.endswith("bias"))
    return weights if layer.layer_role == "router" else weights // model.experts * model.router.top_k
