"""gpt: its spec holds the published sizes, its modules hold what the spec lists and compute what the papers say."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import initialise
from parallelrun.models.gpt import network, spec
from parallelrun.models.network import Network
from parallelrun.planner.model.model_spec import ModelSpec
from tests.matrix import FULL
from tests.plans import tiny_plan

PRESETS = sorted((Path(__file__).parents[4] / "conf" / "model").glob("*.yaml"))
GPT_PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in PRESETS}
GPT_PRESETS = {name: values for name, values in GPT_PRESETS.items() if values.get("name", "gpt") == "gpt"}
SMALL = {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "ffn": 24, "init_std": 0.3}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "kv_heads": 2,
    "bias": False,
    "tied_embeddings": False,
}
LATENT = LLAMA | {
    "kv_heads": None, "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4,
    "v_head_dim": 3,
}  # fmt: skip
EXPERTS = {"experts": 5, "expert_ffn": 12}
AUX_FREE = {"score": "sigmoid", "scaling": 2.5, "bias_rate": 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "grouped heads with biases": {"kv_heads": 1},
    "rotary positions, untied": {"position": "rope", "tied_embeddings": False},
    "rmsnorm and swiglu with biases": {"norm": "rmsnorm", "activation": "swiglu"},
    "layernorm without biases": {"bias": False},
    "norms alone with biases": {"bias": False, "norm_bias": True},
    "norms alone without biases": {"norm_bias": False},
    "latent attention with biases": LATENT | {"bias": True},
    "latent attention, queries of x": LATENT | {"q_lora_rank": None},
    # mscale is mscale_all_dim, so that yarn changes scores alone; after so long a training it keeps all frequencies
    "latent attention, scores grow": LATENT
    | {
        "rope_scaling": "yarn",
        "rope_factor": 8.0,
        "rope_mscale_all_dim": 1.0,
        "rope_original_seq": 10**6,
    },
    "wide heads": LLAMA | {"head_dim": 10},
    "narrow heads, one for keys, with biases": {"head_dim": 3, "kv_heads": 1, "hidden": 15},
    "norms of heads": LLAMA | {"qk_norm": "head", "head_dim": 6},
    "norms of heads with biases": {"qk_norm": "head"},
    "norms of all heads and of results": LLAMA | {"qk_norm": "all", "norm_position": "post"},
    "biases of queries, keys and values": LLAMA | {"qkv_bias": True},
    "biases of all but queries, keys and values": {"qkv_bias": False},
    "window": LLAMA | {"window": 3},
    "window of one token": {"window": 1},
    "window of latent attention": LATENT | {"window": 4},
    "experts": EXPERTS,
    "experts in groups": {
        **LLAMA,
        **EXPERTS,
        "experts": 8,
        "router": AUX_FREE
        | {
            "n_group": 4,
            "topk_group": 2,
            "top_k": 3,
        },
    },
    "gated experts, a shared one, balanced by bias": {**LLAMA, **EXPERTS, "shared_experts": 2, "router": AUX_FREE},
    "shared expert with biases": {**EXPERTS, "shared_experts": 1, "activation": "relu"},
}


def make_config(values: dict[str, Any], **run_keys: Any) -> Config:
    config = Config(**run_keys)
    for key, value in values.items():
        setattr(config.model, key, RouterConfig(**value) if key == "router" else value)
    return config


def make_spec(values: dict[str, Any], vocab: int = 256) -> ModelSpec:
    return spec.MODEL.make(make_config(values), values.get("vocab", vocab))


def built(config: Config, vocab: int, precision: str = "fp64", seed: int = 3) -> Network:
    """The network on CPU with its initial weights, as on one device."""
    made = spec.MODEL.make(config, vocab)
    gpt = network.build(config, made, TABLE[precision])
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(initialise.logical(made.parameters[name], seed))
            if parameter.dim() == 1:  # zeros and ones would hide a forgotten bias or norm weight
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    return gpt


@pytest.mark.parametrize(
    "preset, parameters",
    [
        ("gpt2_124m", 124_439_808),
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        # The config.json and model.safetensors.index.json (total_size / 2 bytes) of Qwen/Qwen2-7B and Qwen/Qwen3-8B.
        ("mistral_7b", 7_241_732_096),  # mistralai/Mistral-7B-v0.1, in the same way
        ("qwen2_7b", 7_615_616_512),
        ("qwen3_8b", 8_190_735_360),
        ("mixtral_8x7b", 46_702_792_704),
        # The parameters of transformers' classes with the published config.json of Qwen/Qwen3-235B-A22B,
        # openai/gpt-oss-120b, google/gemma-3-27b-it (text_config), google/gemma-2-27b and moonshotai/Kimi-K2-Base.
        ("qwen3_235b_a22b", 235_093_634_560),
        ("qwen1.5_moe_a2.7b", 14_315_784_192),  # model card: 14.3B
        ("gpt_oss_120b", 116_829_156_672),  # model card: 116.83B
        ("gemma3_27b", 27_009_346_304),
        ("gemma2_27b", 27_227_128_320),
        ("kimi_k2", 1_026_408_209_408 + 60 * 384),  # with the biases of routers
        ("deepseek_v3", 671_026_419_200),
        ("deepseek_v2_lite", 15_706_484_224),
        ("gshard_600b", pytest.approx(600e9, abs=25e9)),
        ("switch_base", pytest.approx(7.4e9, abs=0.05e9)),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: Any) -> None:
    assert make_spec(GPT_PRESETS[preset]).num_parameters == parameters


def test_the_module_of_deepseek_v3_that_predicts_a_second_token_has_14_billion_parameters() -> None:
    """README.md and README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: 671B and 14B, of which embedding and output head,
    0.9B each, are shared."""
    alone = make_spec(GPT_PRESETS["deepseek_v3"])
    both = make_spec({**GPT_PRESETS["deepseek_v3"], "mtp_depth": 1})
    module, hidden = both.num_parameters - alone.num_parameters, 7168
    layer = sum(p.numel for p in alone.block("layers.60").parameters)
    assert module == layer + 2 * hidden * hidden + 3 * hidden  # enorm, hnorm, shared_head.norm
    assert (alone.num_parameters, module) == (671_026_419_200, 11_610_068_224)
    published = both.num_parameters + 2 * both.vocab * hidden  # safetensors: 684.53B with the scales of fp8 blocks
    assert published == 684_489_845_504


def test_a_token_of_deepseek_v3_meets_37_billion_parameters() -> None:
    """DeepSeek-V3, abstract: 37B activated, among them the embedding; attention multiplies 192 and 128 features."""
    made = make_spec(GPT_PRESETS["deepseek_v3"])
    attention = made.seq * made.heads * (192 + 128) * made.num_layers
    activated = made.forward_flops / (2 * made.seq) - attention + made.vocab * made.hidden
    assert activated == pytest.approx(37e9, rel=0.02)


# Narayanan et al., SC21, table 1: billions of parameters, heads, hidden, layers. Vocab 51200, sequence 2048.
TABLE_1 = [
    (1.7, 24, 2304, 24),
    (18.4, 48, 6144, 40),
    (145.6, 96, 12288, 80),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]


@pytest.mark.parametrize("billions, heads, hidden, layers", TABLE_1)
def test_parameters_and_flops_are_those_of_sc21(billions: float, heads: int, hidden: int, layers: int) -> None:
    vocab, seq = 51200, 2048
    made = make_spec({"layers": layers, "hidden": hidden, "heads": heads, "seq": seq}, vocab)
    assert made.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    assert made.num_parameters == pytest.approx(formula + 2 * hidden)  # the formula leaves out the final norm
    factor = seq * layers * hidden**2
    without_recompute = 72 * factor * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert 3 * made.forward_flops == pytest.approx(without_recompute)
    with_recompute = 96 * factor * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    again = sum(block.forward_flops for block in made.blocks if block.is_recomputed)
    assert 3 * made.forward_flops + again == pytest.approx(with_recompute)


def test_flops_of_a_window_are_those_of_the_pairs_that_it_leaves() -> None:
    """Counted twice, as without a window: of seq tokens, window (seq - (window - 1) / 2) pairs, up to the diagonal."""
    plain, windowed = make_spec(SMALL | LLAMA | {"seq": 512}), make_spec(SMALL | LLAMA | {"seq": 512, "window": 100})
    pairs = sum(min(token + 1, 100) for token in range(512))
    saved = (plain.forward_flops - windowed.forward_flops) / (2 * SMALL["layers"] * plain.attention_features)
    assert 512**2 - saved == pytest.approx(2 * pairs, rel=0.002)
    assert make_spec(SMALL | LLAMA | {"seq": 512, "window": 512}).forward_flops == plain.forward_flops


@pytest.mark.parametrize("preset", GPT_PRESETS)
def test_modules_hold_exactly_what_the_spec_lists(preset: str) -> None:
    values = GPT_PRESETS[preset]
    assert values["preset"] == preset
    few = {} if FULL else {"layers": min(values["layers"], values.get("dense_layers", 0) + 4)}
    assert_spec_is_module(make_config({**values, **few}), values.get("vocab", 256))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_modules_hold_what_the_spec_lists_under_every_option(options: dict[str, Any]) -> None:
    assert_spec_is_module(make_config({**SMALL, **options}), 33)


def assert_spec_is_module(config: Config, vocab: int) -> None:
    made = spec.MODEL.make(config, vocab)
    with torch.device("meta"):
        gpt = network.build(config, made, TABLE["bf16"])
    held = [(name, tuple(parameter.shape)) for name, parameter in gpt.named_parameters()]
    assert held == [(name, parameter.shape) for name, parameter in made.parameters.items()]
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.float32}
    assert gpt.block_names == tuple(block.name for block in made.blocks)
    for layer in made.layers():
        module = gpt.get_submodule(layer.name)
        assert getattr(module, "layer_role", None) == layer.layer_role
        if layer.tied:
            assert module.get_parameter("weight") is gpt.get_parameter(layer.tied)
    assert dict(gpt.named_buffers()) == {}


def test_every_rows_of_heads_are_marked() -> None:
    made = make_spec({**SMALL, "kv_heads": 2})
    heads = {name: p.heads for name, p in made.parameters.items() if p.heads is not None}
    assert {name.split(".")[-2:][0]: count for name, count in heads.items()} == {"q": 4, "k": 2, "v": 2}
    assert len(heads) == 2 * 6  # layers x (weight and bias of q, k, v)


@pytest.mark.parametrize(
    "values, key, suggestion",
    [
        ({"hidden": 65, "heads": 8}, "model.hidden", "model.hidden=64"),
        ({"kv_heads": 3}, "model.kv_heads", "model.kv_heads=2"),
        ({"position": "rope", "hidden": 24, "heads": 8}, "model.hidden", "model.hidden=48"),
        ({"position": "rope", "head_dim": 5}, "model.head_dim", "model.head_dim=10"),
        (LATENT | {"head_dim": 8}, "model.head_dim", "leave model.head_dim out"),
        (LATENT | {"qk_norm": "head"}, "model.qk_norm", "leave model.qk_norm out"),
        (LATENT | {"qk_rope_head_dim": 3}, "model.qk_rope_head_dim", "model.qk_rope_head_dim=4"),
        (LATENT | {"v_head_dim": 10}, "model.v_head_dim", "model.v_head_dim=9"),
        (LATENT | {"position": "learned"}, "model.position", "model.position=rope"),
        (LATENT | {"kv_heads": 2}, "model.kv_heads", "model.kv_heads=8 or leave model.kv_heads out"),
        (
            LATENT | {"v_head_dim": None, "q_lora_rank": None},
            "model.v_head_dim",
            "model.v_head_dim=N or leave model.kv_lora_rank and model.qk_nope_head_dim and model.qk_rope_head_dim out",
        ),
        ({"q_lora_rank": 4}, "model.kv_lora_rank", "model.kv_lora_rank=N or leave model.q_lora_rank out"),
        (
            LATENT | {"rope_scaling": "yarn", "rope_beta_slow": 33.0},
            "model.rope_beta_fast",
            "model.rope_beta_fast=1056",
        ),
        (LATENT | {"rope_scaling": "yarn", "rope_theta": 1.0}, "model.rope_theta", "model.rope_theta=10000"),
    ],
)
def test_impossible_sizes_are_refused_with_the_nearest_legal_value(values: dict, key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_spec(values)
    (problem,) = error.value.problems
    assert (problem.where, problem.suggestion) == (key, suggestion)


@pytest.mark.parametrize("key", ["layers", "hidden", "heads", "kv_heads", "ffn", "seq", "expert_ffn", "expert_period"])
def test_sizes_below_1_are_refused_by_the_bounds_of_the_schema(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_plan({f"model.{key}": 0})
    assert [problem.where for problem in error.value.problems] == [f"model.{key}"]


# A plain reference, written from the papers: no module, no fusing, loops over heads.


def reference(gpt: Network, config: Config, tokens: Tensor) -> Tensor:
    """Logits in fp64."""
    model, weights = config.model, dict(gpt.named_parameters(remove_duplicate=False))
    x = weights["embedding.tokens.weight"][tokens]
    if model.position == "learned":
        x = x + weights["embedding.position.weight"][: tokens.size(1)]
    for index in range(model.layers):
        name = f"layers.{index}"
        mlp = "moe" if f"{name}.moe.router.weight" in weights else "mlp"
        for part, compute in {
            "attention": reference_attention, mlp: reference_experts if mlp == "moe" else reference_mlp
        }.items():  # fmt: skip
            norm = f"{name}.{'attention' if part == 'attention' else 'mlp'}_norm"
            if model.norm_position == "pre":
                x = x + compute(weights, f"{name}.{part}", model, reference_norm(weights, norm, model, x))
            else:
                x = x + reference_norm(weights, norm, model, compute(weights, f"{name}.{part}", model, x))
    return reference_norm(weights, "head.norm", model, x) @ weights["head.head.weight"].T


def affine(weights: dict, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def reference_norm(weights: dict, name: str, model: Any, x: Tensor) -> Tensor:
    if model.norm == "rmsnorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt()
    return normal * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)


def reference_attention(weights: dict, name: str, model: Any, x: Tensor) -> Tensor:
    if model.kv_lora_rank:
        return reference_latent_attention(weights, name, model, x)
    size = model.head_dim or model.hidden // model.heads
    group = model.heads // (model.kv_heads or model.heads)
    q, k, v = (affine(weights, f"{name}.qkv.{part}", x) for part in "qkv")
    if model.qk_norm == "all":
        q, k = (reference_norm(weights, f"{name}.{part}_norm", model, x) for part, x in (("q", q), ("k", k)))
    mixed = []
    for head in range(model.heads):
        mine = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        query, key = q[..., mine], k[..., shared]
        if model.qk_norm == "head":
            query, key = (reference_norm(weights, f"{name}.{p}_norm", model, x) for p, x in (("q", query), ("k", key)))
        if model.position == "rope":
            query, key = reference_rotation(query, model.rope_theta), reference_rotation(key, model.rope_theta)
        scores = query @ key.transpose(1, 2) / size**0.5
        scores = scores + reference_mask(model, scores)
        mixed.append(scores.softmax(-1) @ v[..., shared])
    return affine(weights, f"{name}.out", torch.cat(mixed, -1))


def reference_latent_attention(weights: dict, name: str, model: Any, x: Tensor) -> Tensor:
    """DeepSeek-V2, equations 37 to 47: pairs (2i, 2i + 1) are turned."""
    plain, turned = model.qk_nope_head_dim, model.qk_rope_head_dim
    growth = 0.1 * model.rope_mscale_all_dim * log(model.rope_factor) + 1 if model.rope_scaling == "yarn" else 1.0
    order = [*range(0, turned, 2), *range(1, turned, 2)]
    if model.q_lora_rank:
        latent = reference_norm(weights, f"{name}.q_a_norm", model, affine(weights, f"{name}.q_a", x))
        queries = affine(weights, f"{name}.q_b", latent)
    else:
        queries = affine(weights, f"{name}.q", x)
    both = affine(weights, f"{name}.kv_a", x)
    shared = reference_rotation(both[..., model.kv_lora_rank :][..., order], model.rope_theta)
    latent = reference_norm(weights, f"{name}.kv_a_norm", model, both[..., : model.kv_lora_rank])
    expanded, mixed = affine(weights, f"{name}.kv_b", latent), []
    for head in range(model.heads):
        query = queries[..., head * (plain + turned) : (head + 1) * (plain + turned)]
        one = expanded[..., head * (plain + model.v_head_dim) : (head + 1) * (plain + model.v_head_dim)]
        rotated = reference_rotation(query[..., plain:][..., order], model.rope_theta)
        scores = query[..., :plain] @ one[..., :plain].transpose(1, 2) + rotated @ shared.transpose(1, 2)
        scores = scores * growth**2 / (plain + turned) ** 0.5
        scores = scores + reference_mask(model, scores)
        mixed.append(scores.softmax(-1) @ one[..., plain:])
    return affine(weights, f"{name}.out", torch.cat(mixed, -1))


def reference_mask(model: Any, scores: Tensor) -> Tensor:
    """-inf at the keys behind a query, and at those more than window - 1 before it."""
    hidden = torch.full(scores.shape[1:], float("-inf"), dtype=scores.dtype)
    ahead = torch.ones_like(hidden, dtype=torch.bool).triu(1)
    behind = torch.ones_like(ahead).tril(-(model.window or scores.size(-1)))
    return torch.zeros_like(hidden).masked_fill(ahead | behind, float("-inf"))


def reference_rotation(x: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + half) as complex numbers, turned by position x theta^(-i / half)."""
    half = x.size(-1) // 2
    turns = torch.arange(x.size(1)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((turned.real, turned.imag), -1)


def reference_mlp(weights: dict, name: str, model: Any, x: Tensor) -> Tensor:
    gate = affine(weights, f"{name}.up.gate", x) if model.activation == "swiglu" else None
    inside = reference_activation(model.activation, gate, affine(weights, f"{name}.up.up", x))
    return affine(weights, f"{name}.down", inside)


def reference_activation(kind: str, gate: Tensor | None, up: Tensor) -> Tensor:
    if gate is not None:
        return gate * torch.sigmoid(gate) * up
    if kind == "relu":
        return up * (up > 0)
    return 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))


def reference_experts(weights: dict, name: str, model: Any, x: Tensor) -> Tensor:
    """The best top_k of all experts for every token, one token after the other; none is dropped."""
    rows = []
    for row in x.flatten(0, 1):
        logits = row @ weights[f"{name}.router.weight"].T
        scores = torch.sigmoid(logits) if model.router.score == "sigmoid" else logits.softmax(-1)
        ranking = scores + weights.get(f"{name}.router.selection_bias", 0.0)
        if model.router.n_group > 1:
            groups = ranking.detach().view(model.router.n_group, -1)
            worth = [sum(sorted(map(float, group))[-2:]) for group in groups]
            used = sorted(range(len(worth)), key=lambda group: -worth[group])[: model.router.topk_group]
            outside = [e for e in range(model.experts) if e // groups.size(1) not in used]
            ranking = ranking.index_fill(0, torch.tensor(outside), float("-inf"))
        best = sorted(range(model.experts), key=lambda e: -float(ranking[e].detach()))[: model.router.top_k]
        out = torch.zeros_like(row)
        for expert in best:
            one = {part: weights[f"{name}.experts.{part}"][expert] for part in ("up", "down")}
            gate = weights[f"{name}.experts.gate"][expert] @ row if model.activation == "swiglu" else None
            inside = reference_activation(model.activation, gate, one["up"] @ row)
            share = scores[expert] / sum(scores[other] for other in best)
            out = out + model.router.scaling * share * (one["down"] @ inside)
        rows.append(out)
    mixed = torch.stack(rows).view(x.shape)
    return mixed + reference_mlp(weights, f"{name}.shared", model, x) if model.shared_experts else mixed


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_loss_and_gradients_equal_the_reference(options: dict[str, Any]) -> None:
    config = make_config({**SMALL, **options, "label_smoothing": 0.1})
    gpt = built(config, vocab=33)
    tokens = torch.randint(33, (2, 8), generator=torch.Generator().manual_seed(0))
    targets = torch.roll(tokens, -1, 1)
    targets[:, -1] = -1
    logits = gpt(tokens)
    expected = reference(gpt, config, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    log_probabilities = expected.log_softmax(-1)
    chosen = log_probabilities.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = -(0.9 * chosen + 0.1 * log_probabilities.mean(-1))
    expected_loss = (each * (targets >= 0)).sum()
    loss = gpt.loss(logits, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    parameters = [parameter for parameter in gpt.parameters() if parameter.requires_grad]
    for mine, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected_loss, parameters)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_weights_start_as_gpt_2s_do() -> None:
    made = make_spec({**SMALL, "init_std": 0.02, "layers": 8})
    std = {name: p.initialiser.std for name, p in made.parameters.items() if p.initialiser.kind == "normal"}
    assert std["layers.3.attention.qkv.q.weight"] == std["embedding.tokens.weight"] == 0.02
    assert std["layers.3.attention.out.weight"] == std["layers.3.mlp.down.weight"] == 0.02 / 4
    kinds = {p.initialiser.kind for name, p in made.parameters.items() if name.endswith("bias")}
    assert kinds == {"zeros"}


def test_computing_in_bf16_rounds_the_weights_where_they_are_used() -> None:
    config = make_config(SMALL)
    rounded = built(config, 33, "bf16")
    exact = built(config, 33, "fp32")
    tokens = torch.arange(16).view(2, 8)
    assert {p.dtype for p in rounded.parameters()} == {torch.float32}
    assert rounded(tokens).dtype == torch.bfloat16
    assert rounded.loss(rounded(tokens), tokens).dtype == torch.float32
    with torch.no_grad():
        before = rounded(tokens)
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
        assert torch.equal(rounded(tokens), before)
        assert not torch.equal(exact(tokens), before.float())
        torch.testing.assert_close(before.float(), exact(tokens), rtol=0.05, atol=0.2)


def test_keep_drops_other_blocks_and_leaves_a_tied_head_its_own_copy() -> None:
    gpt = built(make_config(SMALL), 33)
    weight = gpt.get_parameter("embedding.tokens.weight")
    gpt.keep(["layers.1", "head"])
    names = [name for name, _ in gpt.named_parameters()]
    assert names[0] == "layers.1.attention_norm.weight" and names[-1] == "head.head.weight"
    assert gpt.block_names == ("layers.1", "head") and gpt.recomputed == ("layers.1",)
    assert gpt.get_parameter("head.head.weight") is weight
    with pytest.raises(ValueError, match=r"no block 'layers\.0' here"):
        gpt.keep(["layers.0"])


def test_stages_chained_are_the_network_and_share_its_weights() -> None:
    gpt = built(make_config(SMALL), 33)
    tokens = torch.arange(16).view(2, 8)
    first, second = gpt.split([["embedding", "layers.0"], ["layers.1", "head"]])
    assert torch.equal(second(first(tokens)), gpt(tokens))
    assert second.get_parameter("head.head.weight") is first.get_parameter("embedding.tokens.weight")
    names = [name for stage in (first, second) for name, _ in stage.named_parameters()]
    assert [name for name in names if name != "head.head.weight"] == list(dict(gpt.named_parameters()))
