"""Values that follow from several settings. A row of a table names the function (`call`), which gets the row's value
and the translation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelrun.cli.flag_formats.settings import LeftOpen, NoCounterpart

if TYPE_CHECKING:
    from parallelrun.cli.flag_formats.table import Translation

_MICRO, _ACCUMULATED = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def betas(beta2: float, run: Translation) -> list[float]:
    beta1 = run["--adam-beta1"]
    return [run["optimizer.beta1"] if beta1 is None else beta1, beta2]


def dp_of_deepspeed(total: int, run: Translation) -> int:
    micro, accumulated = run[_MICRO], run[_ACCUMULATED]
    if total < micro * accumulated or total % (micro * accumulated):
        raise ValueError(f"not a multiple of {_MICRO} = {micro} times {_ACCUMULATED} = {accumulated}")
    return int(total // (micro * accumulated))


def dp_of_megatron(_: int, run: Translation) -> int:
    """From the launcher's world size; torchrun's own defaults are 1."""
    tp, pp, cp = (run[f"--{axis}-parallel-size"] or 1 for axis in ("tensor-model", "pipeline-model", "context"))
    world = (run["--nproc-per-node"] or 1) * (run["--nnodes"] or 1)
    if world % (tp * pp * cp):
        axes = "tp x pp" if cp == 1 else "tp x pp x cp"
        raise ValueError(f"{world} ranks are not a multiple of {axes} = {tp * pp * cp}")
    return int(world // (tp * pp * cp))


def min_lr_ratio(min_lr: float, run: Translation) -> float:
    if min_lr and not run["--lr"]:
        raise LeftOpen("it is a share of --lr, which is not known")
    return round(min_lr / run["--lr"], 12) if min_lr else 0


def batches(samples: int, run: Translation) -> int:
    if not run["--global-batch-size"]:
        raise LeftOpen("the batch is not known")
    return int(samples // run["--global-batch-size"])


def _last_step_of_decay(run: Translation) -> int | None:
    samples, batch = run["--lr-decay-samples"], run["--global-batch-size"]
    return run["--lr-decay-iters"] or (samples // batch if samples and batch else None)


def decay(_: int, run: Translation) -> None:
    last = _last_step_of_decay(run)
    if last is None:
        raise NoCounterpart("the batch is not known")
    if last != run.values.get("steps"):
        raise NoCounterpart("the learning rate decays until the last step")


def share_of_decay(share: float, run: Translation) -> int:
    """Without an end of its own, the decay ends with the last step."""
    last = _last_step_of_decay(run) or run.values.get("steps")
    if not last:
        raise LeftOpen("the number of steps is not known")
    return round(share * last)


def head_width(width: int, run: Translation) -> int | None:
    hidden, heads = run["--hidden-size"], run["--num-attention-heads"]
    return None if hidden and heads and width == hidden // heads else width


def ffn_of_swiglu(_: str, run: Translation) -> int:
    return int(4 * run["--hidden-size"] * 2 / 3) // 64 * 64  # as Megatron-LM's arguments.py does


def shared_experts(width: int, run: Translation) -> int:
    expert = run["--moe-ffn-hidden-size"] or run.values.get("model.ffn") or 4 * run.values.get("model.hidden", 0)
    if not expert or width % expert:
        raise NoCounterpart("the shared expert is a multiple of model.expert_ffn wide")
    return int(width // expert)


def validation_share(shares: list[float], run: Translation) -> float:
    return shares[1]


def test_share(shares: list[float], run: Translation) -> None:
    if shares[2]:
        raise NoCounterpart("the part for the test is trained on")


def virtual_stages(layers_each: int, run: Translation) -> int | None:
    pp, layers = run["--pipeline-model-parallel-size"] or 1, run["--num-layers"] or 1
    if pp == 1 or not layers_each or layers % (pp * layers_each):
        raise ValueError(f"{layers} layers are not {pp} ranks times whole virtual stages of so many")
    return layers // (pp * layers_each) if layers > pp * layers_each else None
