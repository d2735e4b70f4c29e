"""What the data strategies have in common whose ranks hold whole copies of everything. Torch-free."""

from __future__ import annotations

from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.messages import Explanation, explanation_of_calls
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import Collective, Plan


class Replicated:
    """Weights, gradients and optimizer state are whole on every rank of dp."""

    explained = "", ""  # what the strategy does, in sentences, and the paper: for `explain`

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """See `DataWayPlan`."""
        raise AssertionError(f"{type(self)} sends nothing")

    def explain(self, plan: Plan) -> Explanation:
        """The messages of the group of rank 0, for `parallelrun explain`."""
        coordinate = plan.mesh.coordinate(0)
        found = self.collectives(coordinate["pp"], coordinate, plan)
        return explanation_of_calls("data", plan.data.kind, *self.explained, plan, found)

    def mesh_dims(
        self, request: Request
    ) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        return (("dp", request.dp),), ()

    def weight_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout
