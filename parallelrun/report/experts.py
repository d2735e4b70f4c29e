"""The experts of a plan on screen: where they are, how a token chooses, how full one may be. Torch-free."""

from __future__ import annotations

from rich.text import Text

from parallelrun.plan.document import experts
from parallelrun.plan.expert_dispatcher import ExpertDispatcher
from parallelrun.plan.structure import Plan
from parallelrun.wording import counted

MOST_LAYERS = 4


def panel(plan: Plan) -> Text:
    """Of a plan whose model has experts."""
    found, router, ep = experts(plan), plan.spec.router, plan.mesh.size("ep")
    assert found is not None and router is not None
    choices = f"top-{router.top_k}" + (f" ({router.kind})" if router.kind != "top_k" else "")
    if router.kind == "expert_choice":
        choices = f"{router.top_k} a token on average, chosen by the experts"
    layers = f"{_some(found['layers'])} ({len(found['layers'])} of {plan.spec.num_layers})"
    text = Text(f"{counted(found['experts'], 'expert')}, {choices}, in {layers}")
    tokens = f"{counted(router.group_samples, 'sample')}, {found['group_tokens']:,} tokens"
    limit = "an expert takes all of them that come"
    if found["capacity"] is not None:
        limit = f"an expert takes at most {found['capacity']:,} of them, {found['eval_capacity']:,} in evaluation"
    text.append(f"\na routing group is {tokens}: {limit}")
    if plan.expert is None:
        return text.append("\nevery rank has all experts")
    held = counted(found["held"], "expert")
    return text.append(
        f"\nep {ep}: {held} of every layer a rank, rows travel by {plan.expert.kind}{_levels(plan.expert)}"
    )


def _levels(strategy: ExpertDispatcher) -> str:
    levels = f" in two levels, {strategy.group_size} ranks in the inner one" if strategy.group_size > 1 else ""
    return levels + (f", in {strategy.chunks} parts one after the other" if strategy.chunks > 1 else "")


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= MOST_LAYERS else [*names[:3], "..", names[-1]])
