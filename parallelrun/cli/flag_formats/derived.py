"""The few keys that follow from more than one setting, and the few ways to read that only one runner has.

Each function is named in a table (`read:` or `call:`). One that is called gets its row's value and all values.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from parallelrun.cli.flag_formats.settings import LeftOpen, Needed, NoCounterpart, number, only, whole

if TYPE_CHECKING:
    from parallelrun.cli.flag_formats.table import Values

_VOCABS = {"GPT2BPETokenizer": 50257}  # other tokenizers say it in files
_PRESETS = {  # (name, flavor) of torchtitan -> our preset of the same model
    ("llama3", "8B"): "llama3_8b",
    ("llama3", "70B"): "llama3_70b",
    ("deepseek_v3", "16B"): "deepseek_v2_lite",
    ("deepseek_v3", "671B"): "deepseek_v3",
}
_MICRO, _ACCUMULATED = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_REPLICAS = "parallelism.data_parallel_replicate_degree"


def power_of_two(value: Any) -> float:
    return 2.0 ** whole(value)


def pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not two numbers")
    return [number(part) for part in value]


def word(value: Any) -> str:
    return "no" if value is False else str(value)  # YAML reads a plain `no` as a switch


def betas(beta2: float, values: Values) -> list[float]:
    beta1 = values["--adam-beta1"]
    return [values["optimizer.beta1"] if beta1 is None else beta1, beta2]


def boolean(value: bool | str, values: Values) -> bool | None:
    return value if isinstance(value, bool) else None


def strategy_of_old_fsdp(value: bool | str, values: Values) -> str | None:
    """Version 1 of FSDP has the name of the strategy in the place of a switch."""
    return value if isinstance(value, str) else None


def dp_of_deepspeed(total: int, values: Values) -> int:
    micro, accumulated = values[_MICRO], values[_ACCUMULATED]
    if total < micro * accumulated or total % (micro * accumulated):
        raise ValueError(f"not a multiple of {_MICRO} = {micro} times {_ACCUMULATED} = {accumulated}")
    return int(total // (micro * accumulated))


def local_batch_of_deepspeed(accumulated: int, values: Values) -> int:
    return int(values[_MICRO] * accumulated)


def dp_of_accelerate(_: int, values: Values) -> int | None:
    product = (values["dp_shard_size"] or 1) * (values["dp_replicate_size"] or 1)
    return int(product) if product > 1 else None


def shard_of_accelerate(parts: int, values: Values) -> int:
    return int(parts * (values["cp_size"] or 1))  # they shard over cp too


def preset_of_torchtitan(flavor: str, values: Values) -> str:
    name = values["model.name"] or "llama3"
    if (name, flavor) not in _PRESETS:
        fixes = " or ".join(f"model={preset}" for preset in _PRESETS.values())
        raise Needed(f"there is no preset of {name} {flavor}", fixes, "parallelrun ls models")
    return _PRESETS[name, flavor]


def dp_of_torchtitan(parts: int, values: Values) -> int:
    return int((values[_REPLICAS] or 1) * parts)


def shard_of_torchtitan(parts: int, values: Values) -> int:
    return int(parts * (values["parallelism.context_parallel_degree"] or 1))  # they shard over cp too


def batches_of_torchtitan(batches: int, values: Values) -> int:
    if batches <= 0:
        raise LeftOpen("all of the validation set")
    return batches


def seconds(minutes: float, values: Values) -> float:
    return 60 * minutes


def dp_of_megatron(_: int, values: Values) -> int:
    """From the launcher's world size; torchrun's own defaults are 1."""
    tp, pp, cp = (values[f"--{axis}-parallel-size"] or 1 for axis in ("tensor-model", "pipeline-model", "context"))
    world = (values["--nproc-per-node"] or 1) * (values["--nnodes"] or 1)
    if world % (tp * pp * cp):
        axes = "tp x pp" if cp == 1 else "tp x pp x cp"
        raise ValueError(f"{world} ranks are not a multiple of {axes} = {tp * pp * cp}")
    return int(world // (tp * pp * cp))


def expert_tp(tp: int, values: Values) -> None:
    if tp != (values["--tensor-model-parallel-size"] or 1):
        raise NoCounterpart("experts are split over tp as all layers are")


def min_lr_ratio(lowest: float, values: Values) -> float:
    if lowest and not values["--lr"]:
        raise LeftOpen("it is a share of --lr, which is not known")
    return round(lowest / values["--lr"], 12) if lowest else 0


def batches(samples: int, values: Values) -> int:
    if not values["--global-batch-size"]:
        raise LeftOpen("the batch is not known")
    return int(samples // values["--global-batch-size"])


def _decay_end(values: Values) -> int | None:
    iterations, samples, batch = (values[f"--{name}"] for name in ("lr-decay-iters", "lr-decay-samples",
                                                                   "global-batch-size"))  # fmt: skip
    return iterations or (samples // batch if samples and batch else None)


def decay(_: int, values: Values) -> None:
    end = _decay_end(values)
    if end is None:
        raise NoCounterpart("the batch is not known")
    if end != values.keys_so_far.get("steps"):
        raise NoCounterpart("the learning rate decays until the last step")


def share_of_decay(fraction: float, values: Values) -> int:
    """The decay ends with the last step unless its end is given."""
    end = _decay_end(values) or values.keys_so_far.get("steps")
    if not end:
        raise LeftOpen("the number of steps is not known")
    return round(fraction * end)


def head_width(width: str, values: Values) -> None:
    hidden, heads = values["--hidden-size"], values["--num-attention-heads"]
    ours = hidden // heads if hidden and heads else 0
    only(ours, f"a head is hidden / heads = {ours} wide")(width)


def ffn_of_swiglu(_: str, values: Values) -> int:
    return int(4 * values["--hidden-size"] * 2 / 3) // 64 * 64  # as arguments.py does


def positions(positions: int, values: Values) -> None:
    if positions != values["--seq-length"]:
        raise NoCounterpart("there are as many positions as model.seq")


def dense_layers(value: Any) -> int:
    """The number of layers before the first of the layers with experts, which all that follow have."""
    pattern = re.fullmatch(r"\(?(?:\[0\]\*(\d+)\+)?\[1\]\*\d+\)?", re.sub(r"[ '\"]", "", str(value)))
    if not pattern and str(value) != "1":
        raise NoCounterpart("after the first dense layers, all layers have experts")
    return int(pattern[1] or 0) if pattern else 0


def shared_experts(width: int, values: Values) -> int:
    model = values.keys_so_far
    expert = values["--moe-ffn-hidden-size"] or model.get("model.ffn") or 4 * model.get("model.hidden", 0)
    if not expert or width % expert:
        raise NoCounterpart("the shared expert is a multiple of model.expert_ffn wide")
    return int(width // expert)


def microbatch(_: str, values: Values) -> Any:
    """The balancing loss is that of a microbatch."""
    return values["--micro-batch-size"]


def parts(value: Any) -> list[float]:
    """The parts of a data set for training, validation and test."""
    parts = [number(part) for part in str(value).split(",")]
    if len(parts) != 3 or not 0 < parts[1] < sum(parts):
        raise NoCounterpart("a part for validation is needed")
    return [round(part / sum(parts), 9) for part in parts]


def second(parts: list[float], values: Values) -> float:
    return parts[1]


def test_part(parts: list[float], values: Values) -> None:
    if parts[2]:
        raise NoCounterpart("the part for the test is trained on")


def vocab_of_tokenizer(tokenizer: str, values: Values) -> int:
    if tokenizer not in _VOCABS:
        raise LeftOpen("its vocabulary is in files")
    return _VOCABS[tokenizer]


def virtual_stages(layers_each: int, values: Values) -> int | None:
    pp, layers = values["--pipeline-model-parallel-size"] or 1, values["--num-layers"] or 1
    if pp == 1 or not layers_each or layers % (pp * layers_each):
        raise ValueError(f"{layers} layers are not {pp} ranks times whole virtual stages of so many")
    return layers // (pp * layers_each) if layers > pp * layers_each else None


def interleaved(_: int, values: Values) -> str | None:
    return "interleaved" if "strategy.pipeline.virtual_stages" in values.keys_so_far else None
