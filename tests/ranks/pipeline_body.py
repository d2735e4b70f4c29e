"""What the pipeline tests run on every rank: a stage or more of the tiny GPT, its runner, and one-device twins."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.models import initialise
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.strategies.pipeline.schedule import boundary_bytes, boundary_shape
from parallelrun.training.loop.build import build_model_parts
from parallelrun.training.loop.pipeline_runner import build_runner
from parallelrun.training.loop.reader import Batch
from tests.live_bytes import LiveBytes


def make_batch(plan: Plan, first: bool = True, last: bool = True) -> Batch:
    """Random tokens and targets of one replica, a fifth of the targets ignored."""
    generator = torch.Generator().manual_seed(7)
    shape = (plan.batch.replica_batch, *plan.spec.sample_shape)
    inputs = torch.randint(plan.spec.vocab, shape, generator=generator)
    targets = torch.randint(plan.spec.vocab, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.2] = -1
    ids = torch.arange(plan.batch.replica_batch) + 1000
    return Batch(inputs if first else None, targets if last else None, ids)


def gradients(parts: list[Network]) -> dict[str, torch.Tensor]:
    """Gradients by one-device name, then forgotten. Tied copies of two ranks stay apart."""
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
            parameter.grad = None
    return found


def evaluate_on_one_device(config: Config, plan: Plan) -> float:
    """The loss of the batch at once in the unsplit model: no runner, no microbatches."""
    mesh = build_mesh(plan, torch.device("cpu"))
    (network,) = build_model_parts(config, plan, mesh)
    initialise.materialise([network], plan, mesh, config.seed)
    batch = make_batch(plan)
    network.eval()
    with torch.no_grad():
        return network.loss(network(batch.inputs, batch.sample_ids), batch.targets).item()


def set_up(config: Config, plan: Plan) -> tuple[Mesh, list[Network], object, Batch]:
    """This rank's mesh, parts, runner and batch."""
    mesh = build_mesh(plan, torch.device("cpu"))
    pp_rank = mesh.coordinate.get("pp", 0)
    parts = build_model_parts(config, plan, mesh)
    initialise.materialise(parts, plan, mesh, config.seed)
    runner = build_runner(parts, plan, mesh)
    batch = make_batch(plan, pp_rank == plan.stages[0].pp_rank, pp_rank == plan.last_stage_pp_rank)
    return mesh, parts, runner, batch


def evaluate_between_steps(config: Config, plan: Plan) -> tuple[float, bool]:
    """(loss of an evaluation, whether the steps before and after it gave the same gradients)."""
    _, parts, runner, batch = set_up(config, plan)
    runner.train(batch, 0.25)
    before = gradients(parts)
    loss = runner.evaluate(batch)[0].item()
    runner.train(batch, 0.25)
    return loss, all(torch.equal(before[name], gradient) for name, gradient in gradients(parts).items())


class _Saved:
    """A tensor that autograd saved for one microbatch of a stage, counted for as long as it lives."""

    def __init__(self, tensor: torch.Tensor, alive: Counter[int], microbatch: int):
        self.tensor, self.alive, self.microbatch = tensor.detach(), alive, microbatch  # an output would hold its graph
        alive[microbatch] += 1

    def __del__(self) -> None:
        self.alive[self.microbatch] -= 1


def watch(config: Config, plan: Plan) -> tuple[list[tuple[str, int, int]], dict[int, int], dict]:
    """(what this rank's stages really did, in order, as (kind, stage, microbatch); per stage, the most microbatches
    that had activations alive at once; what the runner recorded of its actions). A backward is seen as B, or under zero
    bubble as I, at the stage's output."""
    mesh, parts, runner, batch = set_up(config, plan)
    order: list[tuple[str, int, int]] = []
    peak: dict[int, int] = {}
    for stage, part in zip(plan.stages_of(mesh.coordinate.get("pp", 0)), parts, strict=True):
        _watch_stage(part, stage.index, plan, order, peak)
    runner.train(batch, 0.25)
    return order, peak, runner.last_actions()


def _watch_stage(part: Network, stage: int, plan: Plan, order: list, peak: dict[int, int]) -> None:
    alive: Counter[int] = Counter()
    forward = part.forward

    def watched(x: torch.Tensor, sample_ids: torch.Tensor, documents: None, ahead: None) -> torch.Tensor:
        microbatch = int(sample_ids[0] - 1000) // plan.batch.micro_batch
        order.append(("F", stage, microbatch))
        pack = partial(_Saved, alive=alive, microbatch=microbatch)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            output = forward(x, sample_ids, documents)
        peak[stage] = max(peak.get(stage, 0), sum(count > 0 for count in alive.values()))
        output.register_hook(lambda _: order.append(("B", stage, microbatch)))
        return output

    part.forward = watched


def handovers(config: Config, plan: Plan) -> int:
    """How often one pass of this rank let another compute, in a step."""
    mesh, _, runner, batch = set_up(config, plan)
    count, turns = Counter[bool](), mesh.turns
    hand_over = turns.hand_over
    turns.hand_over = lambda: count.update([hand_over()])
    runner.train(batch, 0.25)
    return count[True]


def tensors_alive(config: Config, plan: Plan) -> list[int]:
    """How many tensors Python knows of after two steps, and after two more, without those that ranks share."""
    _, parts, runner, batch = set_up(config, plan)
    counts = []
    for _ in range(2):
        for _ in range(2):
            runner.train(batch, 0.25)
            gradients(parts)
        gc.collect()
        counts.append(sum(type(one) is torch.Tensor and one.untyped_storage().resizable() for one in gc.get_objects()))
    return counts


class _Sum(torch.autograd.Function):
    """The sum, whose gradient is a tensor of its own as that of real logits is."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape).clone()


class _Bare(nn.Module):
    """A stage that keeps nothing for backward but its input: what else lives are messages."""

    recompute, after_weight_gradients = "none", staticmethod(lambda: None)

    def __init__(self, stage: int, plan: Plan):
        super().__init__()
        self._stage, self._is_last = stage, stage == len(plan.stages) - 1
        self._shape = boundary_shape(plan, 1)
        if stage == 0:
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, sample_ids: Tensor, documents: None, ahead: None) -> Tensor:
        if self._stage == 0:
            return self.weight.expand(self._shape).clone()
        return x.view_as(x) if self._is_last else x * 2

    def total_loss(self, output: Tensor, targets: Tensor, ahead: None) -> Tensor:
        return _Sum.apply(output)


def bytes_of_messages(config: Config, plan: Plan) -> tuple[list[int], int]:
    """(the most bytes alive at once in each of three steps, the bytes alive after them); stages keep nothing else."""
    mesh = build_mesh(plan, torch.device("cpu"))
    pp_rank = mesh.coordinate["pp"]
    parts = [_Bare(stage.index, plan) for stage in plan.stages_of(pp_rank)]
    runner = build_runner(parts, plan, mesh)
    batch = make_batch(plan, pp_rank == plan.stages[0].pp_rank, pp_rank == plan.last_stage_pp_rank)
    peaks = []
    with LiveBytes(boundary_bytes(plan, 1)) as counter:
        for _ in range(3):
            counter.peak = 0
            runner.train(batch, 1.0)
            peaks.append(counter.peak)
        gc.collect()
        return peaks, counter.now


def rounding_again(config: Config, plan: Plan) -> tuple[list[str], int]:
    """(parameters whose gradients are other bits than where rounded copies of weights are kept for backward, the most
    bytes that were alive at once in the second of two steps and made in it)."""
    _, parts, runner, batch = set_up(config, plan)
    runner.train(batch, 0.25)
    found = gradients(parts)
    with LiveBytes() as counter:
        runner.train(batch, 0.25)
    gradients(parts)
    for part in parts:
        part.rounds_weights = False
    runner.train(batch, 0.25)
    kept = gradients(parts)
    return [name for name, gradient in kept.items() if not torch.equal(gradient, found[name])], counter.peak
