"""The configuration of the machine: the section `cluster`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelrun.config.schema.field import COUNT, key


@dataclass
class ClusterConfig:
    """The machine that `plan` computes costs for: sizes per device, rates per device and link.

    Plausible rates reach from one rank of many on a laptop to twice or more of what a GB300 or its ports do.
    """

    name: str = "local"
    description: str = ""
    nodes: int | None = key(None, "number of hosts", least=1, most=COUNT)
    gpus_per_node: int | None = key(None, "GPUs of a host", least=1, most=COUNT)
    memory_gb: float | None = key(
        None, "memory of a GPU, as its driver reports it", above=0, plausible=(0.1, 4000), unit="GB"
    )
    context_gb: float = key(
        0.0, "memory of a GPU that CUDA, its libraries and kernels take", least=0, plausible=(0.05, 8), unit="GB"
    )
    communicator_gb: float = key(
        0.0, "memory of a GPU that the buffers of a process group take", least=0, plausible=(0.005, 4), unit="GB"
    )
    allocator_slack: float = key(
        0.0, "unused memory of the allocator, as a part of the tensors' bytes", least=0, most=1
    )
    peak_tflops: Any = key(
        None, "dense peak of a GPU: a number, or one per precision: {fp32: 19.5, bf16: 312.0, ...}",
        above=0, plausible=(0.001, 10_000), unit="TFLOP/s",
    )  # fmt: skip
    intra_gb_s: float | None = key(
        None, "bandwidth within a host, per GPU and direction", above=0, plausible=(0.01, 2000), unit="GB/s"
    )
    inter_gb_s: float | None = key(
        None, "bandwidth between hosts, per GPU and direction", above=0, plausible=(0.01, 150), unit="GB/s"
    )
    latency_us: float | None = key(None, "latency of a message", least=0, plausible=(0.01, 1e5), unit="us")
    memory_gb_s: float | None = key(None, "bandwidth of a GPU's memory", above=0, plausible=(0.1, 30_000), unit="GB/s")
    host_gb_s: float | None = key(
        None, "bandwidth between a GPU and its host, per direction", above=0, plausible=(0.1, 1000), unit="GB/s"
    )
    host_memory_gb_s: float | None = key(
        None, "bandwidth of the host's memory, per GPU", above=0, plausible=(0.1, 1000), unit="GB/s"
    )
    price_per_gpu_hour: float | None = key(None, "price of a GPU for an hour, in any currency", above=0)
    multiprocessors: int = key(0, "units of a GPU, each of which computes a tile of a product; 0: no tiles", least=0)
    product_efficiency: float = key(0.8, "part of the peak that a large product reaches", above=0, most=1)
    product_ramp: float = key(100.0, "inner size at which a product reaches half of product_efficiency", least=0)
    attention_efficiency: float = key(0.38, "part of the peak that fused attention reaches", above=0, most=1)
    memory_efficiency: float = key(0.8, "part of the memory's bandwidth that simple kernels reach", above=0, most=1)
    kernel_us: float = key(4.0, "time from one kernel to the next", least=0, plausible=(0.001, 1e4), unit="us")
    operation_us: float = key(
        10.0, "time of the host to issue an operation", least=0, plausible=(0.001, 1e5), unit="us"
    )
    link_efficiency: float = key(0.78, "part of a link's bandwidth in a host that collectives reach", above=0, most=1)
    inter_efficiency: float = key(0.9, "part of a port's bandwidth that collectives reach", above=0, most=1)
    congestion: float = key(0.0, "with n hosts, a port has n ** -congestion of its bandwidth", least=0, most=1)
    collective_us: float = key(30.0, "fixed time of a collective", least=0, plausible=(0.01, 1e6), unit="us")
    hop_us: float = key(
        0.0,
        "time of a collective for each hop from rank to rank inside a host",
        least=0,
        plausible=(0.001, 1e4),
        unit="us",
    )
    step_us: float = key(0.0, "fixed time of a step", least=0, plausible=(0.01, 1e7), unit="us")
    cores: int | None = key(
        None, "CPU: cores of a host, which its ranks share; null: each rank has a device", least=1, most=COUNT
    )
    thread_efficiency: float = key(0.8, "CPU: part of a core's rate that each further thread adds", least=0, most=1)
    convolution_efficiency: float | None = key(None, "part of the peak that convolutions reach", above=0, most=1)
    ps: list[str] | None = key(None, "TensorFlow cluster: host:port of every parameter server")
    worker: list[str] | None = key(None, "TensorFlow cluster: host:port of every worker, worker 0 first")
