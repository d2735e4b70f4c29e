"""The programs whose step times were published: what of them differs from this program.

By their documentation and papers and, where these are silent, by what is known of the programs; settings were chosen
with the published times of `dev_*` in view.
"""

from __future__ import annotations

from dataclasses import replace

from parallelrun.planner.predict.step_time.stack import OURS, SoftwareStack

# Megatron's loss over a split vocabulary (cross_entropy.py), which nanotron copies: cast to fp32, max, difference, exp,
# sum and quotient, each a kernel; backward a product and a cast.
LOGIT_BYTES = (38, 14)
# Megatron-LM of 2021 (Narayanan et al., SC21): attention with scores in memory, one kernel for scale, mask and softmax,
# whole forward passes computed again (`CheckpointFunction`, which saves and sets four states of random numbers), fp16
# weights and gradients, summed in one message after the backward pass; messages in parts (4.1). Its layers issue about
# half more operations than this program's: dropout, biases apart from products.
MEGATRON_2021 = SoftwareStack(
    fused_attention=False, logit_bytes=LOGIT_BYTES, stops_early=False,
    operations=1.44, recompute_operations=36, data_overlap=False, bucket=10**12, gradient_overlap=False,
    scattered_messages=True, rounded_weights=True, rounded_gradients=True,
)  # fmt: skip
# Megatron-Core with Transformer Engine (README, "overlap of data-parallel, tensor-parallel and pipeline-parallel
# communication"): userbuffers, cuDNN's attention (FlashAttention-3's figure 5: 600 TFLOP/s to 370), bf16 weights and
# gradients (grad_reduce_in_fp32=False in NVIDIA's recipes), which products add up (`gradient_accumulation_fusion`), and
# buckets of 40 million (`--ddp-bucket-size`). Its selective recomputation is attention's.
MEGATRON_CORE = SoftwareStack(
    logit_bytes=LOGIT_BYTES, stops_early=False, fused_rotation=True, attention=1.62, tensor_overlap=True,
    bucket=40_000_000, rounded_weights=True, rounded_gradients=True, fused_accumulation=True,
)  # fmt: skip
# llm-foundry: torch's FSDP with mixed_precision PURE (gradients summed in bf16), its checkpoints without reentrance,
# and FlashAttention 1 in Triton (`attn_impl: triton`), half as fast as the second (Dao 2023, figure 5).
LLM_FOUNDRY = SoftwareStack(attention=0.52, rounded_gradients=True)
# nanotron (src/nanotron): bf16 weights, gradients added up in fp32; with ZeRO-1 summed by one all-reduce after
# backward (trainer.py: sync_gradients_across_dp, reduce_scatter=False) and gathered after the optimizer's step, else
# summed in DDP's buckets of 25 MB in bf16 (`ddp_bucket_cap_mb`). A layer of it issues 40 operations more than one of
# this program: 5 for each of its 6 weights to add up its gradient (gradient_accumulator.py), 10 of Python around a
# block of the pipeline. With tensor parallelism, 82 more (tensor_parallel/functional.py): it multiplies in three
# parts, of the ranks before, its own, and after; 16 for each of two column products and 4 for each of two row
# products forward, 6 and 15 backward.
NANOTRON = SoftwareStack(
    logit_bytes=LOGIT_BYTES,
    operations=1.17,
    tensor_operations=(40, 42),
    gather_overlap=False,
    bucket=25 * 2**19,
    rounded_weights=True,
    whole_sums=True,
)
# The script that started the published runs (nanotron's run_multinode.sh) sets TORCH_DISTRIBUTED_DEBUG=DETAIL in its
# later version, not in the first; the driver (scripts/scaling_benchmarks.py) skips plans without stages that have
# run, and runs those with stages again. So do the times look: plans with stages on several nodes wait for their
# hosts, in proportion to tp, however small the microbatch, and the wait disappears under long computations.
NANOTRON_CHECKED = replace(NANOTRON, checked_collectives=True)

# By the first word of a row's `set`; this program's own where a set is not listed.
STACKS = {
    "SC21": MEGATRON_2021, "vTrain": MEGATRON_2021, "MCore": MEGATRON_CORE, "llmfoundry": LLM_FOUNDRY,
    "nanotron": NANOTRON,
}  # fmt: skip
NODE = 8  # GPUs of all published machines
# The machines that are not the usual ones of their GPU.
CLUSTERS = {"nanotron": "h100_efa"}
CLUSTERS_OF_GPUS = {
    "A100": "a100_dgx", "H100": "h100_dgx", "H800": "h800", "H200": "h200", "B200": "b200", "GB200": "gb200",
    "V100": "v100_32gb",
}  # fmt: skip


def origin(row: dict[str, str]) -> str:
    """The program of a published row."""
    return row["set"].partition("-")[0]


def stack_of(row: dict[str, str]) -> SoftwareStack:
    """What the program of a row does."""
    stack = STACKS.get(origin(row), OURS)
    return NANOTRON_CHECKED if stack is NANOTRON and int(row["pp"]) > 1 and int(row["N"]) > NODE else stack


def cluster_of(row: dict[str, str]) -> str:
    """The cluster file of a row. Raises KeyError for a GPU without one."""
    return CLUSTERS.get(origin(row)) or CLUSTERS_OF_GPUS[row["gpu"].partition("-")[0]]
