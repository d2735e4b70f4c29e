"""The configuration of a run: what Hydra composes, `config.yaml` stores and `resolve` reads.

Each field states its default, its one-line help and its bounds; `parallelrun.config.keys` reads them for every check,
for `parallelrun ls keys` and for completion. A configuration holds only what was asked for: nothing in it is computed,
and nothing is changed after composition. `None` means "not given"; `resolve` then chooses a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from parallelrun.base.precision import AUTO, TABLE
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.field import COUNT, SAMPLES, key
from parallelrun.config.schema.model_schema import DatasetConfig, ModelConfig
from parallelrun.config.schema.stack_schema import StackConfig
from parallelrun.config.schema.tracker_schema import TrackerConfig

if TYPE_CHECKING:
    from typing_extensions import Self


DEFAULT_GLOBAL_BATCH = 48
BACKENDS = ("auto", "shm", "gloo")
CONSISTENCIES = ("sync", "async", "ssp")
RECOMPUTE = ("none", "selective", "full", "offload")
OBJECTIVES = ("time", "cost", "gpus")
SCHEDULES = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")  # of the learning rate


class AxisConfig:
    """The section `strategy.<axis>`. Each strategy adds its own keys in a subclass, its `config_class`."""

    axis: ClassVar[str]

    @classmethod
    def of(cls, config: Config) -> Self:
        """The section of a configuration whose strategy of this axis must have this class."""
        section = getattr(config.strategy, cls.axis)
        assert isinstance(section, cls), f"{type(section).__name__} is no {cls.__name__}"
        return section


@dataclass
class DataStrategyConfig(AxisConfig):
    """Data parallelism."""

    axis = "data"
    kind: str = key("ddp", "data-parallel strategy")


@dataclass
class TensorStrategyConfig(AxisConfig):
    """Tensor parallelism."""

    axis = "tensor"
    kind: str = key("megatron", "tensor-parallel strategy")
    overlap: bool = key(True, "overlap the input-gradient reduce with the weight-gradient product")


@dataclass
class PipelineConfig:
    """Pipeline schedule. The planner cuts the model into stages by these keys, whatever the schedule."""

    kind: str = key("1f1b", "pipeline schedule")
    virtual_stages: int | None = key(None, "stages per rank; null: 2 where a schedule takes several, else 1", least=1)
    partition: str = key("cost", "cut of layers by cost (exact min-max), or uniform", choices=("cost", "uniform"))
    split: list[str] = key(list, "cut by hand: the first block of each stage except the first stage")


@dataclass
class ExpertConfig:
    """Expert parallelism. Every dispatcher reads these keys."""

    kind: str | None = key(None, "capacity or dropless; null: capacity if the router has one and tp splits experts")
    fills: bool = key(False, "if ep is not set, use the largest divisor of dp that divides the number of experts")
    chunks: int = key(1, "number of parts of a microbatch, whose all-to-all overlaps with computation", least=1)
    tp: int | None = key(None, "tp ranks that split an expert; null: all; 1: none, and ep spans dp x tp", least=1)
    group_size: int | None = key(None, "ep ranks per inner group of a hierarchical all-to-all; null: flat", least=1)
    overlap: bool = key(True, "compute the shared expert during the all-to-all")


@dataclass
class ContextConfig(AxisConfig):
    """Context parallelism."""

    axis = "context"
    kind: str = key("ring", "context-parallel strategy")


@dataclass
class StrategyConfig:
    """A preset of strategies. `own_axis` takes the ranks that no degree claims; `demo` applies if nothing is given."""

    name: str = "ptdp"
    description: str = ""
    own_axis: str = "dp"
    fill_order: list[str] = key(list, "axes that take the remaining ranks, in this order; []: own_axis")
    demo: dict[str, int] = key(dict, most=COUNT)
    searches: bool = False  # stands for the fastest plan that fits: nothing runs before a search has chosen one
    data: DataStrategyConfig = field(default_factory=DataStrategyConfig)
    tensor: TensorStrategyConfig = field(default_factory=TensorStrategyConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    router: dict[str, Any] = key(dict, "values of the preset for model.router")


@dataclass
class OptimizerConfig:
    """adamw | sgd | adagrad | lion | muon, with learning-rate schedule and gradient clipping."""

    name: str = "adamw"
    description: str = ""
    lr: float = key(3e-3, "learning rate", least=0)
    schedule: str = key("cosine", "decay of the learning rate", choices=SCHEDULES)
    decay_steps: int | None = key(
        None, "steps of the decay; null: all after warm-up, the last tenth under wsd", least=1
    )
    warmup: int = key(5, "warm-up steps", least=0)
    min_lr_ratio: float = key(0.1, "final learning rate divided by lr", least=0, most=1)
    weight_decay: float = key(0.1, "weight decay", least=0)
    betas: list[float] = key(lambda: [0.9, 0.95], "adamw, lion, muon: decay rates of the two moments")
    eps: float = key(1e-8, "adamw, adagrad, muon: epsilon", above=0)
    momentum: float = key(0.0, "sgd, muon: momentum", least=0, below=1)
    adjust_lr_fn: str = key(
        "match_rms_adamw", "muon: factor of lr by a matrix's sides", choices=("match_rms_adamw", "original")
    )
    clip: float = key(1.0, "largest global gradient norm; 0: no clipping", least=0)
    offload: bool = key(False, "keep the optimizer's state in host memory, and update the weights there")
    rounding: str = key("none", "stochastic: weights are bf16 without fp32 copies", choices=("none", "stochastic"))
    lr_scale: Any = key(None, "factor on lr: a number, or linear for dp; null: 1")


@dataclass
class PrecisionConfig:
    """fp32 | bf16 | fp16 | fp64 | fp8, defined in `parallelrun.base.precision`; auto, which the program fills in."""

    name: str = key("fp32", choices=(*TABLE, AUTO))
    description: str = ""
    loss_scale: float = key(65536.0, "fp16: initial loss scale", above=0)
    scale_window: int = key(1000, "fp16: steps without overflow before the scale doubles", least=1)


@dataclass
class EvalConfig:
    every: int = key(10, "steps between evaluations; 0: only after the last step", least=0)
    batches: int = key(2, "global batches per evaluation", least=1)


@dataclass
class CheckpointConfig:
    every: int = key(0, "steps between checkpoints; 0: none (a preempted run is still saved)", least=0)
    keep: int = key(2, "number of checkpoints to keep", least=1)
    last: bool | None = key(None, "save after the last step; null: yes, except in a sweep")
    change_data: bool = key(False, "resume although the data or their settings have changed since the checkpoint")
    asynchronous: bool = key(True, "copy to host memory and write during training; the last save waits for the disk")


@dataclass
class SdcConfig:
    """Silent data corruption: bits that memory or a device changes without an error."""

    every: int = key(0, "steps between checks for silent data corruption; 0: none", least=0)
    recompute: bool = key(False, "compute the step of each check twice, which finds transient faults and costs a step")


@dataclass
class InitConfig:
    weights: str | None = key(
        None, "initial weights: Hugging Face directory, export, run or checkpoint; short name: init.from"
    )


@dataclass
class VerifyConfig:
    steps: int = key(3, "number of steps to compare", least=1)
    optimizer: str = key("sgd", "sgd: plain SGD, checked; same: the run's own, only reported", choices=("sgd", "same"))
    precision: str = key("fp64", "number format of the comparison", choices=("fp64", "fp32"))
    tolerance: float | None = key(None, "largest relative difference; null: that of the precision", above=0)


@dataclass
class BenchConfig:
    warmup: int = key(3, "number of steps before timing starts", least=0)
    steps: int = key(20, "number of timed steps", least=1)


@dataclass
class SweepConfig:
    directory: str | None = key(None, "directory of the sweep; null: <runs>/sweep-<utc>-<random>")
    resume: str | None = key(None, "sweep directory to continue; finished points do not run again")
    fail_fast: bool = key(False, "skip the remaining points after the first failure")
    objective: str | None = key(None, "optuna: name of a number in the summary; null: that of the verb (val_loss)")


@dataclass
class Config:
    """The root: groups, degrees, short names of strategy keys, and settings of the run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    stack: StackConfig = field(default_factory=StackConfig)

    world: int | None = key(None, "number of ranks")
    gpus: int | None = key(None, "number of devices, one for each rank: short for world", most=COUNT)
    dp: int | None = key(None, "data-parallel degree")
    cp: int | None = key(None, "context-parallel degree: ranks that share a sequence")
    tp: int | None = key(None, "tensor-parallel degree")
    pp: int | None = key(None, "pipeline-parallel degree")
    ep: int | None = key(None, "expert-parallel degree, within dp x cp")

    layout: str | None = key(None, "1d | 2d | 2.5d | 3d: short for strategy.tensor.kind")
    grid: str | None = key(None, "short for strategy.tensor.grid")
    depth: int | None = key(None, "short for strategy.tensor.depth")
    schedule: str | None = key(None, "short for strategy.pipeline.kind")
    virtual_stages: int | None = key(None, "short for strategy.pipeline.virtual_stages")
    microbatches: int | None = key(None, "microbatches per step", most=SAMPLES)
    servers: int | None = key(None, "short for strategy.data.servers")
    consistency: str | None = key(None, "short for strategy.data.consistency", choices=CONSISTENCIES)
    staleness: int | None = key(None, "short for strategy.data.staleness")
    backup_workers: int | None = key(None, "short for strategy.data.backup_workers")

    steps: int = key(60, "optimizer steps", least=1)
    global_batch: int | None = key(
        None, f"samples per step; null: {DEFAULT_GLOBAL_BATCH}, or computed from local_batch", most=SAMPLES
    )
    local_batch: int | None = key(None, "samples per step and data-parallel rank", most=SAMPLES)
    micro_batch: int | None = key(None, "samples per microbatch", most=SAMPLES)
    seed: int = key(1234, "seed of weights, data order and dropout", least=0, most=2**63 - 1)
    dropout: float = key(0.0, "dropout probability", least=0, below=1)
    loss_chunks: int = key(1, "parts of a microbatch's tokens whose logits are computed one after the other", least=1)
    recompute: str = key("none", "activations that backward recomputes", choices=RECOMPUTE)
    compile: bool = key(False, "use torch.compile")
    device: str = key("auto", "device of the ranks; auto: cuda if there are GPUs", choices=("auto", "cpu", "cuda"))
    backend: str = key(
        "auto", "collectives on CPUs: shm (shared memory of a host) or gloo; auto: shm if possible", choices=BACKENDS
    )
    emulate: bool = key(False, "run each host in a network namespace with the rates of the cluster (needs root)")
    emulate_slowdown: float | None = key(
        None,
        "factor by which the emulated network is slower; null: the smallest that this machine can carry",
        least=1,
        most=1e6,
    )
    name: str | None = key(None, "name of the run directory")
    resume: str | None = key(
        None,
        "latest (newest run) | auto (this training, or fresh) | a run or checkpoint directory, or a run's name",
    )
    runs: str = key("runs", "folder of the run directories")
    path: str | None = key(None, "short for dataset.path")
    tokenizer: str | None = key(None, "short for dataset.tokenizer")
    detail: str | None = key(
        None, "plan: further sections: ranks | stages | schedule | traffic | data_axis | layouts | all"
    )
    tokens: float | None = key(None, "plan: number of tokens of the training, whose days are predicted", above=0)
    explain: bool = key(False, "plan: show the parts of a step, its limits, and where another plan is faster")
    shrink: bool = key(False, "verify, plan: use the smallest model with this plan's structure, on at most 16 ranks")
    objective: str | None = key(None, f"plan: what a search minimises; null: {OBJECTIVES[0]}", choices=OBJECTIVES)
    days: float | None = key(None, "plan: largest number of days for a training of `tokens`", above=0)
    mtbf_gpu_hours: float | None = key(
        None, "plan: mean hours of one GPU between failures that stop the training", above=0, plausible=(100, 1e8),
        unit="hours",
    )  # fmt: skip
    checkpoint_gb_s: float | None = key(
        None, "plan: rate of all ranks at which a checkpoint is written or read while training pauses", above=0,
        plausible=(0.001, 1e5), unit="GB/s",
    )  # fmt: skip
    restart_s: float | None = key(
        None, "plan: time from a failure to the next step, without reading the checkpoint; null: 600", least=0,
        plausible=(0.1, 1e5), unit="seconds",
    )  # fmt: skip
    repair_hours: float | None = key(
        None, "plan: time until a failed node is repaired; null: 24", least=0, plausible=(0.01, 1e4), unit="hours"
    )
    plot: str | None = key(None, "plan, explain: name of the picture NAME.svg and the data NAME.csv")
    profile: list[int] = key(list, "steps that torch.profiler traces, on every rank")
    timeout_s: float = key(300.0, "seconds without progress that count as a hang (exit 7)", above=0)
    restarts: int = key(0, "number of times that a failed run continues from its last checkpoint", least=0, most=1000)
    elastic: bool = key(False, "continue with fewer ranks if a rank cannot be replaced; dp shrinks first")
    min_world: int | None = key(None, "elastic: smallest number of ranks; null: 1", least=1)
    verb: str = "run"

    init: InitConfig = field(default_factory=InitConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sdc: SdcConfig = field(default_factory=SdcConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
