"""The configuration of a run: what Hydra composes, `config.yaml` stores and `resolve` reads. Torch-free.

Each field states its default, its one-line help and its bounds; `parallelrun.config.keys` reads them for every check,
for `parallelrun ls keys` and for completion. A configuration holds only what was asked for: nothing in it is computed,
and nothing is changed after composition. `None` means "not given"; `resolve` then chooses a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parallelrun.precision import TABLE

if TYPE_CHECKING:
    from typing_extensions import Self


def key(
    default: Any,
    help: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    of_degrees: bool = False,
) -> Any:
    """A field of the configuration; a callable default is a factory.

    Bounds: at least `least`, greater than `above`, at most `most`, less than `below`, one of `choices`. of_degrees: a
    value suits certain degrees only, so a run that continues another under other degrees does not take it over.
    """
    bounds = dict(least=least, above=above, most=most, below=below, choices=choices)
    metadata = dict(help=help, **bounds, of_degrees=of_degrees)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


DEFAULT_GLOBAL_BATCH = 48
CONSISTENCIES = ("sync", "async", "ssp")
# Counts that the planner enumerates one by one (samples of a step, layers) are bounded by the time that this takes;
# sizes are bounded far above what any machine can hold.
SAMPLES, LAYERS, COUNT, SIZE, IMAGE = 2**20, 10_000, 2**20, 2**30, 2**16


@dataclass
class RouterConfig:
    """How MoE layers choose experts (`model.router.*`). It is part of the model: every plan must compute the same.

    An expert preset fills these keys in (`strategy.router`); keys that the user sets win. A routing group is
    `group_samples` consecutive samples of the global batch, whatever the plan.
    """

    kind: str = key("top_k", "routing algorithm", choices=("top_k", "gshard", "switch", "expert_choice"))
    top_k: int = key(2, "experts per token (gshard 2, switch 1; expert_choice: on average)", least=1)
    score: str = key("softmax", "gate function (DeepSeek-V3: sigmoid)", choices=("softmax", "sigmoid"))
    renormalise: str = key(
        "before", "when weights are scaled to sum 1 (tokens drop)", choices=("none", "before", "after")
    )
    scaling: float = key(1.0, "factor on the weights", above=0)
    capacity_factor: float | None = key(None, "expert capacity over its even share of a group; null: no limit", above=0)
    eval_capacity_factor: float | None = key(None, "capacity_factor in evaluation; null: the same", above=0)
    min_capacity: int = key(4, "smallest expert capacity in tokens", least=0)
    drop_policy: str = key("position", "which tokens stay at capacity", choices=("position", "probability"))
    second_expert: str = key("all", "gshard: always use it, or with probability 2 g2", choices=("random", "all"))
    group_samples: int = key(1, "samples per routing group", least=1, most=SAMPLES)
    aux_coefficient: float = key(0.01, "weight of the load-balancing loss (1 when balanced)", least=0)
    z_coefficient: float = key(0.0, "weight of the router z-loss (ST-MoE)", least=0)
    jitter: float = key(0.0, "the router's input times uniform(1 - jitter, 1 + jitter) in training", least=0, below=1)
    bias_rate: float = key(0.0, "step of the selection biases that balance without a loss (DeepSeek-V3)", least=0)


@dataclass
class ModelConfig:
    """The model. `name` is its registry key (gpt, resnet, module, ...); a preset of a size fills the rest."""

    name: str = "gpt"
    preset: str = "gpt"
    description: str = ""
    layers: int = key(8, "transformer layers", least=1, most=LAYERS)
    hidden: int = key(64, "width of the residual stream", least=1, most=SIZE)
    heads: int = key(8, "attention heads", least=1, most=COUNT)
    kv_heads: int | None = key(None, "key and value heads; null: as heads", least=1, most=COUNT)
    ffn: int | None = key(None, "hidden width of the MLP; null: 4 x hidden", least=1, most=SIZE)
    vocab: int | None = key(None, "token ids or classes; null: the dataset's", least=1, most=SIZE)
    seq: int = key(64, "sequence length", least=1, most=SIZE)
    norm: str = key("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "epsilon of the normalisation", above=0)
    activation: str = key("gelu", "activation of the MLP", choices=("gelu", "relu", "swiglu"))
    position: str = key("learned", "position embedding", choices=("learned", "rope"))
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0)
    bias: bool = key(True, "linear layers and norms have biases")
    tied_embeddings: bool = key(True, "the output layer shares the embedding's weight")
    init_std: float = key(0.02, "standard deviation of initial weights", least=0)
    label_smoothing: float = key(0.0, "label smoothing of the loss", least=0, below=1)
    attention_dropout: float = key(0.0, "dropout of attention weights", least=0, below=1)
    experts: int = key(0, "experts per MoE layer; 0: no MoE layers", least=0, most=COUNT)
    expert_ffn: int | None = key(None, "hidden width of one expert; null: as the MLP", least=1, most=SIZE)
    expert_period: int = key(2, "every n-th layer is an MoE layer", least=1, most=LAYERS)
    dense_layers: int = key(0, "first layers without experts", least=0, most=LAYERS)
    shared_experts: int = key(0, "shared expert for every token, this many expert_ffn wide", least=0, most=COUNT)
    router: RouterConfig = field(default_factory=RouterConfig)
    own_router: bool = key(False, "`strategy` leaves the router alone; set if the model's preset has a router")
    rows: int = key(4, "matmul: rows of X (rows x inner) W (inner x columns)", least=1, most=COUNT)
    inner: int = key(5, "matmul: inner dimension", least=1, most=COUNT)
    columns: int = key(8, "matmul: columns of W", least=1, most=COUNT)
    image: int | None = key(None, "image height and width; null: from the dataset or model", least=1, most=IMAGE)
    channels: int | None = key(None, "image channels; null: the dataset's", least=1, most=IMAGE)
    width: int = key(64, "channels of the first stage", least=1, most=IMAGE)
    stages: list[int] = key(list, "convolutions or blocks per stage; []: the model's own", most=LAYERS)
    bottleneck: bool = key(False, "resnet: blocks of 1x1, 3x3, 1x1 convolutions")
    stem: str = key("auto", "resnet: 3x3 or 7x7 with pooling; auto: by image size", choices=("auto", "small", "large"))
    norm_samples: str | None = key(None, "samples that share BatchNorm statistics: n | local; null: the global batch")
    norm_momentum: float = key(0.1, "momentum of BatchNorm's running statistics", above=0, most=1)
    dataset: str | None = key(None, "dataset of the preset, used if none is chosen")
    suited_lr: float | None = key(None, "AdamW learning rate of the preset, used if none is chosen", least=0)
    source: str | None = key(None, "model=module: function that builds it, as ./net.py:build")
    roles: dict[str, str] = key(dict, "model=module: tensor-parallel roles by module name (fnmatch patterns)")
    blocks: list[str] = key(list, "model=module: pipeline blocks by module name (fnmatch patterns)")
    arguments: dict[str, Any] = key(dict, "model=module: arguments of the function")


@dataclass
class DatasetConfig:
    """The training data. `name` is the registry key: pystdlib, text, megatron, synthetic, digits, cifar10, ..."""

    name: str = "pystdlib"
    description: str = ""
    path: str | None = key(None, "file or folder of the data")
    val_fraction: float = key(0.05, "share of the data held out for validation", above=0, below=1)
    max_bytes: int | None = key(None, "bytes of text that are read", least=1)
    samples: int = key(4096, "synthetic: number of samples", least=1)
    vocab: int | None = key(None, "synthetic, megatron: token ids; null: 256, or the files' largest + 1", least=1)
    flip: bool = key(False, "images: mirror half of the training samples")
    crop: int = key(0, "images: shift training samples by up to this many pixels", least=0)
    num_workers: int | None = key(None, "imagefolder: decoders per rank; null: spare cores, up to 4", least=0, most=256)


@dataclass
class DataStrategyConfig:
    """Data parallelism. Each strategy adds its own keys in a subclass, its `config_class`."""

    kind: str = key("ddp", "data-parallel strategy")

    @classmethod
    def of(cls, config: Config) -> Self:
        """The section of a configuration whose data strategy is known to have this class."""
        found = config.strategy.data
        assert isinstance(found, cls), f"{type(found).__name__} is no {cls.__name__}"
        return found


@dataclass
class TensorStrategyConfig:
    """Tensor parallelism. Each strategy adds its own keys in a subclass, its `config_class`."""

    kind: str = key("megatron", "tensor-parallel strategy")
    overlap: bool = key(True, "overlap the input-gradient reduce with the weight-gradient product")

    @classmethod
    def of(cls, config: Config) -> Self:
        """The section of a configuration whose tensor strategy is known to have this class."""
        found = config.strategy.tensor
        assert isinstance(found, cls), f"{type(found).__name__} is no {cls.__name__}"
        return found


@dataclass
class PipelineConfig:
    """Pipeline schedule. The planner cuts the model into stages by these keys, whatever the schedule."""

    kind: str = key("1f1b", "pipeline schedule")
    virtual_stages: int | None = key(
        None, "stages per rank; null: 2 for interleaved, zero_bubble and zbv, else 1", least=1
    )
    partition: str = key("cost", "cut layers by cost (exact min-max) or uniformly", choices=("cost", "uniform"))
    split: list[str] = key(list, "cut by hand: the first block of every stage but the first")


@dataclass
class ExpertConfig:
    """Expert parallelism. Every dispatcher reads these keys."""

    kind: str | None = key(None, "capacity | dropless; null: capacity if the router has one")
    fills: bool = key(False, "an unset ep takes the largest share of dp that divides the experts")
    chunks: int = key(1, "parts of a microbatch whose all-to-all overlaps with compute", least=1)
    group_size: int | None = key(None, "hierarchical all-to-all: ep ranks per inner group; null: flat", least=1)
    overlap: bool = key(True, "compute the shared expert during the all-to-all")


@dataclass
class StrategyConfig:
    """A preset of strategies. `own_axis` takes the ranks that no degree claims; `demo` applies if nothing is given."""

    name: str = "ptdp"
    description: str = ""
    own_axis: str = "dp"
    fill_order: list[str] = key(list, "axes that share the unclaimed ranks, the first one first; []: own_axis")
    demo: dict[str, int] = key(dict, most=COUNT)
    data: DataStrategyConfig = field(default_factory=DataStrategyConfig)
    tensor: TensorStrategyConfig = field(default_factory=TensorStrategyConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    router: dict[str, Any] = key(dict, "values of the preset for model.router")


@dataclass
class OptimizerConfig:
    """adamw | sgd | adagrad, with learning-rate schedule and gradient clipping."""

    name: str = "adamw"
    description: str = ""
    lr: float = key(3e-3, "learning rate", least=0)
    schedule: str = key("cosine", "decay of the learning rate", choices=("cosine", "linear", "constant"))
    warmup: int = key(5, "warm-up steps", least=0)
    min_lr_ratio: float = key(0.1, "final learning rate over lr", least=0, most=1)
    weight_decay: float = key(0.1, "weight decay", least=0)
    betas: list[float] = key(lambda: [0.9, 0.95], "adamw: decay of the moments")
    eps: float = key(1e-8, "adamw, adagrad: epsilon", above=0)
    momentum: float = key(0.0, "sgd: momentum", least=0, below=1)
    clip: float = key(1.0, "largest global gradient norm; 0: no clipping", least=0)
    lr_scale: Any = key(None, "factor on lr: a number | linear (times dp); null: 1")


@dataclass
class PrecisionConfig:
    """fp32 | bf16 | fp16 | fp64, as defined in `parallelrun.precision`."""

    name: str = key("fp32", choices=tuple(TABLE))
    description: str = ""
    loss_scale: float = key(65536.0, "fp16: initial loss scale", above=0)
    scale_window: int = key(1000, "fp16: steps without overflow before the scale doubles", least=1)


@dataclass
class ClusterConfig:
    """The machine that `plan` computes costs for: sizes per device, rates per device and link."""

    name: str = "local"
    description: str = ""
    nodes: int | None = key(None, "number of hosts", least=1, most=COUNT)
    gpus_per_node: int | None = key(None, "GPUs of a host", least=1, most=COUNT)
    memory_gb: float | None = key(None, "memory of a GPU in GB", above=0)
    peak_tflops: Any = key(None, "dense peak of a GPU: a number, or one per precision: {fp32: 19.5, bf16: 312.0, ...}")
    intra_gb_s: float | None = key(None, "bandwidth within a host, GB/s per GPU", above=0)
    inter_gb_s: float | None = key(None, "bandwidth between hosts, GB/s per GPU", above=0)
    latency_us: float | None = key(None, "latency of a message in microseconds", least=0)
    ps: list[str] | None = key(None, "TensorFlow cluster: host:port of every parameter server")
    worker: list[str] | None = key(None, "TensorFlow cluster: host:port of every worker, worker 0 first")


@dataclass
class EvalConfig:
    every: int = key(10, "steps between evaluations; 0: only after the last step", least=0)
    batches: int = key(2, "global batches per evaluation", least=1)


@dataclass
class CheckpointConfig:
    every: int = key(0, "steps between checkpoints; 0: none (a preempted run is still saved)", least=0)
    keep: int = key(2, "checkpoints that are kept", least=1)
    last: bool | None = key(None, "save after the last step; null: yes, except in a sweep")


@dataclass
class VerifyConfig:
    steps: int = key(3, "steps to compare", least=1)
    optimizer: str = key("sgd", "sgd: plain SGD, checked; same: the run's own, only reported", choices=("sgd", "same"))
    precision: str = key("fp64", "number format of the comparison", choices=("fp64", "fp32"))
    tolerance: float | None = key(None, "largest relative difference; null: that of the precision", above=0)


@dataclass
class BenchConfig:
    warmup: int = key(3, "steps before timing starts", least=0)
    steps: int = key(20, "timed steps", least=1)


@dataclass
class SweepConfig:
    directory: str | None = key(None, "directory of the sweep; null: <runs>/sweep-<utc>-<random>")
    resume: str | None = key(None, "sweep directory to continue: its finished points are not run again")
    fail_fast: bool = key(False, "skip the remaining points after the first failure")
    objective: str | None = key(None, "optuna: any number of the summary; null: the verb's own, such as val_loss")


@dataclass
class Config:
    """The root: groups, degrees, short names of strategy keys, and settings of the run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    world: int | None = key(None, "number of ranks")
    dp: int | None = key(None, "data-parallel degree")
    tp: int | None = key(None, "tensor-parallel degree")
    pp: int | None = key(None, "pipeline-parallel degree")
    ep: int | None = key(None, "expert-parallel degree (within dp)")

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
        None, f"samples per step; null: {DEFAULT_GLOBAL_BATCH} or from local_batch", most=SAMPLES
    )
    local_batch: int | None = key(None, "samples per step and data-parallel rank", most=SAMPLES)
    micro_batch: int | None = key(None, "samples per microbatch", most=SAMPLES)
    seed: int = key(1234, "seed of weights, data order and dropout", least=0, most=2**63 - 1)
    dropout: float = key(0.0, "dropout probability", least=0, below=1)
    recompute: str = key("none", "activations recomputed in backward", choices=("none", "selective", "full"))
    compile: bool = key(False, "use torch.compile")
    device: str = key("auto", "auto: cuda if there are GPUs", choices=("auto", "cpu", "cuda"))
    name: str | None = key(None, "name of the run directory")
    resume: str | None = key(None, "latest (newest run) | auto (this training, or fresh) | run or checkpoint directory")
    runs: str = key("runs", "folder of the run directories")
    path: str | None = key(None, "short for dataset.path")
    detail: str | None = key(
        None, "plan: more sections: ranks | stages | schedule | traffic | data_axis | layouts | all"
    )
    tokens: float | None = key(None, "plan: predict the days that this many tokens take", above=0)
    plot: str | None = key(None, "plan, explain: draw as NAME.svg (and NAME.csv)")
    profile: list[int] = key(list, "steps that torch.profiler traces, on every rank")
    tracker: str = key("none", "experiment tracker", choices=("none", "tensorboard"))
    timeout_s: float = key(300.0, "seconds without progress that count as a hang (exit 7)", above=0)
    verb: str = "run"

    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
