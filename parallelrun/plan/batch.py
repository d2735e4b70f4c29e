"""Batch arithmetic: global_batch = dp x micro_batch x microbatches, with what is not given filled in."""

from __future__ import annotations

from collections.abc import Callable

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.plan.names import divisors, either, nearest
from parallelrun.plan.structure import Batch

DEFAULT_GLOBAL_BATCH = 48

Violations = Callable[[Batch], list[Problem]]


def fill(
    config: Config, dp: int, pp: int, parts: int, violations: Violations, filled: list[str], problems: list[Problem]
) -> Batch | None:
    """The batch, or None with the violations appended to `problems`.

    parts: micro_batch must divide by it (parts that the tensor way cuts it into, whole routing groups). violations:
    what the schedule has against a Batch; a count of microbatches is legal when it has nothing. Unset counts become the
    fewest microbatches (the largest micro-batch) that both allow.
    """
    before = len(problems)
    problems += _both(config, "global_batch", "local_batch") + _both(config, "micro_batch", "microbatches")
    for key in ("global_batch", "local_batch", "micro_batch", "microbatches"):
        value = getattr(config, key)
        if value is not None and (type(value) is not int or value < 1):
            problems.append(Problem(f"{key}={value} is not a whole number of at least 1", key, f"{key}=1"))
    if len(problems) > before:
        return None
    if config.local_batch is not None:
        global_batch = config.local_batch * dp
        filled.append(f"global_batch={global_batch} (filled: local_batch {config.local_batch} x dp {dp})")
    elif config.global_batch is not None:
        global_batch = config.global_batch
    else:
        global_batch = _default_global_batch(config, dp, pp, parts, violations)
        why = (
            "the default"
            if global_batch == DEFAULT_GLOBAL_BATCH
            else f"{DEFAULT_GLOBAL_BATCH} are too few for the plan"
            if parts == 1
            else f"{DEFAULT_GLOBAL_BATCH} give no microbatches of multiples of {parts} samples"
        )
        filled.append(f"global_batch={global_batch} (filled: {why})")
    if global_batch % dp:
        problems.append(_indivisible(config, global_batch, dp, parts))
        return None
    return _microbatches(config, global_batch, dp, parts, violations, filled, problems)


def _both(config: Config, one: str, other: str) -> list[Problem]:
    first, second = getattr(config, one), getattr(config, other)
    if first is None or second is None:
        return []
    what = f"{one}={first} and {other}={second} are both given; each follows from the other"
    return [Problem(what, other, f"leave {other} out", kind="contradiction")]


def _indivisible(config: Config, global_batch: int, dp: int, parts: int) -> Problem:
    step = dp * (config.micro_batch or (config.microbatches or 1) * parts)
    around = sorted({n for n in (global_batch // step * step, -(-global_batch // step) * step) if n > 0})
    fix = either("global_batch", around) + "".join(f" or dp={n}" for n in nearest(dp, divisors(global_batch)))
    what = f"global_batch={global_batch} does not divide by dp={dp}"
    return Problem(what, "global_batch", fix, kind="arithmetic")


def _default_global_batch(config: Config, dp: int, pp: int, parts: int, violations: Violations) -> int:
    """48; where 48 are too few for the plan, the fewest samples that its schedule and its grid allow."""
    step = config.micro_batch or (config.microbatches or 1) * parts
    if DEFAULT_GLOBAL_BATCH % dp == 0 and DEFAULT_GLOBAL_BATCH // dp % step == 0:
        replica = DEFAULT_GLOBAL_BATCH // dp
        counts = _counts(config, replica)
        if any(_is_legal(_batch(DEFAULT_GLOBAL_BATCH, dp, m), parts, violations) for m in counts):
            return DEFAULT_GLOBAL_BATCH
    elif dp * step <= DEFAULT_GLOBAL_BATCH and DEFAULT_GLOBAL_BATCH // dp % parts == 0:
        return DEFAULT_GLOBAL_BATCH  # large enough, but indivisible: a violation that the user should see
    if config.microbatches is not None:
        return dp * step
    for count in range(1, 2 * pp + DEFAULT_GLOBAL_BATCH + 1):
        batch = Batch(dp * step * count, step, count)
        if batch.global_batch >= DEFAULT_GLOBAL_BATCH and _is_legal(batch, parts, violations):
            return batch.global_batch
    # no small count gives both 48 samples and a legal schedule: let the schedule say why
    return max(DEFAULT_GLOBAL_BATCH // (dp * step), 1) * dp * step


def _is_legal(batch: Batch, parts: int, violations: Violations) -> bool:
    return batch.micro_batch % parts == 0 and not violations(batch)


def _batch(global_batch: int, dp: int, count: int) -> Batch:
    return Batch(global_batch, global_batch // dp // count, count)


def _counts(config: Config, replica: int) -> list[int]:
    """The numbers of microbatches that the arithmetic leaves open, ascending."""
    if config.micro_batch is not None:
        return [replica // config.micro_batch] if replica % config.micro_batch == 0 else []
    if config.microbatches is not None:
        return [config.microbatches] if replica % config.microbatches == 0 else []
    return divisors(replica)


def _microbatches(
    config: Config,
    global_batch: int,
    dp: int,
    parts: int,
    violations: Violations,
    filled: list[str],
    problems: list[Problem],
) -> Batch | None:
    replica = global_batch // dp
    counts = _counts(config, replica)
    key = "micro_batch" if config.micro_batch is not None else "microbatches"
    if not counts:
        asked = getattr(config, key)
        what = f"global_batch={global_batch} does not divide by dp x {key} = {dp} x {asked} = {dp * asked}"
        step = dp * (asked if key == "micro_batch" else asked * parts)
        around = sorted({n for n in (global_batch // step * step, -(-global_batch // step) * step) if n > 0})
        fix = either(key, nearest(asked, divisors(replica))) + " or " + either("global_batch", around)
        problems.append(Problem(what, key, fix, kind="arithmetic"))
        return None
    batches = [_batch(global_batch, dp, m) for m in counts]
    legal = [batch.microbatches for batch in batches if _is_legal(batch, parts, violations)]
    # where none is, the ways' own checks name what is wrong with the one that the schedule at least allows
    legal = legal or [batch.microbatches for batch in batches if not violations(batch)]
    chosen = legal[0] if legal else counts[-1]
    batch = _batch(global_batch, dp, chosen)
    if config.micro_batch is None and config.microbatches is None:
        filled.append(f"microbatches={chosen} of {batch.micro_batch} (filled: the schedule)")
    return batch
