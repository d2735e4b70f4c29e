"""Megatron-LM: the arguments of pretrain_gpt.py (megatron/training/arguments.py), on a command line or in a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from parallelrun.cli.flag_formats.megatron_table import DEFAULTS, LATENT_DEFAULTS, REQUIRED, TABLE, WITH, YARN
from parallelrun.cli.flag_formats.settings import (
    NoCounterpart,
    Setting,
    Settings,
    Translation,
    choice,
    flag,
    number,
    only,
    text,
    whole,
)

_DTYPE_OF = {"--bf16": "bf16", "--fp16": "fp16"}
_SHARDED = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"}
_VOCABS = {"GPT2BPETokenizer": 50257}  # other tokenizers say it in files
_LATENT = "--multi-latent-attention"
LAUNCHER = ("--nproc_per_node", "--nproc-per-node", "--nnodes")


def translate(settings: Sequence[Setting]) -> Translation:
    """The recipe for these arguments."""
    found = Translation()
    names = {setting.name for setting in settings}
    defaults = dict(DEFAULTS)
    for argument in names & WITH.keys():
        defaults |= WITH[argument]
    every = Settings(settings, defaults, found)
    for name in [name for name in REQUIRED if name not in names]:
        found.leave_open(REQUIRED[name], Setting(name, "not given"), "Megatron-LM needs it")
    tp = every.move("--tensor-model-parallel-size", whole, "tp") or 1
    pp = every.move("--pipeline-model-parallel-size", whole, "pp") or 1
    _precision_and_optimizer(every)
    _model(every)
    _experts(every)
    _data(every)
    for name, tracker in (("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")):
        if setting := every.pop(name):  # whatever its value is
            found.track(tracker, setting)
    _pipeline(every, pp, every.move("--num-layers", whole, "model.layers") or 1)
    _data_parallel(every, tp, pp)
    every.translate(TABLE)
    return found


def _precision_and_optimizer(every: Settings) -> None:
    found = every.found
    chosen = next((name for name in _DTYPE_OF if name in every.names), None)
    taken = every.take(chosen, flag) if chosen else None
    found.choose("precision", _DTYPE_OF[chosen] if chosen and taken and taken[1] else "fp32",
                 taken[0] if taken else Setting("--bf16", "not given"))  # fmt: skip
    if taken := every.take("--optimizer", choice({"adam": "adamw", "sgd": "sgd"})):
        found.choose("optimizer", taken[1], taken[0])
    betas = [every.take(name, number) for name in ("--adam-beta1", "--adam-beta2")]
    if betas[0] and betas[1] and found.groups.get("optimizer") != "sgd":
        found.put("optimizer.betas", [betas[0][1], betas[1][1]], betas[1][0])
    lr, lowest = every.move("--lr", number, "optimizer.lr"), every.take("--min-lr", number)
    if lowest and (lr or not lowest[1]):
        found.put("optimizer.min_lr_ratio", round(lowest[1] / lr, 12) if lr else 0, lowest[0])
    elif lowest:
        found.leave_open("optimizer.min_lr_ratio", lowest[0], "it is a share of --lr, which is not known")
    _steps(every)


def _steps(every: Settings) -> None:
    """Batch, steps and warm-up: without --global-batch-size, a step has one microbatch on every data-parallel rank."""
    found = every.found
    batch, steps = every.move("--global-batch-size", whole, "global_batch"), every.move("--train-iters", whole, "steps")
    micro = every.move("--micro-batch-size", whole, "micro_batch")
    if micro and "--global-batch-size" not in every.names:
        found.put("local_batch", micro, Setting("--global-batch-size", "micro-batch-size x dp"))
    samples = every.take("--train-samples", whole)
    if batch and samples and not steps:
        steps = samples[1] // batch
        found.put("steps", steps, samples[0])
    elif samples and not steps:
        found.leave_open("steps", samples[0], "the batch is not known")
    ends, decay = every.take("--lr-decay-iters", whole), every.take("--lr-decay-samples", whole)
    if decay and batch and not ends:
        ends = decay[0], decay[1] // batch
    elif decay and not ends:
        found.drop(decay[0], "the batch is not known")
    if ends and ends[1] != steps:
        found.drop(ends[0], "the learning rate decays until the last step")
    fraction, warmed = every.take("--lr-warmup-fraction", number), every.take("--lr-warmup-iters", whole)
    until, warm_samples = ends[1] if ends else steps, every.take("--lr-warmup-samples", whole)
    if fraction and until:
        found.put("optimizer.warmup", round(fraction[1] * until), fraction[0])
    elif fraction:
        found.leave_open("optimizer.warmup", fraction[0], "the number of steps is not known")
    elif warm_samples and batch:
        found.put("optimizer.warmup", warm_samples[1] // batch, warm_samples[0])
    elif warm_samples:
        found.leave_open("optimizer.warmup", warm_samples[0], "the batch is not known")
    elif warmed:
        found.put("optimizer.warmup", warmed[1], warmed[0])


def _model(every: Settings) -> None:
    found = every.found
    found.groups["model"] = "gpt"
    norm = every.move("--normalization", choice({"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}), "model.norm")
    hidden = every.move("--hidden-size", whole, "model.hidden")
    heads = every.move("--num-attention-heads", whole, "model.heads")
    grouped, groups = every.value("--group-query-attention", flag), every.take("--num-query-groups", whole)
    if groups and grouped:
        found.put("model.kv_heads", groups[1], groups[0])
    elif groups:
        found.drop(groups[0], "it means nothing without --group-query-attention")
    if (unbiased := every.take("--disable-bias-linear", flag)) and unbiased[1]:
        found.put("model.bias", False, unbiased[0])
        if norm != "rmsnorm":  # which has none
            found.put("model.norm_bias", True, unbiased[0])
    width = hidden // heads if hidden and heads else 0
    if _LATENT in every.names:
        _latent_attention(every)
    else:
        every.take("--kv-channels", only(width, f"a head is hidden / heads = {width} wide"))
    gated = every.take("--swiglu", flag)
    if gated:
        found.put("model.activation", "swiglu", gated[0])
    if not every.move("--ffn-hidden-size", whole, "model.ffn") and gated and hidden:
        found.put("model.ffn", int(4 * hidden * 2 / 3) // 64 * 64, gated[0])  # as arguments.py does
    if rotary := every.take("--use-rotary-position-embeddings", flag):
        found.put("model.position", "rope", rotary[0])
    every.take("--rotary-percent", only(1, "all of a head is rotated"))
    seq = every.move("--seq-length", whole, "model.seq")
    every.take("--max-position-embeddings", only(seq, "there are as many positions as model.seq"))
    scaled, factor = every.take("--use-rope-scaling", flag), every.take("--rope-scaling-factor", number)
    if scaled and scaled[1]:
        found.put("model.rope_scaling", "llama3", scaled[0])
        found.put("model.rope_factor", factor[1] if factor else 8.0, factor[0] if factor else scaled[0])
    elif factor:
        found.drop(factor[0], "it means nothing without --use-rope-scaling")


def _latent_attention(every: Settings) -> None:
    """Heads have sizes of their own, and the norms of latents are what --qk-layernorm asks for."""
    found = every.found
    asked = every.take(_LATENT, flag)
    every.pop("--kv-channels")
    for name, (_, key) in LATENT_DEFAULTS.items():
        every.move(name, whole, key)
    every.move("--q-lora-rank", whole, "model.q_lora_rank")
    if not every.pop("--qk-layernorm") and asked:
        found.drop(asked[0], "latents are normalised, as --qk-layernorm asks for")
    kind = every.take("--rope-type", choice({"yarn": True, "rope": False}))
    factor = every.take("--rotary-scaling-factor", number)
    if factor and kind and not kind[1]:
        found.drop(factor[0], "--rope-type rope scales nothing")
    elif factor and factor[1] > 1:
        found.put("model.rope_scaling", "yarn", factor[0])
        found.put("model.rope_factor", factor[1], factor[0])
        every.move("--original-max-position-embeddings", whole, "model.rope_original_seq")
        for name, key in YARN.items():
            every.move(name, number, key)


def _experts(every: Settings) -> None:
    found = every.found
    width = every.move("--moe-ffn-hidden-size", whole, "model.expert_ffn")
    if shared := every.take("--moe-shared-expert-intermediate-size", whole):
        one = width or found.values.get("model.ffn") or 4 * found.values.get("model.hidden", 0)
        if one and shared[1] % one == 0:
            found.put("model.shared_experts", shared[1] // one, shared[0])
        else:
            found.drop(shared[0], "the shared expert is a multiple of model.expert_ffn wide")
    if "--num-experts" in every.names:
        found.values["model.expert_period"] = 1  # ours is 2
    if places := every.take("--moe-layer-freq", _expert_layers):
        found.put("model.expert_period", 1, places[0])
        if places[1]:
            found.put("model.dense_layers", places[1], places[0])
    bias, rate = (
        every.take("--moe-router-enable-expert-bias", flag),
        every.value("--moe-router-bias-update-rate", number),
    )
    if bias:
        found.put("model.router.bias_rate", rate or 1e-3, bias[0])
    balanced = choice({"aux_loss": "micro_batch", "seq_aux_loss": "", "none": None})
    kind, weight = every.take("--moe-router-load-balancing-type", balanced), every.take("--moe-aux-loss-coeff", number)
    if kind and kind[1] is None:
        found.put("model.router.aux_coefficient", 0, kind[0])
    elif weight:
        found.put("model.router.aux_coefficient", weight[1], weight[0])
        if kind and kind[1] and weight[1] and (micro := found.values.get(kind[1])):
            found.put("model.router.group_samples", micro, kind[0])  # the loss is that of a microbatch
    tp = found.values.get("tp", 1)
    every.take("--expert-tensor-parallel-size", only(tp, "experts are split over tp as all layers are"))


def _expert_layers(value: Any) -> int:
    """The number of layers before the first of the layers with experts, which all that follow have."""
    pattern = re.fullmatch(r"\(?(?:\[0\]\*(\d+)\+)?\[1\]\*\d+\)?", re.sub(r"[ '\"]", "", str(value)))
    if pattern:
        return int(pattern[1] or 0)
    if str(value) != "1":
        raise NoCounterpart("after the first dense layers, all layers have experts")
    return 0


def _data(every: Settings) -> None:
    found = every.found
    if path := every.take("--data-path", _one_path, may_be_unknown=True):
        found.choose("dataset", "megatron", path[0])
        found.put("dataset.path", path[1], path[0])
    elif mocked := every.take("--mock-data", flag):
        found.choose("dataset", "synthetic", mocked[0])
    else:
        found.groups["dataset"] = "synthetic"
    if (split := every.take("--split", _held_out)) and path:
        found.put("dataset.val_fraction", split[1][1], split[0])
        if split[1][2]:
            found.drop(split[0], "the part for the test is trained on")
    vocab, tokenizer = every.move("--vocab-size", whole, "model.vocab"), every.take("--tokenizer-type", text)
    if vocab:
        return
    if not tokenizer:
        found.leave_open("model.vocab", Setting("--vocab-size", "not given"), "it is that of the tokenizer")
        return
    if tokenizer[1] in _VOCABS:
        found.put("model.vocab", _VOCABS[tokenizer[1]], tokenizer[0])
    else:
        found.leave_open("model.vocab", tokenizer[0], "its vocabulary is in files")


def _one_path(value: Any) -> str:
    if isinstance(value, list):
        raise NoCounterpart("a mixture of several files")
    return text(value)


def _held_out(value: Any) -> list[float]:
    """The parts for training, validation and test."""
    parts = [number(one) for one in str(value).split(",")]
    if len(parts) != 3 or not 0 < parts[1] < sum(parts):
        raise NoCounterpart("a part for validation is needed")
    return [round(part / sum(parts), 9) for part in parts]


def _pipeline(every: Settings, pp: int, layers: int) -> None:
    found = every.found
    per_stage = every.take("--num-layers-per-virtual-pipeline-stage", whole)
    stages = every.take("--num-virtual-stages-per-pipeline-rank", whole)
    if pp > 1 and per_stage and per_stage[1] and layers % (pp * per_stage[1]) == 0:
        stages = per_stage[0], layers // (pp * per_stage[1])
    elif per_stage:
        found.fault(per_stage[0], f"{layers} layers are not {pp} ranks times whole virtual stages of so many")
    if stages and stages[1] > 1 and pp > 1:
        found.put("strategy.pipeline.kind", "interleaved", stages[0])
        found.put("strategy.pipeline.virtual_stages", stages[1], stages[0])


def _data_parallel(every: Settings, tp: int, pp: int) -> None:
    """dp from the launcher's world size, and the data strategy. cp is read here."""
    found = every.found
    cp = every.move("--context-parallel-size", whole, "cp") or 1
    model_ranks, of = tp * pp * cp, "tp x pp" if cp == 1 else "tp x pp x cp"
    per_node = [every.take(name, whole) for name in LAUNCHER[:2]]
    nodes, here = every.take("--nnodes", whole), per_node[0] or per_node[1]
    if counted := here or nodes:
        world = (here[1] if here else 1) * (nodes[1] if nodes else 1)  # torchrun's own defaults
        if world % model_ranks:
            found.fault(counted[0], f"{world} ranks are not a multiple of {of} = {model_ranks}")
        else:
            found.put("dp", world // model_ranks, counted[0])
    found.groups["strategy"] = "ptdp"
    in_sequence = every.take("--sequence-parallel", flag)
    if in_sequence and tp > 1:  # Megatron-LM turns it off at tp=1
        found.put("strategy.tensor.sequence_parallel", in_sequence[1], in_sequence[0])
    elif in_sequence:
        found.drop(in_sequence[0], "it means nothing with tp=1")
    kinds = choice(_SHARDED)
    sharded = every.take("--use-distributed-optimizer", flag)
    fsdp = every.take("--use-torch-fsdp2", flag) or every.take("--use-megatron-fsdp", flag)
    how = every.take("--data-parallel-sharding-strategy", kinds)
    if how and not fsdp:
        found.drop(how[0], "it means nothing without --use-megatron-fsdp")
    if fsdp:
        found.put("strategy.data.kind", how[1] if how else "fsdp", fsdp[0])
    elif sharded:
        found.put("strategy.data.kind", "zero1", sharded[0])
