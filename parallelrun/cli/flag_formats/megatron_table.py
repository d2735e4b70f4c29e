"""The table of Megatron-LM's arguments: the key for each, or why there is none; and its defaults where ours differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelrun.cli.flag_formats.settings import Counterpart, Table, choice, flag, number, whole

_LOGGING, _SPEED = "parallelrun logs in its own form", "it changes speed, not what is computed"

# The values of arguments.py for what is not given, where they are not ours or where a preset would choose.
DEFAULTS: Mapping[str, Any] = {
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "1",
    "--hidden-dropout": "0.1",
    "--attention-dropout": "0.1",
    "--lr-decay-style": "linear",
    "--min-lr": "0",
    "--lr-warmup-iters": "0",
    "--weight-decay": "0.01",
    "--adam-beta1": "0.9",
    "--adam-beta2": "0.999",
    "--seed": "1234",
    "--eval-interval": "1000",
    "--eval-iters": "100",
}
LATENT_DEFAULTS = {  # by the arguments for latent attention, with the key for each
    "--kv-lora-rank": ("32", "model.kv_lora_rank"),
    "--qk-head-dim": ("128", "model.qk_nope_head_dim"),
    "--qk-pos-emb-head-dim": ("64", "model.qk_rope_head_dim"),
    "--v-head-dim": ("128", "model.v_head_dim"),
}
YARN = {  # by the arguments for frequencies under latent attention, whose defaults are ours
    "--mscale": "model.rope_mscale",
    "--mscale-all-dim": "model.rope_mscale_all_dim",
    "--beta-fast": "model.rope_beta_fast",
    "--beta-slow": "model.rope_beta_slow",
}
REQUIRED = {  # by the arguments without which Megatron-LM does not train, with the key that stays open
    "--num-layers": "model.layers",
    "--hidden-size": "model.hidden",
    "--num-attention-heads": "model.heads",
    "--seq-length": "model.seq",
    "--micro-batch-size": "micro_batch",
    "--lr": "optimizer.lr",
}
WITH: Mapping[str, Mapping[str, Any]] = {  # more defaults, by the argument that makes them count
    "--num-experts": {
        "--moe-router-topk": "2",
        "--moe-router-load-balancing-type": "aux_loss",
        "--moe-aux-loss-coeff": "0",
        "--moe-layer-freq": "1",
    },
    "--fp16": {"--initial-loss-scale": str(2**32)},
    "--data-path": {"--split": "969,30,1"},
    "--group-query-attention": {"--num-query-groups": "1"},
    "--multi-latent-attention": {name: value for name, (value, _) in LATENT_DEFAULTS.items()},
}

TABLE: Table = {
    # model
    "--norm-epsilon": Counterpart("model.norm_eps", number),
    "--layernorm-epsilon": Counterpart("model.norm_eps", number),
    "--position-embedding-type": Counterpart("model.position", choice({"learned_absolute": "learned", "rope": "rope"})),
    "--rotary-base": Counterpart("model.rope_theta", number),
    "--untie-embeddings-and-output-weights": Counterpart("model.tied_embeddings", lambda value: not flag(value)),
    "--init-method-std": Counterpart("model.init_std", number),
    "--hidden-dropout": Counterpart("dropout", number),
    "--attention-dropout": Counterpart("model.attention_dropout", number),
    # experts
    "--num-experts": Counterpart("model.experts", whole),
    "--moe-router-topk": Counterpart("model.router.top_k", whole),
    "--moe-z-loss-coeff": Counterpart("model.router.z_coefficient", number),
    "--moe-router-score-function": Counterpart("model.router.score", choice({"softmax": "softmax",
                                                                            "sigmoid": "sigmoid"})),
    "--moe-router-topk-scaling-factor": Counterpart("model.router.scaling", number),
    "--moe-router-num-groups": Counterpart("model.router.n_group", whole),
    "--moe-router-group-topk": Counterpart("model.router.topk_group", whole),
    "--moe-router-pre-softmax": Counterpart("model.router.renormalise", lambda value: "none" if flag(value) else
                                            "before"),
    "--moe-expert-capacity-factor": Counterpart("model.router.capacity_factor", number),
    "--moe-token-drop-policy": Counterpart("model.router.drop_policy", choice({"probs": "probability",
                                                                               "position": "position"})),
    "--moe-input-jitter-eps": Counterpart("model.router.jitter", number),
    # parallelism
    "--expert-model-parallel-size": Counterpart("ep", whole),
    "--recompute-granularity": Counterpart("recompute", choice({"full": "full", "selective": "selective"})),
    "--recompute-activations": Counterpart("recompute", lambda value: "selective"),
    "--checkpoint-activations": Counterpart("recompute", lambda value: "full"),
    # training
    "--lr-decay-style": Counterpart("optimizer.schedule", choice({"constant": "constant", "linear": "linear",
                                                                  "cosine": "cosine"})),
    "--weight-decay": Counterpart("optimizer.weight_decay", number),
    "--adam-eps": Counterpart("optimizer.eps", number),
    "--sgd-momentum": Counterpart("optimizer.momentum", number),
    "--clip-grad": Counterpart("optimizer.clip", number),
    "--initial-loss-scale": Counterpart("precision.loss_scale", number),
    "--loss-scale-window": Counterpart("precision.scale_window", whole),
    "--seed": Counterpart("seed", whole),
    "--eval-interval": Counterpart("eval.every", whole),
    "--eval-iters": Counterpart("eval.batches", whole),
    "--save-interval": Counterpart("checkpoint.every", whole),
    "--distributed-timeout-minutes": Counterpart("timeout_s", lambda value: 60 * number(value)),
    # no counterpart
    "--save": "a run writes into its own directory below runs=",
    "--load": "checkpoints of Megatron-LM are not read; weights come in by init.from= from Hugging Face directories",
    "--rampup-batch-size": "the batch size is constant",
    "--make-vocab-size-divisible-by": "the vocabulary is never padded in the model, only locally",
    "--vocab-file": "a tokenizer's file belongs to `parallelrun tokenize`",
    "--merge-file": "a tokenizer's file belongs to `parallelrun tokenize`",
    "--tokenizer-model": "a tokenizer's file belongs to `parallelrun tokenize`",
    "--qk-layernorm": "queries and keys are not normalised",
    "--recompute-method": "recompute= applies to every layer",
    "--recompute-num-layers": "recompute= applies to every layer",
    "--moe-token-dispatcher-type": "the dispatcher follows the router",
    "--use-mcore-models": _SPEED,
    "--use-flash-attn": _SPEED,
    "--transformer-impl": _SPEED,
    "--attention-backend": _SPEED,
    "--overlap-grad-reduce": _SPEED,
    "--overlap-param-gather": _SPEED,
    "--tp-comm-overlap": _SPEED,
    "--moe-grouped-gemm": _SPEED,
    "--moe-permute-fusion": _SPEED,
    "--no-masked-softmax-fusion": _SPEED,
    "--accumulate-allreduce-grads-in-fp32": "gradients are always summed in fp32",
    "--log-interval": _LOGGING,
    "--log-throughput": _LOGGING,
    "--log-timers-to-tensorboard": _LOGGING,
    "--distributed-backend": "nccl on GPUs, gloo on CPUs",
    "--num-workers": "the data is read in the background",
}  # fmt: skip
