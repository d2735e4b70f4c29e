"""alexnet, vgg16, resnets: published sizes, modules that hold what the specs list, FLOPs and memory as torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError
from parallelrun.base.precision import TABLE
from parallelrun.config import presets
from parallelrun.config.schema.run_schema import Config
from parallelrun.models import initialise
from parallelrun.models.network import Network
from parallelrun.planner.model import definitions
from parallelrun.planner.model.model_spec import ModelSpec
from tests.plans import tiny_config
from tests.vision import ALEXNET, BOTTLENECK, RESNET, VGG

TINY = {"resnet": RESNET, "bottleneck": BOTTLENECK, "alexnet": ALEXNET, "vgg": VGG}


def preset(name: str, dataset: str = "synthetic", image: int | None = None) -> Config:
    config = Config()
    for key, value in yaml.safe_load((presets.folder() / "model" / f"{name}.yaml").read_text()).items():
        setattr(config.model, key, value)
    config.dataset.name, config.model.image = dataset, image
    return config


def spec_of(config: Config, classes: int = 10) -> ModelSpec:
    return definitions.model(config).make(config, config.model.vocab or classes)


def build(config: Config, spec: ModelSpec, precision: str = "fp64") -> Network:
    return registry.load("models", config.model.name, "network").build(config, spec, TABLE[precision])


def built(overrides: dict[str, Any]) -> tuple[Network, ModelSpec]:
    config = tiny_config(overrides)
    spec = spec_of(config, 5)
    network = build(config, spec)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(initialise.logical(spec.parameters[name], seed=3))
    return network, spec


# Trained parameters and multiply-adds of torchvision's models on 224 x 224 images, which follow the papers.
@pytest.mark.parametrize(
    ("name", "parameters", "products"),
    [("alexnet", 61_100_840, 714e6), ("vgg16", 138_357_544, 15.47e9), ("resnet18", 11_689_512, 1.814e9),
     ("resnet50", 25_557_032, 4.089e9)],
)  # fmt: skip
def test_presets_have_the_published_size(name: str, parameters: int, products: float) -> None:
    spec = spec_of(preset(name))
    assert sum(p.numel for p in spec.parameters.values() if not p.frozen) == parameters
    assert spec.sample_shape == (3, 224, 224)
    assert spec.forward_flops == pytest.approx(2 * products, rel=0.005)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet18", "resnet50", "resnet"])
@pytest.mark.parametrize("dataset", ["digits", "synthetic"])
def test_modules_hold_exactly_what_the_spec_lists(name: str, dataset: str) -> None:
    config = preset(name, dataset)
    spec = spec_of(config)
    with torch.device("meta"):
        network = build(config, spec, "fp32")
        out = network.eval()(torch.empty(2, *spec.sample_shape))
    assert {key: (tuple(p.shape), not p.requires_grad) for key, p in network.named_parameters()} == {
        key: (p.shape, p.frozen) for key, p in spec.parameters.items()
    }
    assert out.shape == (2, spec.vocab) and not list(network.buffers())


@pytest.mark.parametrize("name", TINY)
def test_flops_and_kept_elements_are_what_torch_counts(name: str) -> None:
    """Per sample, block by block; BatchNorm's few numbers per channel are left out."""
    network, spec = built(TINY[name])
    samples = 8
    x = torch.randn(samples, *spec.sample_shape, dtype=torch.float64)
    kept_before = {x.untyped_storage().data_ptr()}
    alive = [x]
    for block in spec.blocks:
        module, kept = network.block(block.name), 0
        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

        def pack(saved: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            address = saved.untyped_storage().data_ptr()
            is_small = saved.dim() <= 1  # statistics of a BatchNorm
            if address not in kept_before | parameters and not is_small:  # noqa: B023
                kept_before.add(address)
                alive.append(saved)  # an address is not given away while it counts
                kept += saved.numel() * (2 if saved.dtype == torch.int64 else 1)
            return saved

        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x = module(x)
        assert counter.get_total_flops() == pytest.approx(samples * block.forward_flops)
        assert kept == pytest.approx(samples * block.saved_elements, rel=0.02), block.name
        if block is not spec.blocks[-1]:
            following = spec.blocks[spec.blocks.index(block) + 1]
            assert tuple(x.shape[1:]) == following.input_shape


def test_a_residual_block_is_what_the_paper_draws() -> None:
    """relu(F(x) + x), written out by hand for the first block."""
    network, _ = built(RESNET)
    block = network.block("stages.0.0")
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)

    def norm(y: torch.Tensor, layer: Any) -> torch.Tensor:
        return torch.nn.functional.batch_norm(y, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)

    y = torch.conv2d(x, block.convolution1.weight, padding=1)
    y = torch.conv2d(norm(y, block.norm1).relu(), block.convolution2.weight, padding=1)
    torch.testing.assert_close(block(x), (norm(y, block.norm2) + x).relu())


def test_images_are_as_large_as_the_dataset_or_the_model_says() -> None:
    sizes = {("resnet", "digits"): 8, ("resnet50", "cifar10"): 32, ("alexnet", "digits"): 64, ("vgg16", "mnist"): 32}
    for (model, dataset), size in sizes.items():
        assert spec_of(preset(model, dataset)).sample_shape[1:] == (size, size)
    assert spec_of(preset("resnet", "mnist", image=14)).sample_shape == (1, 14, 14)


def test_the_stem_spares_small_images() -> None:
    def first(image: int) -> tuple[int, ...]:
        return next(iter(spec_of(preset("resnet50", image=image)).parameters.values())).shape

    assert first(32) == (64, 3, 3, 3) and first(224) == (64, 3, 7, 7)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model.image": 4}, "model.image"),
        ({"model.stages": (2, 0)}, "model.stages"),
        ({"dataset.name": "pystdlib"}, "dataset"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(tiny_config({**RESNET, **changes}), 5)
    assert [problem.where for problem in caught.value.problems] == [where]
    assert caught.value.problems[0].suggestion


def test_classes_must_be_known() -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(tiny_config({**RESNET, "dataset.name": "imagefolder", "dataset.vocab": None}), 0)
    assert caught.value.problems[0].where == "model.vocab"
