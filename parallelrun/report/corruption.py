"""The cost of checks for silent data corruption, as a text of the summary of `parallelrun plan`. Torch-free."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.plan.corruption import EACH_CHECK, checks
from parallelrun.plan.structure import Plan
from parallelrun.report.figures import bytes_text, seconds_text
from parallelrun.wording import counted


def corruption_text(plan: Plan, config: Config) -> str:
    """The cost of the checks, and what they leave out; empty for a run without them."""
    found = checks(plan, config)
    if found is None:
        return ""
    batches = counted(EACH_CHECK, "batch", "es")
    lines = [
        f"every {counted(found.every, 'step')} {batches} of {counted(found.samples, 'sample')} computed again: "
        f"{found.share_of_flops:.2%} more FLOPs",
        f"besides {bytes_text(found.host_bytes)} of host memory on a rank for copies of its state",
    ]
    if found.wire_bytes:
        lines[1] += f"; a check sends {bytes_text(found.wire_bytes)}"
    if found.check_s is not None and found.share_of_time is not None:
        lines[0] += f", {found.share_of_time:.2%} more time ({seconds_text(found.check_s)} a check)"
    gaps = []
    if found.alone:
        gaps.append(f"{found.alone:.0%} of the optimizer's state, which no other rank holds as well")
    if plan.data.independent:
        meet = plan.data.meets(config.steps)
        compared = "they are compared only after they have met" if meet else "they never meet, so none is compared"
        gaps.append(f"what makes replicas differ, which train apart: {compared}")
    if not (config.sdc.recompute and found.every == 1):
        fix = "sdc.every=1" if config.sdc.recompute else "sdc.recompute=true"
        gaps.append(f"what goes wrong in computing in one step alone (see {fix})")
    if gaps:
        lines.append(f"not seen: {'; '.join(gaps)}")
    return "\n".join(lines)
