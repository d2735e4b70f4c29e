"""A user's own nn.Module: what the contract asks, what is derived from the module, and that its numbers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as nn_module

from parallelrun.base import user_code
from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.mesh import build_mesh
from parallelrun.models import dropout, initialise, recompute
from parallelrun.models.local_tokens import LocalTokens, hold
from parallelrun.models.module import network, source, spec
from parallelrun.models.network import Network, compile_blocks
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import narrow_config, tiny_config, tiny_plan
from tests.unit import staged_nets, user_net

FILE = Path(user_net.__file__)
ROLES = {
    "embed.tokens": "embedding",
    "layers.*.norm?": "norm",
    "layers.*.[qkv]": "column_parallel",
    "layers.*.out": "row_parallel",
    "layers.*.fc1": "column_parallel",
    "layers.*.fc2": "row_parallel",
    "head": "head",
}
BLOCKS = ["embed", "layers.*", "head"]
TOKENS = torch.arange(16).view(2, 8)


def overrides(**more: Any) -> dict[str, Any]:
    given = {
        "model.name": "module",
        "model.preset": "module",
        "model.source": f"{FILE}:build",
        "dataset.name": "pystdlib",
    }
    return given | {key.replace("__", "."): value for key, value in more.items()}


def config(**more: Any) -> Config:
    return narrow_config(overrides(**more))


def built(given: Config, precision: str = "fp32") -> Network:
    made = spec.MODEL.make(given, 32)
    with torch.device("meta"):
        net = network.build(given, made, TABLE[precision])
    values = net.own_values(given.seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(values[name].to(parameter.dtype)))
    return net


def original(given: Config) -> torch.nn.Module:
    torch.manual_seed(given.seed)
    return user_net.build(32, given.model.seq, given.model.hidden, **given.model.arguments)


def test_without_roles_and_blocks_it_is_one_block_and_trains_as_it_is() -> None:
    given = config()
    made = spec.MODEL.make(given, 32)
    assert [block.name for block in made.blocks] == ["module"]
    assert (made.kind, made.sample_shape, made.targets_per_sample, made.vocab) == ("tokens", (8,), 8, 32)
    net, plain = built(given), original(given)
    assert [(name, p.shape) for name, p in made.parameters.items()] == [
        (f"module.{name}", tuple(p.shape)) for name, p in plain.named_parameters()
    ]
    torch.testing.assert_close(net(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_roles_and_blocks_keep_names_values_and_results(tied: bool) -> None:
    given = config(model__roles=ROLES, model__blocks=BLOCKS, model__arguments={"tied": tied})
    made = spec.MODEL.make(given, 32)
    assert [block.name for block in made.blocks] == [
        "module.embed",
        "module.layers.0",
        "module.layers.1",
        "module.head",
    ]
    assert made.boundary_shape == (8, 16)
    net, plain = built(given), original(given)
    names = [name for name, _ in net.named_parameters()]
    assert names == list(made.parameters) == [f"module.{name}" for name, _ in plain.named_parameters()]
    torch.testing.assert_close(net(TOKENS), plain(TOKENS))
    assert made.tied == ((("module.head.weight", "module.embed.tokens.weight"),) if tied else ())
    roles = {parameter.name: parameter.layer_role for parameter in made.parameters.values()}
    assert (
        roles["module.layers.0.q.bias"] == "column_parallel" and roles["module.layers.1.fc2.weight"] == "row_parallel"
    )
    first, second = net.split([[b.name for b in made.blocks[:2]], [b.name for b in made.blocks[2:]]])
    torch.testing.assert_close(second(first(TOKENS)), plain(TOKENS))


def test_flops_and_kept_elements_are_counted_on_the_module() -> None:
    given = config(model__roles=ROLES, model__blocks=BLOCKS)
    embed, layer, _, head = spec.MODEL.make(given, 32).blocks
    assert embed.forward_flops == 0 and head.forward_flops == 2 * 16 * 32 * 8
    assert layer.forward_flops == 2 * 8 * 12 * 16**2 + 4 * 8**2 * 16
    assert layer.saved_elements > 8 * (16 * 6 + 64)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_block_whose_dropout_comes_after_its_last_sum_is_known(rate: float) -> None:
    given = config(model__roles=ROLES, model__blocks=BLOCKS, model__arguments={"dropout": rate})
    assert [one.saves_after_sum for one in spec.MODEL.make(given, 32).blocks[1:3]] == 2 * [rate > 0]


def test_materialised_weights_are_the_modules_own_and_buffers_survive() -> None:
    given = config(model__roles=ROLES, seed=5)
    plan = tiny_plan(overrides(model__roles=ROLES, seed=5, model__vocab=None))
    with torch.device("meta"):
        net = network.build(given, plan.spec, TABLE["fp32"])
    initialise.materialise([net], plan, build_mesh(plan, torch.device("cpu")), given.seed)
    torch.manual_seed(5)
    plain = user_net.build(plan.spec.vocab, 8, 16)
    torch.testing.assert_close(net(TOKENS), plain(TOKENS))
    given.seed = 6
    assert not torch.equal(original(given).layers[0].q.weight, plain.layers[0].q.weight)


def test_dropout_becomes_dropout_by_hash() -> None:
    net = built(config(model__arguments={"dropout": 0.5}))
    with pytest.raises(ValueError, match="needs sample ids"):
        net(TOKENS)
    assert torch.equal(net(TOKENS, torch.tensor([3, 4])), net(TOKENS, torch.tensor([3, 4])))
    assert not torch.equal(net(TOKENS, torch.tensor([3, 4])), net(TOKENS, torch.tensor([5, 6])))
    assert dropout.current_sample_ids() is None


def test_bf16_rounds_what_has_no_role_too() -> None:
    net, exact = built(config(), "bf16"), built(config())
    out = net(TOKENS)
    assert out.dtype == torch.bfloat16 and {p.dtype for p in net.parameters()} == {torch.float32}
    torch.testing.assert_close(out.float(), exact(TOKENS), rtol=0.1, atol=0.1)
    net.loss(out, TOKENS).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_layers_of_torch_that_read_weights_of_others_compute_in_bf16() -> None:
    nets = FILE.with_name("staged_nets.py")
    net = built(
        config(model__source=f"{nets}:patches", model__arguments={"tokens": True}, dataset__name="digits"), "bf16"
    )
    images = torch.ones(2, 3, 8, 8)
    trained = net(images)
    with torch.no_grad():
        assert trained.dtype == net.eval()(images).dtype == torch.bfloat16


def test_gradients_reach_a_frozen_first_layer_inside_a_module_with_parameters_of_its_own() -> None:
    net = staged_nets.patches(10, tokens=True).requires_grad_(False)
    network.let_gradients_through(net)
    reached: list[bool] = []
    net.patches.register_forward_hook(lambda *call: reached.append(call[2].requires_grad))
    net(torch.ones(1, 3, 8, 8))
    assert reached == [True]


def test_features_need_no_embedding() -> None:
    given = config(model__source=f"{FILE}:build_classifier", dataset__name="synthetic")
    made = spec.MODEL.make(given, 32)
    assert (made.kind, made.sample_shape, made.targets_per_sample) == ("features", (16,), 1)


@pytest.mark.parametrize(
    "more, where, said",
    [
        ({"model__source": "net"}, "model.source", "must name a function"),
        ({"model__source": "./nowhere.py:build"}, "model.source", "there is no file"),
        ({"model__source": f"{FILE}:buidl"}, "model.source", "has no function 'buidl'"),
        (
            {"model__source": f"{FILE}:build_batchnorm", "dataset__name": "synthetic"},
            "model.source",
            "1 is a BatchNorm1d without a moving average",
        ),
        ({"pp": 2}, "model.blocks", "pp=2 cuts between blocks"),
        ({"model__blocks": ["embed", "blocks.*"]}, "model.blocks", "called 'blocks.*'"),
        (
            {"model__blocks": ["embed", "layers.0", "head"]},
            "model.blocks",
            "block head gives (8, 32) per sample, block embed gives (8, 16)",
        ),
        (
            {"model__blocks": ["embed", "layers.1", "layers.0", "head"]},
            "model.blocks",
            "does not call module.layers.1 behind",
        ),
        ({"model__roles": {"layers.*.fc3": "row_parallel"}}, "model.roles", "called 'layers.*.fc3'"),
        ({"model__roles": {"layers.*.fc1": "colums"}}, "model.roles", "'colums' (of layers.0.fc1) is no layer role"),
        (
            {"model__roles": {"layers.*.norm1": "row_parallel"}},
            "model.roles",
            "layers.0.norm1 cannot be row_parallel: it is a LayerNorm",
        ),
        ({"model__roles": {"layers.*.fc1": "head"}}, "model.roles", "a head has no bias"),
        (
            {"model__roles": {"layers.*.fc1": "column_parallel"}, "tp": 2},
            "model.roles",
            "fails at or after layers.0.fc2",
        ),
        (
            {"model__source": f"{FILE}:build_fixed", "model__roles": {"layers.*.q": "column_parallel"}, "tp": 2},
            "model.roles",
            "fails at or after layers.0.q",
        ),
    ],
)
def test_what_breaks_the_contract_is_named(more: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec.MODEL.make(config(**more), 32)
    (problem,) = error.value.problems
    assert problem.where == where and said in problem.what


def test_a_block_pattern_stays_on_its_level() -> None:
    assert network.block_names(original(config()), ["layers.*"], "net") == ["layers.0", "layers.1"]


def test_loading_does_not_disturb_torchs_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    source.build(config(), 32)
    assert torch.equal(torch.rand(3), expected)


def test_a_tied_head_has_its_true_sizes() -> None:
    made = spec.MODEL.make(config(model__roles=ROLES, model__arguments={"tied": True}), 32)
    head = next(layer for layer in made.layers() if layer.layer_role == "head")
    assert (head.in_features, head.out_features, head.parameters) == (16, 32, ())
    assert head.tied == "module.embed.tokens.weight"


def test_a_frozen_parameter_trains_as_in_plain_torch() -> None:
    """Loss, gradients and global norm of one step on one device, against the user's own module without us."""
    frozen = "embed.*|layers.0.*|*.norm2.weight"
    given = overrides(model__arguments={"frozen": frozen}, model__vocab=None, optimizer__clip=0.0, microbatches=1)
    training = build(tiny_config(given), tiny_plan(given), torch.device("cpu"))
    batch = training.reader.batch(1)
    result = train_step(training, 1, 0.0, LossScaler(training.config.precision, scaled=False))
    torch.manual_seed(training.config.seed)
    plain = user_net.build(training.plan.spec.vocab, 8, 16, frozen=frozen)
    loss = torch.nn.functional.cross_entropy(plain(batch.inputs).flatten(0, 1), batch.targets.flatten())
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert {p.name for p in training.parameters} == {
        f"module.{name}" for name, p in plain.named_parameters() if p.grad is not None
    }
    squares = sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None)
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-5)
    assert (
        training.model_parts[0].get_parameter("module.layers.0.q.weight").grad is None
    )  # and autograd stopped above it


def test_a_module_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no parameter that is trained"):
        spec.MODEL.make(config(model__arguments={"frozen": "*"}), 32)


SLICED = {"model__source": f"{FILE}:build_sliceable", "model__roles": ROLES, "tp": 2}
SLICED |= {"strategy__tensor__sequence_parallel": True}


def test_a_module_of_which_each_rank_may_hold_a_slice_of_the_sequence() -> None:
    assert (
        spec.MODEL.make(config(**SLICED), 32).parameters["module.embed.place.weight"].layer_role == "position_embedding"
    )


@pytest.mark.parametrize(
    "more, said",
    [
        ({"model__source": f"{FILE}:build"}, "at embed"),  # positions by the length of the tokens
        (
            {"model__arguments": {"flaw": "layers.0"}},
            "what reaches layers.1.q differs",
        ),  # counts from its own start
        ({"model__arguments": {"flaw": "embed"}}, "what reaches layers.0.q differs"),
        ({"model__roles": {k: v for k, v in ROLES.items() if k != "head"}}, "behind its last role layer"),
    ],
)
def test_where_a_slice_is_not_enough_the_layer_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec.MODEL.make(config(**SLICED | more), 32)
    (problem,) = error.value.problems
    assert (problem.kind, problem.where) == ("undefined", "strategy.tensor.sequence_parallel")
    assert said in problem.what


def test_dropout_of_attention_s_probabilities_is_refused_where_heads_are_split() -> None:
    with pytest.raises(ConfigError, match=r"dropout layers\.0\.drop acts on something whose rows"):
        spec.MODEL.make(config(model__source=f"{FILE}:build_dropped", model__roles=ROLES, tp=2), 32)


BROKEN = """
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden + 1, vocab)

    def forward(self, x):
        return self.head(self.embed(x))


def build(vocab, hidden):
    return Net(vocab, hidden)


def raises(vocab):
    raise KeyError("no such layer")
"""


HIDDEN = """try:
    import json.nosuch
except ImportError as error:
    raise RuntimeError("Failed to import the model:") from error
"""
OF_A_LIBRARY = """import library
try:
    library.load()
except ValueError:
    raise RuntimeError("no model")
"""


@pytest.mark.parametrize(
    ("text", "function", "what", "where"),
    [
        (BROKEN, "build", "RuntimeError", "net.py:12 in forward: return self.head(self.embed(x))"),
        (BROKEN, "raises", "KeyError: 'no such layer'", 'net.py:20 in raises: raise KeyError("no such layer")'),
        ("def build(:\n", "build", "SyntaxError", "net.py:1: def build("),
        ("import nosuchpackage\n", "build", "No module named 'nosuchpackage'", "net.py:1 in <module>: import nosuch"),
        (
            HIDDEN,
            "build",
            ", because of ModuleNotFoundError: No module named 'json.nosuch'",
            "net.py:2 in <module>: im",
        ),
        (OF_A_LIBRARY, "build", "RuntimeError: no model, because of ValueError: not here (", "net.py:3 in <module>"),
    ],
)
def test_an_exception_in_the_users_file_is_told_with_its_lines(tmp_path, monkeypatch, text, function, what, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(text)
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "site-packages" / "library.py").write_text('def load():\n    raise ValueError("not here")\n')
    monkeypatch.syspath_prepend(tmp_path / "lib" / "site-packages")
    user_code._others.cache_clear()
    config = tiny_config(**overrides(**{"model.source": f"./net.py:{function}"}))
    with pytest.raises(ConfigError) as raised:
        spec.MODEL.make(config, 256)
    (problem,) = raised.value.problems
    assert what in problem.what and problem.where.startswith(where)


def test_attributes_of_the_users_are_not_taken_for_ours() -> None:
    given = config(model__source=f"{FILE}:build_patches", dataset__name="digits", recompute="selective")
    made = spec.MODEL.make(given, 10)
    assert (made.kind, made.sample_shape, made.heads, made.kv_heads) == ("images", (3, 16, 16), 0, 0)
    assert {layer.layer_role for layer in made.layers()} == {"", "dropout"}
    net = network.build(given, made, TABLE["fp32"])
    recompute.apply(net, "selective")
    hold(net, LocalTokens())
    compile_blocks(net, "eager")
    assert net.module.local_tokens == 3


@pytest.mark.parametrize("value", ["3", "(3, 'x', 8)", "()", "(3, -8, 8)", "[2.0]"])
def test_a_sample_shape_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    text = "from torch import nn\n\ndef build(vocab):\n    net = nn.Linear(64, vocab)\n"
    (tmp_path / "net.py").write_text(f"{text}    net.sample_shape = {value}\n    return net\n")
    with pytest.raises(ConfigError, match=r"is no shape of a sample, such as \(3, 32, 32\)"):
        spec.MODEL.make(config(model__source=f"{tmp_path}/net.py:build"), 10)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(3)", "fails: SystemExit: 3"),
        ("return nn.Flatten", "gave a type, not an nn.Module"),
        ("return nn.Sequential(nn.LazyLinear(vocab))", "0.weight of"),
    ],
)
def test_a_function_that_exits_is_an_error_of_the_users(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "net.py").write_text(f"from torch import nn\n\ndef build(vocab):\n    {body}\n")
    with pytest.raises(ConfigError) as raised:
        spec.MODEL.make(config(model__source=f"{tmp_path}/net.py:build"), 10)
    assert said in raised.value.problems[0].what


def test_a_module_that_fails_on_images_is_told_which_key_sizes_them(tmp_path: Path) -> None:
    body = "net = nn.Sequential(nn.Conv2d(1, 4, 99), nn.Flatten(), nn.Linear(4, 10))"
    (tmp_path / "net.py").write_text(f"from torch import nn\n\ndef build(num_classes):\n    {body}\n    return net\n")
    with pytest.raises(ConfigError) as raised:
        spec.MODEL.make(config(model__source=f"{tmp_path}/net.py:build", dataset__name="digits"), 10)
    assert raised.value.problems[0].suggestion == "model.image=SIZE"


def test_a_block_saves_what_training_saves() -> None:
    """A dropout mask is a byte, of fp32 a quarter of an element; eval mode, in which blocks are measured, has none."""
    sizes = {"model__blocks": BLOCKS, "model__hidden": 16, "model__seq": 8}
    storages = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storages[id(saved.untyped_storage())] = saved.untyped_storage()
        return saved

    block = original(config(**sizes)).layers[0].train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        block(torch.zeros(1, 8, 16, requires_grad=True) * 1.0)
    weights = {id(parameter.untyped_storage()) for parameter in block.parameters()}
    saved = sum(storage.nbytes() for key, storage in storages.items() if key not in weights) / 4
    rates = (0.0, 0.5)
    without, dropped = (
        spec.MODEL.make(config(**sizes, model__arguments={"dropout": rate}), 32).blocks[1].saved_elements
        for rate in rates
    )
    assert without == pytest.approx(saved, rel=0.1)  # the log-sum-exp of a GPU's kernel is padded
    assert dropped == without + 2 * 8 * 16 / 4


def test_a_module_that_cannot_be_measured_on_meta_leaves_nothing_switched_on() -> None:
    source = FILE.with_name("other_nets.py")
    spec.MODEL.make(config(model__source=f"{source}:shaped", model__arguments={"reads_values": True}), 32)
    assert not nn_module._global_forward_pre_hooks and not nn_module._global_forward_hooks


def test_a_cut_that_leaves_all_layers_in_one_stage_is_refused_by_the_name_of_their_list():
    nets = Path(__file__).parents[1] / "other_nets.py"
    module = {"model.name": "module", "model.preset": "module", "model.source": f"{nets}:nested", "model.vocab": None}
    cut = {"model.blocks": ["body", "head"], "pp": 2, "dataset.name": "pystdlib", "dataset.vocab": None}
    with pytest.raises(ConfigError, match=r"holds the 100 layers of body\.layers") as refusal:
        resolve(tiny_config({**module, **cut}))
    assert refusal.value.problems[0].suggestion == "'model.before=[body.embed]' 'model.blocks=[body.layers]'"


WIDENING = """
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 16), nn.Linear(16, vocab)

    def forward(self, tokens):
        return self.head(self.embed(tokens).float().sin().to(self.head.weight.dtype))

def build(vocab):
    return Net(vocab)
"""


def test_what_forward_widens_counts_twice_in_16_bit(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(WIDENING)
    saved = {
        kind: spec.MODEL.make(config(model__source=f"{tmp_path}/net.py:build", precision__name=kind), 32).blocks[0]
        for kind in ("fp32", "bf16")
    }
    assert saved["fp32"].saved_elements == 2 * 8 * 16  # sin's input and its result
    assert saved["bf16"].saved_elements == 3 * 8 * 16  # the input in 32 bit
