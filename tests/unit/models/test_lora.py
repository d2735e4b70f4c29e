"""LoRA: which layers get adapters, what is frozen, and adapters that peft and transformers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import StoredModel, initial_weights
from parallelrun.checkpoint.exchange.weights import LoadedWeights
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.initialise import logical
from parallelrun.models.module import source
from parallelrun.planner.model import definitions
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.suggest import with_adapters
from tests.extras import needs
from tests.hugging_face_families import overrides
from tests.plans import narrow_config, tiny_config
from tests.unit import staged_nets, user_net

NET = {"model.name": "module", "model.preset": "module", "model.source": f"{user_net.__file__}:build"}


def config(family: str = "", **more: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in more.items()}
    return narrow_config({**(overrides(family) if family else NET), "model.lora.rank": 2, **keys})


def targets(made: Config, vocab: int = 96) -> set[str]:
    spec = definitions.model(made).make(made, vocab)
    return {layer.name.removeprefix("module.") for layer in spec.layers() if layer.input_gradients > 1}


def test_only_adapters_are_trained_and_the_layers_keep_their_names() -> None:
    made = config()
    spec = definitions.model(made).make(made, 64)
    plain = definitions.model(made).make(config(model__lora__rank=None), 64)
    trained = {name: p.shape for name, p in spec.parameters.items() if not p.frozen}
    assert spec.parameters.keys() - trained.keys() == plain.parameters.keys()
    assert trained["module.layers.0.fc1.lora_A.weight"] == (2, 16)
    assert trained["module.layers.0.fc1.lora_B.weight"] == (64, 2)
    assert not any(name.startswith("module.head") for name in trained) and len(trained) == 2 * 6 * 2


def test_the_first_factor_starts_as_a_linear_layer_and_the_second_at_zero() -> None:
    made = config(model__hidden=64)
    spec = definitions.model(made).make(made, 64)
    name = "module.layers.0.fc2"
    first, second = (logical(spec.parameters[f"{name}.lora_{factor}.weight"], seed=1) for factor in "AB")
    assert not second.any() and 0.9 / 16 < first.abs().max() <= 1 / 16
    assert not torch.equal(first, logical(spec.parameters[f"{name}.lora_A.weight"], seed=2))


def test_an_adapter_adds_its_scaled_product() -> None:
    made = config(model__lora__alpha=5.0)
    module: Any = source.build(made, 64)
    layer, x = module.layers[0].fc1, torch.randn(3, 16)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    expected = expected + 2.5 * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    assert torch.allclose(layer(x), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["q", "v"], {"layers.0.q", "layers.0.v", "layers.1.q", "layers.1.v"}),
        (["layers.1.*"], {f"layers.1.{name}" for name in ("q", "k", "v", "out", "fc1", "fc2")}),
        (["0.fc?", "head"], {"layers.0.fc1", "layers.0.fc2", "head"}),
    ],
)
def test_targets_are_names_or_their_ends(patterns: list[str], names: set[str]) -> None:
    assert targets(config(model__lora__targets=patterns), 64) == names


def test_a_layer_that_is_never_called_is_no_target() -> None:
    made = config(model__source=f"{staged_nets.__file__}:patches", dataset__name="digits")
    assert {name.rpartition(".")[2] for name in targets(made, 10)} == {"head", "linear1", "linear2"}


@pytest.mark.parametrize(
    ("patterns", "more", "cause"),
    [
        (["q", "w1"], {}, "'w1' is in no layer's name of .*its linear layers: q, k, v, out, fc1, fc2, head"),
        (["norm1"], {}, "'norm1' is a LayerNorm, not a linear layer"),
        (["head"], {"model__arguments": {"tied": True}}, "weight of head is tied"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused(patterns: list[str], more: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        targets(config(model__lora__targets=patterns, **more), 64)


def test_keys_that_are_not_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=2 is not read by model=gpt"):
        resolve(tiny_config(model__lora__rank=2), given=frozenset({"model.lora.rank"}))
    with pytest.raises(ConfigError, match=r"model\.lora\.alpha=3\.0 is not read"):
        resolve(tiny_config({**NET, "model.lora.alpha": 3.0}), given=frozenset({"model.lora.alpha"}))


@needs("peft")
@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3", "opt", "bloom", "bert", "falcon", "gemma3_text"])
def test_default_targets_are_the_linear_layers_of_peft(family: str) -> None:
    import peft

    from parallelrun.models.hf import builder

    made = config(family)
    theirs = peft.get_peft_model(builder.make_module(made, 96), peft.LoraConfig(target_modules="all-linear"))
    names = {name.removeprefix("base_model.model.") for name, part in theirs.named_modules() if hasattr(part, "lora_A")}
    assert targets(made) == names


@needs("peft")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_go_to_peft_and_merged_weights_to_transformers(family: str, tmp_path: Path) -> None:
    """GPT-2's layers have transposed weights, some of which are square."""
    import peft
    import transformers

    made = config(family, model__lora__alpha=3.0)
    spec = definitions.model(made).make(made, 96)
    module: Any = source.build(made, 96).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        tokens = torch.randint(0, 96, (2, 8))
        expected = module(tokens)
    tensors = {f"module.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    stored = StoredModel(tmp_path, made, spec, LoadedWeights(tmp_path, tensors))
    export(stored, tmp_path / "merged", "hf", None, 2**30)
    export(stored, tmp_path / "adapters", "peft", None, 2**30)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = {name: tensor for name, tensor in tensors.items() if not spec.parameters[name].is_adapter}
    without = definitions.model(made).make(config(family, model__lora__rank=None), 96)
    plain = config(family, model__lora__rank=None)
    export(StoredModel(tmp_path, plain, without, LoadedWeights(tmp_path, base)), tmp_path / "base", "hf", None, 2**30)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    adapted = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapters").eval()
    with torch.no_grad():
        scale = expected.abs().max()
        assert (merged(tokens).logits - expected).abs().max() < 1e-5 * scale
        assert (adapted(tokens).logits - expected).abs().max() < 1e-5 * scale
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - expected).abs().max() > 1e-2 * scale


@needs("peft")
def test_a_run_starts_from_weights_without_adapters_and_from_its_own(tmp_path: Path) -> None:
    made = config("llama")
    spec = definitions.model(made).make(made, 96)
    module = source.build(made, 96)
    tensors = {f"module.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    stored = StoredModel(tmp_path, made, spec, LoadedWeights(tmp_path, tensors))
    export(stored, tmp_path / "own", "safetensors", None, 2**30)
    export(stored, tmp_path / "merged", "hf", None, 2**30)
    name = "module.model.layers.0.mlp.up_proj.lora_A.weight"
    for folder, holds in (("own", True), ("merged", False)):
        made.init.weights = str(tmp_path / folder)
        weights = initial_weights(made, spec)
        assert weights is not None and weights.holds(name) == holds and weights.holds("module.lm_head.weight")
    assert torch.equal(initial_weights_of(made, spec, tmp_path / "own").whole(name, tensors[name].shape), tensors[name])


def initial_weights_of(made: Config, spec: Any, folder: Path) -> Any:
    made.init.weights = str(folder)
    return initial_weights(made, spec)


@needs("transformers")
def test_a_base_in_bf16_leaves_adapters_in_fp32(tmp_path: Path) -> None:
    made = config("llama", model__lora__base_dtype="bf16", dp=2, strategy__data__kind="zero1")
    plan = resolve(made)
    spec, narrow = plan.spec, [p.numel for p in plan.spec.parameters.values() if p.stored == "bfloat16"]
    network = registry.load("models", "hf", "network").build(made, spec, TABLE["fp32"])
    dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in network.named_parameters()}
    assert dtypes == {n: "float32" if p.is_adapter else "bfloat16" for n, p in spec.parameters.items()}
    weights, plain = prediction.memory(plan, 0).weights, resolve(config("llama", dp=2, strategy__data__kind="zero1"))
    assert prediction.memory(plain, 0).weights - weights == 2 * sum(narrow) > 0
    assert prediction.checkpoint_bytes(plain) - prediction.checkpoint_bytes(plan) == 2 * sum(narrow)
    tensors = {n: torch.randn(p.shape, dtype=getattr(torch, p.stored or "float32")) for n, p in spec.parameters.items()}
    stored = StoredModel(tmp_path, made, spec, LoadedWeights(tmp_path, tensors))
    export(stored, tmp_path / "own", "safetensors", None, 2**30)
    export(stored, tmp_path / "merged", "hf", None, 2**30)
    loaded = initial_weights_of(made, spec, tmp_path / "own")
    for name, tensor in tensors.items():
        assert torch.equal(loaded.whole(name, tensor.shape).to(tensor.dtype), tensor), name
    layer = "model.layers.0.mlp.up_proj"
    first, second = (tensors[f"module.{layer}.lora_{factor}.weight"] for factor in "AB")
    merged = initial_weights_of(config("llama"), spec, tmp_path / "merged").whole(f"module.{layer}.weight", (48, 32))
    assert torch.allclose(merged, tensors[f"module.{layer}.weight"].float() + 8.0 * second @ first, atol=1e-5)


@needs("peft")
def test_a_model_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    made = config("llama", model__lora__rank=None)
    spec = definitions.model(made).make(made, 96)
    with pytest.raises(ConfigError, match="there are no adapters"):
        export(StoredModel(tmp_path, made, spec, LoadedWeights(tmp_path, {})), tmp_path / "out", "peft", None, 2**30)
    assert not (tmp_path / "out").exists()


@needs("transformers")
def test_the_memory_of_adapters_is_planned_in_16_bit_with_recomputation() -> None:
    """No weight of some blocks has a gradient, and what rounds them is spread over their layers."""
    plan = resolve(config("llama", precision__name="bf16", recompute="full"))
    plain = resolve(config("llama", precision__name="fp32", recompute="full"))
    assert 0 < prediction.heaviest(plan, Config().cluster).total < prediction.heaviest(plain, Config().cluster).total


def test_adapters_are_advised_only_where_a_model_takes_them() -> None:
    assert with_adapters(narrow_config(NET)) == {"model.lora.rank": 8}
    assert with_adapters(config()) == {} == with_adapters(tiny_config({}))
