"""Hand-made trainings for checkpoint tests: every rank's parts of one made-up logical state, without any model.

`value(key, shape)` is the one truth: a rank's part under any plan is a slice of it, so that what was saved and what was
loaded can be compared bit by bit. `read_whole` reads a checkpoint by the file formats alone, without our reader.
"""

from __future__ import annotations

import json
import zlib
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from parallelrun.checkpoint import store
from parallelrun.checkpoint.files import Entry, write_bytes, write_safetensors
from parallelrun.checkpoint.index import DTYPES, INDEX_FILE, Index, StoredPart, StoredTensor, describe_plan
from parallelrun.checkpoint.schema import encode
from parallelrun.config.schema.run_schema import OptimizerConfig
from parallelrun.distributed.mesh import Mesh, build_mesh
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter, held_parameters
from parallelrun.planner.contract.plan import Plan
from tests.plans import tiny_plan

STATE = ("exp_avg", "exp_avg_sq")
STEP = 7.0


def value(key: str, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """The whole logical tensor of a key, fp32: the same on every rank and in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + salt)
    return torch.randn(shape, generator=generator)


def parts_of(plan: Plan, mesh: Mesh, salt: int | None) -> tuple[list[LocalParameter], Optimizer]:
    """This rank's parameters and an AdamW with state: slices of `value`, or NaN and no state when salt is None."""
    parameters = []
    for held in held_parameters(plan, mesh.coordinate.get("pp", 0)):
        layout = plan.data.state_layout(held.spec, held.layout, plan)
        shape = layout.local_shape(held.spec.shape, plan.mesh.sizes, mesh.coordinate)
        tensor = torch.full(shape, torch.nan).requires_grad_()
        parameters.append(LocalParameter(held.name, tensor, held.spec, layout, held.shared))
    optimizer = Optimizer(OptimizerConfig(), parameters)
    if salt is not None:
        for parameter in parameters:
            parameter.tensor.data.copy_(part(parameter, plan, mesh, "weight", salt))
            state = {kind: part(parameter, plan, mesh, kind, salt) for kind in STATE}
            optimizer.load_state(parameter.name, {**state, "step": torch.tensor(STEP)})
    return parameters, optimizer


def part(parameter: LocalParameter, plan: Plan, mesh: Mesh, kind: str, salt: int) -> Tensor:
    """What this rank must hold of a parameter's weight or state."""
    ranges = parameter.layout.ranges(parameter.spec.shape, plan.mesh.sizes, mesh.coordinate)
    whole = value(f"{kind} {parameter.spec.name}", parameter.spec.shape, salt)
    return whole[tuple(slice(start, stop) for start, stop in ranges)]


def wrong_parts(parameters: list[LocalParameter], optimizer: Optimizer, plan: Plan, mesh: Mesh, salt: int) -> list[str]:
    """Names of what does not equal the truth bit by bit, state included."""
    wrong = []
    for parameter in parameters:
        state = optimizer.state(parameter.name)
        held = {"weight": parameter.tensor.detach(), **{kind: state.get(kind) for kind in STATE}}
        for kind, tensor in held.items():
            if tensor is None or not torch.equal(tensor, part(parameter, plan, mesh, kind, salt)):
                wrong.append(f"{kind} of {parameter.name} on rank {mesh.rank}")
        if "step" not in state or state["step"].item() != STEP:
            wrong.append(f"step of {parameter.name} on rank {mesh.rank}")
    return wrong


def build(overrides: dict) -> tuple[Plan, Mesh]:
    """The tiny plan with overrides, and its mesh on this rank. Collective."""
    plan = tiny_plan(overrides)
    return plan, build_mesh(plan, torch.device("cpu"))


def read_whole(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint put together from its files."""
    index = json.loads((path / "index.json").read_text())
    files = {name: load_file(path / name) for name in index["files"]}
    out = {}
    for key, stored in index["tensors"].items():
        whole = torch.full(stored["shape"], torch.nan, dtype=getattr(torch, stored["dtype"]))
        for box in stored["parts"]:
            place = tuple(slice(o, o + n) for o, n in zip(box["offsets"], box["sizes"]))
            whole[place] = files[box["file"]][key]
        out[key] = whole
    return out


def truth(plan: Plan, salt: int = 0) -> dict[str, Tensor]:
    """What `read_whole` must give for a checkpoint of `parts_of(plan, mesh, salt)`."""
    out = {}
    for name, spec in plan.spec.parameters.items():
        out[f"model/{name}"] = value(f"weight {name}", spec.shape, salt)
        for kind in STATE:
            out[f"optimizer/{kind}/{name}"] = value(f"{kind} {name}", spec.shape, salt)
        out[f"optimizer/step/{name}"] = torch.tensor(STEP)
    return out


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """True when two sets of tensors are equal bit by bit."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def written(path: Path, plan: Plan, **extra: object) -> Path:
    """`path`, now a complete checkpoint of the plan's model after step 3: zeros, with AdamW's state, in one file.

    extra: instead of, or beside, what a training keeps in `extra`.
    """
    path.mkdir(parents=True)
    kept = {"step": 3, "global_batch": plan.batch.global_batch, "scaler": {"scale": 1.0, "applied_in_a_row": 0}}
    shapes = {}
    for name, spec in plan.spec.parameters.items():
        shapes |= {f"optimizer/step/{name}": ()}
        shapes |= {key: tuple(spec.shape) for key in (f"model/{name}", *(f"optimizer/{one}/{name}" for one in STATE))}
    name = "rank_00000.safetensors"
    entries = [Entry(key, DTYPES["float32"][0], shape, 4 * prod(shape)) for key, shape in shapes.items()]
    file = write_safetensors(path / name, entries, (memoryview(bytes(entry.num_bytes)) for entry in entries))
    parts = {key: (StoredPart((0,) * len(shape), shape, name),) for key, shape in shapes.items()}
    tensors = {key: StoredTensor("float32", shape, parts[key]) for key, shape in shapes.items()}
    files = {name: file}
    index = Index(3, "adamw", describe_plan(plan), {**kept, **extra}, tensors, files)
    write_bytes(path / INDEX_FILE, encode(index))
    return path


def save(folder, step, parameters, optimizer, extra, plan, mesh, keep=0):
    """Write `folder/step_<step>` with the parts of all ranks. Collective. keep: see `store.write_parts`."""
    parts = store.parts_of(store.TrainingState(parameters, optimizer, plan, mesh))
    return store.write_parts(folder, step, parts, extra, plan, keep=keep, alone=mesh.shape.num_ranks == 1)
