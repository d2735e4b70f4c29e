"""The schema of a run's configuration: what Hydra composes, what `config.yaml` holds, what `resolve` reads.

Torch-free. Values are pure input: nothing here is derived, and nothing is changed after composition. `None` means
"not given: let `resolve` fill it". Enumerated texts (layout, schedule, kinds) are checked by `resolve`, which can name
the nearest legal value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RouterConfig:
    """How the layers with experts choose them (`model.router.*`): part of the model, which every plan must keep.

    An expert preset of `strategy` fills these in (`strategy.router`); the user's own keys beat it. A routing group is
    `group_samples` consecutive samples of the global batch, whatever the plan.
    """

    kind: str = "top_k"  # top_k | gshard | switch | expert_choice
    top_k: int = 2  # experts of a token (gshard 2, switch 1); expert_choice: experts of a token on average
    score: str = "softmax"  # softmax | sigmoid (DeepSeek-V3)
    renormalise: str = "before"  # the chosen weights are made to sum to 1: none | before | after some are dropped
    scaling: float = 1.0  # the weights are multiplied by it
    capacity_factor: float | None = None  # tokens an expert takes of a group, over its even share; None: all that come
    eval_capacity_factor: float | None = None  # the same in evaluation; None: as in training
    min_capacity: int = 4
    drop_policy: str = "position"  # who stays where more come: position (in token order) | probability
    second_expert: str = "all"  # gshard: random (kept with probability 2 g2) | all
    group_samples: int = 1
    aux_coefficient: float = 0.01  # of the load-balancing loss, whose balanced value is 1
    z_coefficient: float = 0.0  # of the mean squared log-sum-exp of the logits (ST-MoE)
    jitter: float = 0.0  # the router's input is multiplied by uniform(1 - jitter, 1 + jitter) in training
    bias_rate: float = 0.0  # DeepSeek's balancing without a loss: how far a step moves an expert's selection bias


@dataclass
class ModelConfig:
    """What is trained. `name` is the registry key (gpt, resnet, module, ...); a size preset fills the rest."""

    name: str = "gpt"
    preset: str = "gpt"
    description: str = ""
    layers: int = 8
    hidden: int = 64
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads
    ffn: int | None = None  # None: 4 x hidden
    vocab: int | None = None  # None: the dataset's
    seq: int = 64
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_eps: float = 1e-5
    activation: str = "gelu"  # gelu | relu | swiglu
    position: str = "learned"  # learned | rope
    rope_theta: float = 10000.0
    bias: bool = True
    tied_embeddings: bool = True
    init_std: float = 0.02
    label_smoothing: float = 0.0
    attention_dropout: float = 0.0
    # experts (gpt): a layer with experts has them in the place of its MLP
    experts: int = 0  # of a layer; 0: the model has none
    expert_ffn: int | None = None  # width of one expert's inside; None: as the MLP's
    expert_period: int = 2  # one of so many layers has experts: the last
    dense_layers: int = 0  # the first layers, which have none
    shared_experts: int = 0  # an MLP of so many expert_ffn beside the experts, for every token
    router: RouterConfig = field(default_factory=RouterConfig)
    own_router: bool = False  # `strategy` changes nothing of the router; filled where the model's preset has a router
    # matmul: the product X (rows x inner) by W (inner x columns) of the lesson
    rows: int = 4
    inner: int = 5
    columns: int = 8
    # images: alexnet, vgg, resnet
    image: int | None = None  # height and width; None: the dataset's own, or the least that the model can read
    channels: int | None = None  # None: the dataset's
    width: int = 64  # channels of the first stage
    stages: list[int] = field(default_factory=list)  # convolutions or blocks per stage; []: the model's own
    bottleneck: bool = False  # resnet: blocks of 1x1, 3x3, 1x1
    stem: str = "auto"  # resnet: small (3x3, keeps the size) | large (7x7 and pooling) | auto, by the image
    norm_samples: str | None = None  # samples that share BatchNorm statistics: a number | local; None: the global batch
    norm_momentum: float = 0.1  # how far a step moves the running statistics
    dataset: str | None = None  # what it is trained on when no dataset is chosen; None: the configuration's
    suited_lr: float | None = None  # of adamw, when neither optimizer nor optimizer.lr is chosen; None: the optimizer's
    # a user's own module: source=./net.py:build, roles and blocks by module name (fnmatch patterns)
    source: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class DatasetConfig:
    """What it is trained on. `name` is the registry key: pystdlib, text, megatron, synthetic, digits, cifar10, ..."""

    name: str = "pystdlib"
    description: str = ""
    path: str | None = None
    val_fraction: float = 0.05
    max_bytes: int | None = None
    samples: int = 4096  # synthetic only
    vocab: int | None = None  # synthetic and megatron: the number of token ids; None: 256, or the files' largest + 1
    flip: bool = False  # images: mirror half of the training samples
    crop: int = 0  # images: shift training samples by up to so many pixels, filling with the mean
    num_workers: int | None = None  # imagefolder: processes per rank that decode ahead; None: spare cores, at most 4


@dataclass
class DataStrategyConfig:
    """The way of the data axis: ddp | ring | horovod | ps | local_sgd | diloco | zero1 | zero2 | fsdp.

    Each way's `reads` (strategies/data/<kind>/plan.py) says which keys it takes.
    """

    kind: str = "ddp"
    shard: int | None = None  # fsdp: ranks that share one copy (HSDP); None: the whole dp axis
    reshard_after_forward: bool | None = None  # fsdp; None: true at pp=1, false otherwise
    reduce_each_microbatch: bool | None = None  # fsdp; false: once a step; None: true, but under zero bubble schedules
    bucket_mb: float = 25.0
    servers: int | None = None  # ps; None: 1
    consistency: str | None = None  # ps: sync | async | ssp; None: sync, or ssp where staleness is given
    staleness: int | None = None  # ps, ssp: how many clocks the fastest worker may be ahead
    backup_workers: int | None = None  # ps, sync: how many of the slowest workers' gradients a step does without
    # local_sgd, diloco
    sync_every: int | None = None  # steps that replicas train by themselves; None: 8, or 10 for diloco
    outer_lr: float = 0.7  # diloco: of the SGD that follows the replicas' mean movement
    outer_momentum: float = 0.9
    outer_nesterov: bool = True
    delays: list[float] = field(default_factory=list)  # ps: seconds that worker 0, 1, ... waits in each of its steps
    shard_min_kb: float = 256.0  # ps: a tensor is cut over the servers into parts of at least so much
    # ring, horovod: how gradients are summed
    algorithm: str | None = None  # native | ring | halving_doubling | hierarchical | tree; None: ring or native
    group_size: int | None = None  # hierarchical: ranks of dp in an inner group; None: those that share a host
    # ddp, ring, horovod: how gradients go over the wire
    compression: str = "none"  # none | fp16 | powersgd
    powersgd_rank: int | None = None  # columns of its factors; None: 4
    # horovod
    reduction: str = "average"  # average | adasum
    timeline: bool = False  # write timeline.json, a Chrome trace of what the reducer did
    stall_warn_s: float = 60.0  # warn when a tensor waits for other ranks for so long; 0: never
    worker_batches: list[int] = field(default_factory=list)  # batches that each worker has before it joins; []: enough
    join_divisor: str = "initial"  # a sum with joined workers is divided by all workers | by the active ones
    process_sets: list[list[int]] = field(default_factory=list)  # workers that average among themselves; []: all


@dataclass
class TensorStrategyConfig:
    """The way of the tensor axes: megatron (layout 1d) | 2d | 2.5d | 3d."""

    kind: str = "megatron"
    sequence_parallel: bool = False  # 1d only
    overlap: bool = True  # input-gradient reduce under the weight-gradient product
    grid: str | None = None  # 2d, 2.5d: rows x columns, such as 2x3; None: square
    depth: int | None = None  # 2.5d: number of grids; None: the largest legal one
    form: str = "auto"  # 2d, 2.5d: auto (by volume) | stationary_x | stationary_y | stationary_w | summa
    save_gathered: bool = True  # 2d, 2.5d, 3d: keep gathered operands for backward, or gather them again


@dataclass
class PipelineConfig:
    """The way of the pipeline axis: naive | gpipe | 1f1b | interleaved | zero_bubble | zbv."""

    kind: str = "1f1b"
    virtual_stages: int | None = None  # stages per rank; None: 2 for interleaved, zero_bubble and zbv, else 1
    partition: str = "cost"  # cost (exact min-max) | uniform
    split: list[str] = field(default_factory=list)  # manual: the first block of every stage but the first


@dataclass
class ExpertConfig:
    """The way of the expert axis: capacity | dropless."""

    kind: str | None = None  # None: capacity where the router has one, else dropless
    fills: bool = False  # unset ep takes as much of dp as divides the experts
    chunks: int = 1  # a microbatch's groups in so many parts: one is on its way while another computes
    group_size: int | None = None  # hierarchical: ranks of ep in an inner group; None: one all-to-all over all of ep
    overlap: bool = True  # the shared expert computes while rows are on their way


@dataclass
class StrategyConfig:
    """A named preset of ways. `own_axis` takes the ranks that are left; `demo` is used when nothing else is given.

    fill_order: for a preset of several axes, those that share the ranks that are left, the first one first
    (`plan/fill_order.py`); empty: own_axis alone.
    """

    name: str = "ptdp"
    description: str = ""
    own_axis: str = "dp"
    fill_order: list[str] = field(default_factory=list)
    demo: dict[str, int] = field(default_factory=dict)
    data: DataStrategyConfig = field(default_factory=DataStrategyConfig)
    tensor: TensorStrategyConfig = field(default_factory=TensorStrategyConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    router: dict[str, Any] = field(default_factory=dict)  # what the preset fills into model.router


@dataclass
class OptimizerConfig:
    """adamw | sgd | adagrad, its learning-rate schedule and clipping."""

    name: str = "adamw"
    description: str = ""
    lr: float = 3e-3
    schedule: str = "cosine"  # cosine | linear | constant
    warmup: int = 5  # steps
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = 0.0
    clip: float = 1.0  # 0: no clipping
    lr_scale: Any = None  # multiplies lr: a number | linear (times dp); None: 1


@dataclass
class PrecisionConfig:
    """fp32 | bf16 | fp16 | fp64: the one table of `parallelrun.precision`."""

    name: str = "fp32"
    description: str = ""
    loss_scale: float = 65536.0  # fp16: the first scale
    scale_window: int = 1000


@dataclass
class ClusterConfig:
    """The machine that plan costs are computed for: sizes per device, rates per device and link."""

    name: str = "local"
    description: str = ""
    nodes: int | None = None
    gpus_per_node: int | None = None
    memory_gb: float | None = None
    peak_tflops: Any = None  # of a device, dense: a number, or one per precision: {fp32: 19.5, bf16: 312.0, ...}
    intra_gb_s: float | None = None
    inter_gb_s: float | None = None
    latency_us: float | None = None
    ps: list[str] | None = None  # TensorFlow's cluster spec: host:port of every parameter server
    worker: list[str] | None = None  # and of every worker, the first of them worker 0


@dataclass
class EvalConfig:
    every: int = 10  # steps; 0: only after the last step
    batches: int = 2  # global batches


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: never while running (a preempted run is saved all the same)
    keep: int = 2
    last: bool | None = None  # also after the last step; None: yes, except of a sweep's points


@dataclass
class VerifyConfig:
    steps: int = 3
    optimizer: str = "sgd"  # sgd: without momentum, checked; same: the run's own, reported only
    precision: str = "fp64"  # fp64 | fp32
    tolerance: float | None = None


@dataclass
class BenchConfig:
    warmup: int = 3
    steps: int = 20


@dataclass
class SweepConfig:
    directory: str | None = None  # where the sweep's files go; None: <runs>/sweep-<utc>-<random>
    resume: str | None = None  # a sweep directory whose finished points are not run again
    fail_fast: bool = False
    objective: str | None = None  # what hydra/sweeper=optuna optimizes, any number of the summary; None: val_loss


@dataclass
class Config:
    """The root. Groups, degrees, shorthands of ways, and the run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    world: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None

    layout: str | None = None
    grid: str | None = None
    depth: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    microbatches: int | None = None
    servers: int | None = None
    consistency: str | None = None
    staleness: int | None = None
    backup_workers: int | None = None

    steps: int = 60
    global_batch: int | None = None  # None: 48, unless local_batch is given
    local_batch: int | None = None
    micro_batch: int | None = None
    seed: int = 1234
    dropout: float = 0.0
    recompute: str = "none"  # none | selective | full
    compile: bool = False
    device: str = "auto"  # auto | cpu | cuda
    name: str | None = None
    resume: str | None = None  # latest | auto | a run directory | a checkpoint directory
    runs: str = "runs"  # where run directories are made
    path: str | None = None  # shorthand of dataset.path
    ranks: str = "few"  # plan: few | all rows of the rank table
    tokens: float | None = None  # plan: how many days so many tokens take
    plot: str | None = None  # plan: NAME: the data axis's costs as NAME.svg and NAME.csv
    profile: list[int] = field(default_factory=list)  # steps of which torch's profiler writes a trace, on every rank
    tracker: str = "none"  # none | tensorboard
    timeout_s: float = 300.0  # a step (or the start) that takes longer is a hang: exit 7
    verb: str = "run"

    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
