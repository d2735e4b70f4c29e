"""The training steps that a calibration times: few, small, and different from each other."""

from __future__ import annotations

TIMED_STEPS = ("bench.warmup=5", "bench.steps=51", "dataset=synthetic")


def _gpt(hidden: int, layers: int, seq: int, batch: int, *more: str) -> tuple[str, ...]:
    return (
        "model=gpt", f"model.hidden={hidden}", f"model.layers={layers}", f"model.seq={seq}", f"global_batch={batch}",
        *more,
    )  # fmt: skip


# The most telling first: when time runs out, the rest is skipped.
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("two ranks, ddp", _gpt(128, 4, 64, 16, "strategy=ddp", "dp=2")),
    ("two ranks, tiny", _gpt(32, 3, 32, 4, "strategy=ddp", "dp=2")),
    ("many weights, few tokens", _gpt(384, 3, 16, 4, "strategy=ddp", "dp=2")),
    ("one rank, small", _gpt(64, 4, 64, 8, "strategy=single")),
    ("one rank, large", _gpt(384, 3, 128, 8, "strategy=single")),
    ("two ranks, tensor parallel", _gpt(256, 2, 64, 8, "strategy=tp", "tp=2")),
    ("four ranks, ddp", _gpt(64, 6, 32, 16, "strategy=ddp", "dp=4")),
    ("long sequences", _gpt(64, 2, 512, 4, "strategy=ddp", "dp=2")),
    ("a small residual network", ("model=resnet", "model.image=32", "global_batch=16", "strategy=ddp", "dp=2")),
    ("two stages", _gpt(128, 4, 64, 16, "strategy=1f1b", "pp=2", "microbatches=4")),
    ("experts", ("model=moe_gpt", "model.layers=4", "global_batch=8", "strategy=ddp", "dp=2")),
    ("sharded weights", _gpt(128, 4, 64, 8, "strategy=fsdp", "dp=2")),
)

# Large enough that kernels, not the host, take the time; those that need more GPUs than there are are left out.
STEPS_ON_GPUS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("one GPU", _gpt(1024, 6, 1024, 8, "model.heads=16", "strategy=single", "precision=bf16")),
    ("one GPU, small", _gpt(256, 4, 256, 8, "strategy=single", "precision=bf16")),
    ("one GPU, long sequences", _gpt(1024, 4, 4096, 2, "model.heads=16", "strategy=single", "precision=bf16")),
    ("one GPU, a residual network", ("model=resnet50", "global_batch=32", "strategy=single", "precision=bf16")),
    ("two GPUs, ddp", _gpt(1024, 6, 1024, 16, "model.heads=16", "strategy=ddp", "dp=2", "precision=bf16")),
    ("two GPUs, tensor parallel", _gpt(2048, 4, 1024, 8, "model.heads=16", "strategy=tp", "tp=2", "precision=bf16")),
)
