"""The layers of a block, and how column-parallel ones pair with a row-parallel one."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.planner.model.model_spec.parameters import ParameterSpec

AHEAD = "mtp."  # begins the names of the blocks of multi-token prediction


@dataclass(frozen=True)
class LayerSpec:
    """One layer with a role, which a tensor strategy may replace.

    name: one-device module name (`layers.0.attention.qkv`). layer_role: `column_parallel` (one input, one or more
    outputs that may be split), `row_parallel` (its input may be split), `linear` (never split), `embedding`,
    `position_embedding`, `head`, `norm`, `dropout`, `attention` (its sinks), `router`, `expert`; `expert_input` and
    `expert_output` (without parameters) around router and experts, `shared_input` of a key that heads share; empty for
    a user's layer without a role. in_features and out_features are global; `column_parallel` counts the sum of its
    outputs. A `head` with a tied weight has no `parameters`, and `tied` names the parameter it reads. possible_roles:
    the roles that a user's own layer can have. input_gradients: the tensors of the gradient for its input that exist at
    once: a layer with an adapter (LoRA), which are the layers after it, has its own and the adapter's. areas: of a
    convolution, whose features are channels: the pixels of a channel that it reads and gives.
    """

    name: str
    layer_role: str
    in_features: int
    out_features: int
    parameters: tuple[ParameterSpec, ...] = ()
    tied: str | None = None
    possible_roles: tuple[str, ...] = ()
    input_gradients: int = 1
    areas: tuple[int, int] | None = None

    @property
    def spans_heads(self) -> bool:
        """Whether it is a norm over the features of all heads together, which are split as the heads are."""
        return self.layer_role == "norm" and any(parameter.heads for parameter in self.parameters)

    @property
    def convolution_flops(self) -> float:
        """Forward FLOPs of a convolution, for one sample."""
        return 2.0 * self.parameters[0].numel * self.areas[1] if self.areas else 0.0

    @property
    def is_adapter(self) -> bool:
        """Whether it is a factor of an adapter."""
        return any(parameter.is_adapter for parameter in self.parameters)


@dataclass(frozen=True)
class Pair:
    """The column-parallel layers of a block that read one input, and the row-parallel layer that reads their outputs.

    A column-parallel layer without a following row-parallel layer has row None; a row-parallel layer without preceding
    column-parallel layers has no columns. inside: the layers between the two.
    """

    columns: tuple[LayerSpec, ...]
    row: LayerSpec | None
    inside: tuple[LayerSpec, ...] = ()


def pairs_in(layers: tuple[LayerSpec, ...]) -> dict[str, Pair]:
    """By layer name, in order: the pair of each of a block's layers that has one."""
    pairs: dict[str, Pair] = {}
    opened: list[LayerSpec] = []
    for layer in layers:
        if layer.layer_role == "row_parallel":
            columns = tuple(other for other in opened if other.layer_role == "column_parallel")
            pair = Pair(columns, layer, tuple(other for other in opened if other.layer_role != "column_parallel"))
            pairs |= {inside.name: pair for inside in (*opened, layer)}
            opened = []
        elif layer.layer_role == "column_parallel" or opened:
            opened.append(layer)
    pairs |= {layer.name: Pair((layer,), None) for layer in opened if layer.layer_role == "column_parallel"}
    return pairs
