"""Batch arithmetic: global_batch = dp x micro_batch x microbatches, and the defaults of unset counts.

The number of microbatches follows the same rule for all schedules, so that they are compared on equal work. Without a
pipeline: the fewest whose memory fits a device. With a pipeline: the fewest, but at least MICROBATCHES_PER_STAGE per
stage, that fit a device and have at most EFFICIENT_TOKENS tokens each. Few large microbatches keep kernels efficient;
many make the bubble small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.config.schema.run_schema import DEFAULT_GLOBAL_BATCH, Config
from parallelrun.planner.contract.plan import BatchSizes

MICROBATCHES_PER_STAGE = 4  # the bubble of gpipe and 1f1b is then (pp - 1) / (5 pp - 1) of a step: below 20 %
# More tokens in a microbatch do not make kernels faster: SC21 (Narayanan et al. 2021, figures 7 and 16) is fastest at 2
# to 8 samples of 2,048 tokens, and its largest models run at 1 or 2.
EFFICIENT_TOKENS = 8192


@dataclass(frozen=True)
class BatchRules:
    """The conditions for a legal batch, and the choice between legal ones.

    parts: divides micro_batch (parts of the tensor strategy, routing groups). violations: of the schedule by a batch.
    suits: whether the model can compute the batch (sample sets). fits: whether its memory fits a device, as far as the
    cluster gives its size. tokens: per sample, 0 for other samples.
    """

    parts: int = 1
    violations: Callable[[BatchSizes], list[Problem]] = lambda batch: []
    suits: Callable[[BatchSizes], bool] = lambda batch: True
    fits: Callable[[BatchSizes], bool] = lambda batch: True
    tokens: int = 0

    def allow(self, batch: BatchSizes) -> bool:
        return batch.micro_batch % self.parts == 0 and not self.violations(batch) and self.suits(batch)


def check(config: Config) -> list[Problem]:
    """Return the violations that do not depend on the degrees."""
    keys, problems = ("global_batch", "local_batch", "micro_batch", "microbatches"), []
    requested = {key: value for key in keys if (value := getattr(config, key)) is not None}
    for one, other in (keys[:2], keys[2:]):
        if {one, other} <= requested.keys():
            message = (
                f"{one}={requested[one]} and {other}={requested[other]} are both given; each follows from the other"
            )
            problems.append(Problem(message, other, f"leave {other} out", kind="contradiction"))
    for key, value in requested.items():
        if type(value) is not int or value < 1:
            problems.append(Problem(f"{key}={value} is not a whole number of at least 1", key, f"{key}=1"))
    return problems


def fill(
    config: Config, dp: int, pp: int, rules: BatchRules, filled: list[str], problems: list[Problem]
) -> BatchSizes | None:
    """The batch, or None with the violations appended to `problems`. Unset counts are filled by the module's rule."""
    problems_found = check(config)
    problems += problems_found
    if problems_found:
        return None
    if config.local_batch is not None:
        global_batch = config.local_batch * dp
        filled.append(f"global_batch={global_batch} (filled: local_batch {config.local_batch} x dp {dp})")
    elif config.global_batch is not None:
        global_batch = config.global_batch
    else:
        global_batch, why = _default_global_batch(config, dp, pp, rules), "the default"
        if global_batch != DEFAULT_GLOBAL_BATCH:
            parts = f"give no microbatches of multiples of {rules.parts} samples"
            why = f"{DEFAULT_GLOBAL_BATCH} {'are too few for the plan' if rules.parts == 1 else parts}"
        filled.append(f"global_batch={global_batch} (filled: {why})")
    if global_batch % dp:
        step = dp * (config.micro_batch or (config.microbatches or 1) * rules.parts)
        fix = _around(global_batch, step) + "".join(f" or dp={n}" for n in nearest(dp, divisors(global_batch)))
        message = f"global_batch={global_batch} is not divisible by dp={dp}"
        problems.append(Problem(message, "global_batch", fix, kind="arithmetic"))
        return None
    return _microbatches(config, global_batch, dp, pp, rules, filled, problems)


def _around(global_batch: int, step: int) -> str:
    """The multiples of `step` next to `global_batch`, as a suggestion."""
    multiples = {global_batch // step * step, -(-global_batch // step) * step} - {0}
    return either("global_batch", sorted(multiples))


def _default_global_batch(config: Config, dp: int, pp: int, rules: BatchRules) -> int:
    """The default, or the fewest samples that the plan's schedule and layout allow if the default is too small."""
    step = config.micro_batch or (config.microbatches or 1) * rules.parts
    if DEFAULT_GLOBAL_BATCH % dp == 0 and DEFAULT_GLOBAL_BATCH // dp % step == 0:
        counts = _counts(config, DEFAULT_GLOBAL_BATCH // dp)
        if any(rules.allow(_batch(DEFAULT_GLOBAL_BATCH, dp, m)) for m in counts):
            return DEFAULT_GLOBAL_BATCH
    elif dp * step <= DEFAULT_GLOBAL_BATCH and DEFAULT_GLOBAL_BATCH // dp % rules.parts == 0:
        return DEFAULT_GLOBAL_BATCH  # large enough, but indivisible: a violation that the user should see
    if config.microbatches is not None:
        return dp * step
    for count in range(1, 2 * pp + DEFAULT_GLOBAL_BATCH + 1):
        batch = BatchSizes(dp * step * count, step, count)
        if batch.global_batch >= DEFAULT_GLOBAL_BATCH and rules.allow(batch):
            return batch.global_batch
    # No small count gives enough samples and a legal schedule: the schedule's own check reports the reason.
    return max(DEFAULT_GLOBAL_BATCH // (dp * step), 1) * dp * step


def _batch(global_batch: int, dp: int, count: int) -> BatchSizes:
    return BatchSizes(global_batch, global_batch // dp // count, count)


def _counts(config: Config, replica: int) -> list[int]:
    """The numbers of microbatches that divide the replica's batch, ascending."""
    if config.micro_batch is not None:
        return [replica // config.micro_batch] if replica % config.micro_batch == 0 else []
    if config.microbatches is not None:
        return [config.microbatches] if replica % config.microbatches == 0 else []
    return divisors(replica)


def _microbatches(
    config: Config, global_batch: int, dp: int, pp: int, rules: BatchRules, filled: list[str], problems: list[Problem]
) -> BatchSizes | None:
    replica = global_batch // dp
    counts = _counts(config, replica)
    key = "micro_batch" if config.micro_batch is not None else "microbatches"
    if not counts:
        size = getattr(config, key)
        message = f"global_batch={global_batch} is not divisible by dp x {key} = {dp} x {size} = {dp * size}"
        step = dp * (size if key == "micro_batch" else size * rules.parts)
        fix = either(key, nearest(size, divisors(replica))) + " or " + _around(global_batch, step)
        problems.append(Problem(message, key, fix, kind="arithmetic"))
        return None
    batches = [_batch(global_batch, dp, m) for m in counts]
    if len(batches) == 1 and (config.micro_batch is not None or config.microbatches is not None):
        return batches[0]
    # If none is legal, the strategies' own checks report the violations of one that the schedule allows.
    legal = [batch for batch in batches if rules.allow(batch)]
    legal = legal or [batch for batch in batches if not rules.violations(batch)] or batches[-1:]
    batch, why = _best(legal, pp, rules) if len(legal) > 1 else (legal[0], "the only legal number")
    filled.append(f"microbatches={batch.microbatches} of {batch.micro_batch} (filled: {why})")
    return batch


def in_whole_rounds(microbatches: int, pp: int) -> bool:
    """Return whether every schedule of several microbatches allows this many.

    Interleaved schedules run through a rank's stages in equal rounds of about pp microbatches.
    """
    return microbatches >= pp and microbatches % (microbatches // pp) == 0


def _best(legal: list[BatchSizes], pp: int, rules: BatchRules) -> tuple[BatchSizes, str]:
    """(the batch chosen by the module's rule, the reason). legal: by ascending number of microbatches."""
    why = "the fewest"
    if pp > 1:
        rounds = [batch for batch in legal if in_whole_rounds(batch.microbatches, pp)] or legal
        enough = [batch for batch in rounds if batch.microbatches >= MICROBATCHES_PER_STAGE * pp]
        why = f"{MICROBATCHES_PER_STAGE} x pp {pp}" if enough else f"the most of {legal[-1].replica_batch} samples"
        legal = enough or rounds[-1:]
        small = [batch for batch in legal if batch.micro_batch * rules.tokens <= EFFICIENT_TOKENS] or legal[-1:]
        if small[0] is not legal[0]:
            legal, why = small, f"of at most {EFFICIENT_TOKENS:,} tokens"
    if len(legal) == 1:
        return legal[0], why
    index = bisect_left(legal, True, key=rules.fits)  # a smaller microbatch never needs more memory
    if index == len(legal):
        return legal[-1], "the smallest: no larger ones fit a device"
    return legal[index], "the fewest whose memory fits" if index else why
