"""Memory of one rank, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step, by purpose. leaves_out: memory that is not counted.

    weights: with gathered ones that stay. gradients: with buckets and receive buffers. activations: saved for backward.
    temporary: tensors that exist only during the current backward computation (gradients of activations, logits,
    recomputed and gathered tensors, messages), and the batch. context, slack: what a GPU holds beside tensors, where
    the cluster gives constants for it (`device_memory`): the CUDA context and communicators; unused blocks of the
    allocator. host: of host memory, in no sum: what `offload` moves there.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int = 0
    leaves_out: tuple[str, ...] = field(default=())
    context: int = 0
    slack: int = 0
    host: int = 0

    @property
    def tensors(self) -> int:
        """Bytes of all tensors: what `torch.cuda.max_memory_allocated` measures."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary

    @property
    def total(self) -> int:
        return self.tensors + self.context + self.slack

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, which sum to `total`; what a GPU holds beside tensors only where it is known."""
        names = ("weights", "gradients", "optimizer", "activations", "temporary")
        beside = {"context": self.context, "slack": self.slack}
        return {name: getattr(self, name) for name in names} | {name: size for name, size in beside.items() if size}
