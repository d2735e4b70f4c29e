"""The configuration of the model and of the dataset: the sections `model` and `dataset`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallelrun.config.schema.field import COUNT, IMAGE, LAYERS, SAMPLES, SIZE, key


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
        "before",
        "whether weights are scaled to sum 1 before or after tokens are dropped",
        choices=("none", "before", "after"),
    )
    scaling: float = key(1.0, "factor on the weights", above=0)
    capacity_factor: float | None = key(None, "expert capacity over its even share of a group; null: no limit", above=0)
    eval_capacity_factor: float | None = key(None, "capacity_factor in evaluation; null: that of training", above=0)
    min_capacity: int = key(4, "smallest expert capacity in tokens", least=0)
    drop_policy: str = key("position", "rule that selects the tokens at capacity", choices=("position", "probability"))
    second_expert: str = key("all", "gshard: use it always or with probability 2 x gate", choices=("random", "all"))
    group_samples: int = key(1, "samples per routing group", least=1, most=SAMPLES)
    aux_coefficient: float = key(0.01, "weight of the load-balancing loss, which is 1 when balanced", least=0)
    z_coefficient: float = key(0.0, "weight of the router z-loss (ST-MoE)", least=0)
    jitter: float = key(0.0, "training: factor uniform(1 - jitter, 1 + jitter) on the router's input", least=0, below=1)
    bias_rate: float = key(0.0, "step of the biases that balance experts without a loss (DeepSeek-V3)", least=0)
    n_group: int = key(1, "equal groups of experts, of which a token uses the best (node-limited)", least=1, most=COUNT)
    topk_group: int = key(1, "number of groups that a token uses", least=1, most=COUNT)


@dataclass
class LoraConfig:
    """LoRA adapters (`model.lora.*`): small matrices that are trained while the model itself is frozen."""

    rank: int | None = key(
        None, "rank of the adapters; null: none, and all of the model is trained", least=1, most=SIZE
    )
    alpha: float = key(16.0, "adapters are multiplied by alpha / rank", above=0)
    targets: list[str] = key(list, "names of adapted layers, or their ends; patterns allowed; []: all but the output")
    base_dtype: str | None = key(None, "dtype of the frozen weights; null: that of the precision", choices=("bf16",))


@dataclass
class ModelConfig:
    """The model. `name` is its registry key (gpt, resnet, module, ...); a preset of a size fills the rest."""

    name: str = "gpt"
    preset: str = "gpt"
    description: str = ""
    layers: int = key(8, "transformer layers", least=1, most=LAYERS)
    hidden: int = key(64, "width of the residual stream", least=1, most=SIZE)
    heads: int = key(8, "attention heads", least=1, most=COUNT)
    kv_heads: int | None = key(None, "key and value heads; null: the same number as heads", least=1, most=COUNT)
    head_dim: int | None = key(None, "features of an attention head; null: hidden / heads", least=1, most=SIZE)
    qk_norm: str | None = key(
        None, "norms of queries and keys: of each head, with the same weights (Qwen3), or of all together (OLMo 2)",
        choices=("head", "all"),
    )  # fmt: skip
    qkv_bias: bool | None = key(None, "queries, keys and values have biases; null: the same as model.bias")
    window: int | None = key(
        None, "keys that a token attends to, its own and those before it (Mistral); null: all", least=1, most=SIZE
    )
    global_period: int | None = key(
        None, "every n-th layer attends without the window (Gemma, gpt-oss); null: none", least=1, most=LAYERS
    )
    sinks: bool = key(False, "a learned score for each head, which attention counts as that of a key of value 0")
    attention_softcap: float | None = key(None, "attention scores are c tanh(score / c), before the mask", above=0)
    query_pre_attn_scalar: float | None = key(
        None, "scores are divided by the root of this; null: of an attention head's features", above=0
    )
    kv_lora_rank: int | None = key(
        None, "latent attention (DeepSeek): width of the latent for keys and values", least=1, most=SIZE
    )
    q_lora_rank: int | None = key(
        None, "latent attention: width of the latent for queries; null: no latent", least=1, most=SIZE
    )
    qk_nope_head_dim: int | None = key(
        None, "latent attention: features of a query and key that carry no position", least=1, most=SIZE
    )
    qk_rope_head_dim: int | None = key(
        None, "latent attention: rotated features of a query and key", least=2, most=SIZE
    )
    v_head_dim: int | None = key(None, "latent attention: features of a value", least=1, most=SIZE)
    ffn: int | None = key(None, "hidden width of the MLP; null: 4 x hidden", least=1, most=SIZE)
    vocab: int | None = key(None, "number of token ids or classes; null: that of the dataset", least=1, most=SIZE)
    seq: int = key(64, "sequence length", least=1, most=SIZE)
    norm: str = key("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    norm_position: str = key(
        "pre",
        "norms of what attention and MLP read, or (OLMo 2) of what they give, or both (Gemma)",
        choices=("pre", "post", "both"),
    )
    norm_eps: float = key(1e-5, "epsilon of the normalisation", above=0)
    activation: str = key(
        "gelu",
        "activation of the MLP; gelu is the tanh approximation, as in geglu; swiglu_clamped is gpt-oss's",
        choices=("gelu", "gelu_exact", "relu", "swiglu", "geglu", "swiglu_clamped"),
    )
    position: str = key("learned", "position embedding", choices=("learned", "rope"))
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0)
    local_rope_theta: float | None = key(
        None,
        "base of the rotary frequencies in layers with a window, never scaled; null: as in others",
        above=0,
    )
    rope_scaling: str = key(
        "none",
        "scaling of the rotary frequencies for a longer context",
        choices=("none", "linear", "llama3", "yarn"),
    )
    rope_factor: float = key(1.0, "divisor of the rotary frequencies, if rope_scaling is set", above=0)
    rope_original_seq: int = key(8192, "llama3, yarn: sequence length of the original training", least=1)
    rope_low_factor: float = key(1.0, "llama3: scale wavelengths above rope_original_seq / rope_low_factor", above=0)
    rope_high_factor: float = key(4.0, "llama3: keep wavelengths below rope_original_seq / rope_high_factor", above=0)
    rope_beta_fast: float = key(32.0, "yarn: frequencies with more turns in rope_original_seq are unchanged", above=0)
    rope_beta_slow: float = key(1.0, "yarn: frequencies with fewer turns in rope_original_seq are scaled", above=0)
    rope_truncate: bool = key(True, "yarn: the scaled frequencies begin and end at whole pairs of features")
    rope_mscale: float = key(1.0, "yarn: multiply rotated features by 0.1 x rope_mscale x ln(rope_factor) + 1", least=0)
    rope_mscale_all_dim: float = key(
        0.0, "yarn: divide by the same with this scale; latent attention multiplies scores by its square", least=0
    )
    bias: bool = key(True, "linear layers and norms have biases")
    norm_bias: bool | None = key(None, "layernorm: the norms have biases; null: the same as model.bias")
    tied_embeddings: bool = key(True, "the output layer shares the embedding's weight")
    head_bias: bool = key(False, "the output layer has a bias over the vocabulary (BERT's)")
    mask_token: int | None = key(None, "bert: token id of [MASK]; null: the last id", least=0, most=SIZE)
    scaled_embedding: bool = key(False, "embeddings are multiplied by the root of model.hidden")
    logit_softcap: float | None = key(None, "logits are c tanh(logit / c)", above=0)
    mtp_depth: int = key(0, "modules that each predict one token further ahead (DeepSeek-V3)", least=0, most=LAYERS)
    mtp_weight: float = key(0.3, "weight of the mean of their losses", least=0)
    init_std: float = key(0.02, "standard deviation of initial weights", least=0)
    label_smoothing: float = key(0.0, "label smoothing of the loss", least=0, below=1)
    z_loss: float = key(0.0, "weight of the square of the log of the softmax's denominator (PaLM)", least=0)
    attention_dropout: float = key(0.0, "dropout of attention weights", least=0, below=1)
    experts: int = key(0, "experts per MoE layer; 0: no MoE layers", least=0, most=COUNT)
    expert_ffn: int | None = key(None, "hidden width of one expert; null: that of the MLP", least=1, most=SIZE)
    expert_period: int = key(2, "every n-th layer is an MoE layer", least=1, most=LAYERS)
    dense_layers: int = key(0, "number of first layers without experts", least=0, most=LAYERS)
    expert_bias: bool = key(False, "experts and their router have biases")
    shared_experts: int = key(0, "width of the shared expert of all tokens, in expert_ffn", least=0, most=COUNT)
    shared_gate: bool = key(False, "a learned gate between 0 and 1 of each token on the shared expert (Qwen2-MoE)")
    router: RouterConfig = field(default_factory=RouterConfig)
    own_router: bool = key(False, "the strategy's preset does not change the router; set if the model's preset has one")
    rows: int = key(4, "matmul: rows of X (rows x inner) W (inner x columns)", least=1, most=COUNT)
    inner: int = key(5, "matmul: inner dimension", least=1, most=COUNT)
    columns: int = key(8, "matmul: columns of W", least=1, most=COUNT)
    image: int | None = key(None, "image height and width; null: that of the dataset or model", least=1, most=IMAGE)
    channels: int | None = key(None, "image channels; null: those of the dataset", least=1, most=IMAGE)
    width: int = key(64, "channels of the first stage", least=1, most=IMAGE)
    stages: list[int] = key(list, "convolutions or blocks per stage; []: those of the model", most=LAYERS)
    bottleneck: bool = key(False, "resnet: blocks of 1x1, 3x3, 1x1 convolutions")
    stem: str = key("auto", "resnet: 3x3, or 7x7 with pooling; auto: by image size", choices=("auto", "small", "large"))
    norm_samples: str | None = key(None, "samples that share BatchNorm statistics: n | local; null: the global batch")
    norm_momentum: float = key(0.1, "momentum of BatchNorm's running statistics", above=0, most=1)
    dataset: str | None = key(None, "dataset of the preset, used if the user selects none")
    suited_lr: float | None = key(None, "AdamW learning rate of the preset, used if the user sets none", least=0)
    source: str | None = key(None, "model=module: function that builds the module, such as ./net.py:build")
    loss: str | None = key(None, "model=module: own loss, such as ./net.py:loss: (module, batch) -> (sum, count)")
    roles: dict[str, str] = key(dict, "model=module: tensor-parallel roles by module name (fnmatch patterns)")
    blocks: list[str] = key(list, "pipeline blocks of your own module by module name (fnmatch patterns)")
    before: list[str] = key(list, "modules that run before the blocks, on the first stage")
    arguments: dict[str, Any] = key(dict, "model=module: arguments of the function")
    path: str | None = key(None, "model=hf: directory, config.json or class of Hugging Face transformers")
    hf: dict[str, Any] = key(dict, "model=hf: changes of the configuration of transformers, by its own names")
    task: str | None = key(
        None,
        "model=hf: what the model does; null: as its class",
        choices=("causal_lm", "masked_lm", "seq2seq", "sequence_classification", "image_classification"),
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    from_hf: str | None = key(None, "config.json of Hugging Face transformers which fills all keys that are not set")


@dataclass
class DatasetConfig:
    """The training data. `name` is the registry key: pystdlib, text, megatron, synthetic, digits, cifar10, ..."""

    name: str = "pystdlib"
    description: str = ""
    path: str | None = key(None, "file or folder of the data")
    source: str | None = key(None, "custom: function that returns the dataset, such as ./data.py:build")
    tokenizer: str | None = key(None, "text: tokenizer.json, or a directory with it; null: bytes are tokens")
    column: str = key("text", "text: field or column with the text of .jsonl, .parquet and .arrow")
    chat_template: str | None = key(None, "chat: file with a jinja template; null: that of the tokenizer")
    split: str | None = key(None, "text: split of a folder with splits; null: train, if it exists")
    append_eod: bool = key(False, "text: every document ends with the end-of-document token (256 for bytes)")
    cache: str | None = key(None, "text: folder of cached tokens; null: ~/.cache/parallelrun/tokens")
    mixture: list[Any] = key(list, "mixture: its datasets, each {name: DATASET, weight: 1, path: ..., ...}")
    val_fraction: float = key(0.05, "share of the data held out for validation", above=0, below=1)
    pack: bool = key(False, "tokens: a sample packs complete documents, which attend only to themselves, and padding")
    max_bytes: int | None = key(None, "largest number of bytes of text to read", least=1)
    samples: int = key(4096, "synthetic: number of samples; custom: items that are read of an iterable", least=1)
    vocab: int | None = key(None, "synthetic, megatron: number of ids; null: 256, or the files' largest + 1", least=1)
    flip: bool = key(False, "images: mirror half of the training samples at random")
    crop: int = key(0, "images: shift training samples by up to this many pixels", least=0)
    num_workers: int | None = key(None, "imagefolder: decoders per rank; null: spare cores, up to 4", least=0, most=256)
