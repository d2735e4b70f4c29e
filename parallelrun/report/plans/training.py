"""The lines of `parallelrun plan` on a whole training: its days, and its failures, checkpoints and spare nodes."""

from __future__ import annotations

from parallelrun.base.wording import counted
from parallelrun.planner.facts.plan_facts import Facts
from parallelrun.planner.predict.cluster_cost import DAY, SUSTAINED
from parallelrun.planner.predict.goodput import CONFIDENCE, HOUR, Goodput
from parallelrun.report.figures import count_text, digits, seconds_text


def text(results: Facts) -> str:
    """Return how many days the given number of tokens takes, without failures."""
    training = results.training
    assert training is not None
    text = f"{count_text(training.tokens)} tokens are {training.steps:,} steps: "
    seconds = training_s(results)
    if seconds:
        price = training.price_per_day
        return f"{text}about {digits(seconds / DAY)} days" + (f", price {seconds / DAY * price:,.0f}" if price else "")
    if training.sustained is None:
        return f"{text}days unknown, because the cluster gives no rates"
    if training.at_peak is not None:
        longest, shortest = (digits(days) for days in training.at_peak)
        text += f"{shortest} days (communication overlapped) to {longest} days (not overlapped) at the peak rate, "
    share = f"{SUSTAINED:.1%} of it, the median of the trainings in SC21"
    return f"{text}{digits(training.sustained)} days at {share}"


def training_s(results: Facts) -> float | None:
    """The predicted seconds of the training, if tokens are given and a step is predicted."""
    return results.training.steps * results.time.step_s if results.training and results.time else None


def goodput_text(goodput: Goodput, training_s: float | None, brief: bool = False) -> str:
    """Return the useful part of the time, what the rest is, the best interval of checkpoints, and the spare nodes.

    training_s: seconds of the training without failures. brief: without what the rest is.
    """
    shares, days = goodput.shares, ""
    if training_s and shares.useful:
        days = f": {digits(training_s / DAY / shares.useful)} days"
    every = f"checkpoint.every={goodput.interval_steps}, " if goodput.interval_steps else "save every "
    spares, sure = counted(goodput.spares, "spare node"), f"{CONFIDENCE:.0%} sure"
    lines = (
        f"{shares.useful:.1%} of the time is useful{days} with failures every {_time(goodput.mtbf_s)}",
        f"else: {shares.saving:.1%} saving ({_time(goodput.save_s)} each), {shares.repeated:.1%} repeated, "
        f"{shares.restarting:.1%} restarting, {shares.waiting:.1%} waiting",
        f"{every}{_time(goodput.interval_s)}",
        f"{spares} beside {goodput.nodes:,}: {sure} not to await repairs of {_time(goodput.repair_s)}",
    )
    return "\n".join(line for line in lines if not (brief and line is lines[1]))


def _time(seconds: float) -> str:
    """Seconds for people: 31.5 s, 4.2 min, 3.09 h, 12 days."""
    for unit, size, most in (("min", 60.0, HOUR), ("h", HOUR, 2 * DAY), ("days", DAY, float("inf"))):
        if size <= seconds < most:
            return f"{digits(seconds / size)} {unit}"
    return seconds_text(seconds)
