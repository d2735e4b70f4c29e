"""Packed documents in a plan: which models read them, and what is known of their lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Packing
from parallelrun.planner.model.model_spec import MEASURED, BlockSpec, ModelSpec


def packed_spec(config: Config, spec: ModelSpec, problems: list[Problem]) -> ModelSpec:
    """The spec of the samples that the dataset makes. Adds a problem for a model that mixes what is in a sample, or
    that replaces the dataset's targets by its own. A user's module is called with tokens alone: it would need an
    argument for documents, which its attention and positions have to read."""
    if definitions.dataset(config).has_ignored(config):
        spec = replace(spec, hides_targets=True)
        if spec.mask_token is not None:
            message = f"dataset={config.dataset.name} has the tokens to predict, and model={spec.name} masks its own"
            problems.append(Problem(message, "dataset", "model=gpt", kind="undefined"))
    if not config.dataset.pack or not definitions.dataset(config).packs:
        return spec
    if not definitions.model(config).packs:
        message = f"dataset.pack=true: model={spec.name} does not know where in a sample a document ends"
        problems.append(Problem(message, "dataset.pack", "leave dataset.pack out, or model=gpt", kind="not_built"))
        return spec
    return replace(spec, packed=True)


def packing_of(config: Config, spec: ModelSpec) -> Packing | None:
    """How the dataset's documents fill the samples; None without packing, or where that is not known before the run."""
    if not spec.packed:
        return None
    definition = definitions.dataset(config)
    try:
        return as_computed(definition.open(config, spec).train.packing(), spec) if definition.is_ready(config) else None
    except EnvironmentProblem:
        return None  # the run will say what is wrong


def as_computed(packing: Packing, spec: ModelSpec) -> Packing:
    """`packing` with the work of whole samples, which attention of other people's modules does under its mask."""
    measured = any(block.kind == MEASURED for block in spec.blocks)
    return replace(packing, squares=float(spec.seq**2)) if measured else packing


def with_packing(plan: Plan, packing: Packing | None) -> Plan:
    """The plan with the FLOPs of these documents in place of whole samples; its stages stay."""
    if packing is None:
        return plan
    squares = packing.squares

    def shorter(block: BlockSpec) -> BlockSpec:
        if block.kind != "transformer":
            return block
        before = block.attention.attended or plan.spec.seq
        attended = min(before, squares / plan.spec.seq)
        # as `transformer_flops` counts them: scores and their product with v
        saved = 2.0 * plan.spec.seq * (before - attended) * plan.spec.attention_features
        attention = replace(block.attention, attended=attended)
        return replace(block, forward_flops=block.forward_flops - saved, attention=attention)

    blocks = tuple(map(shorter, plan.spec.blocks))
    return replace(plan, spec=replace(plan.spec, documents=packing.examples, blocks=blocks))


def packing_document(spec: ModelSpec, packing: Packing | None) -> dict[str, Any] | None:
    """`packing`, ready for JSON. padding: its share; attention: its work over that of whole samples; cut: documents
    that are longer than a sample."""
    if packing is None:
        return {"known": False} if spec.packed else None
    shares = {"padding": 1.0 - packing.tokens / spec.seq, "attention": packing.squares / spec.seq**2}
    return {"known": True, "documents_per_sample": packing.documents, **shares, "cut": packing.cut}
