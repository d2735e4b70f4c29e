"""The spec of a user's module, read off the module itself on the meta device: the one spec that needs torch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from parallelrun import user_code
from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, Problem, with_article
from parallelrun.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

OWN = Initialiser("own")
CHECKED_PARAMETERS = 20_000_000  # above, the blocks are believed to be the module: the check would take seconds


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the module that `model.source` builds over `vocab` token ids or classes. Raises ConfigError naming
    the layer or block that breaks the model contract."""
    import torch

    from parallelrun.models.module import network, slices, source

    with torch.device("meta"):
        module = source.build(config, vocab)
        if (config.pp or 1) > 1 and not config.model.blocks:
            what = f"pp={config.pp} cuts between blocks, and model.blocks names none of {config.model.source}"
            raise ConfigError(Problem(what, "model.blocks", network.suggested_blocks(module), kind="undefined"))
        source.apply_roles(module, config, torch.float32)
    module.eval()
    names = network.block_names(module, config.model.blocks, str(config.model.source)) if config.model.blocks else [""]
    kind, shape = _samples(config, module)
    blocks, boundary, output = _measure(module, names, kind, shape)
    _check_output(config, vocab, output)
    if config.model.blocks:
        _check_chain(config, vocab, names, kind, shape, sum(block.num_parameters for block in blocks))
    _check_split(config, vocab, kind, shape)
    num_parameters = sum(block.num_parameters for block in blocks)
    if config.strategy.tensor.sequence_parallel and kind == "tokens" and num_parameters <= CHECKED_PARAMETERS:
        slices.check(config, vocab, shape[0])
    return ModelSpec(
        name=config.model.preset,
        kind=kind,
        blocks=blocks,
        sample_shape=shape,
        boundary_shape=boundary,
        targets_per_sample=prod(output[1:-1]),
        vocab=output[-1],
        hidden=boundary[-1],
        heads=int(getattr(module, "heads", 0)),
        kv_heads=int(getattr(module, "kv_heads", getattr(module, "heads", 0))),
        seq=shape[0] if kind == "tokens" else 0,
        norm=_norm(module),
        tied=_tied(module),
    )


def _norm(module: nn.Module) -> str:
    """The kind of its norms, by which their traffic under a grid is predicted; that of the first where they differ."""
    from parallelrun.models import layers

    return next((part.kind for part in module.modules() if isinstance(part, layers.Norm)), "layernorm")


def _samples(config: Config, module: nn.Module) -> tuple[str, tuple[int, ...]]:
    """(kind, shape of one sample): token ids for a module that embeds, else features, images where it has 3 dims."""
    from torch import nn

    from parallelrun.models import layers

    if any(isinstance(part, (nn.Embedding, layers.Embedding)) for part in module.modules()):
        return "tokens", (config.model.seq,)
    shape: Any = getattr(module, "sample_shape", (config.model.hidden,))
    return "images" if len(shape) == 3 else "features", tuple(int(size) for size in shape)


def _inputs(kind: str, shape: tuple[int, ...], num_samples: int, device: str) -> Tensor:
    import torch

    if kind == "tokens":
        return torch.zeros((num_samples, *shape), dtype=torch.int64, device=device)
    return torch.ones((num_samples, *shape), device=device)


def _measure(
    module: nn.Module, names: list[str], kind: str, shape: tuple[int, ...]
) -> tuple[tuple[BlockSpec, ...], tuple[int, ...], tuple[int, ...]]:
    """Run one sample through the blocks on meta: (blocks with FLOPs and kept elements, boundary and output shapes)."""
    from torch.utils.flop_counter import FlopCounterMode

    from parallelrun.models.module import network

    x = _inputs(kind, shape, 1, "meta")
    network.let_gradients_through(module)  # as under plans that need it: elsewhere less is kept
    listed: set[int] = set()
    blocks, boundaries = [], {}
    for name in names:
        block = module.get_submodule(name)
        kept = _Kept(block)
        with FlopCounterMode(display=False) as counter, kept:
            x = _call(name or "module", block, x)
        layers = tuple(_layers(module, name, listed))
        blocks.append(BlockSpec(_full(name), "block", layers, float(counter.get_total_flops()), float(kept.elements)))
        boundaries[name] = tuple(x.shape[1:])
    between = [boundaries[name] for name in names[:-1]]
    for name, found in zip(names, between):
        if found != between[0]:
            what = f"block {name} gives {found} per sample, block {names[0]} gives {between[0]}: stages pass one shape"
            raise ConfigError(Problem(what, "model.blocks", kind="undefined"))
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in listed]
    if missing:
        what = f"parameter {missing[0]} belongs to none of the blocks {', '.join(names)}"
        raise ConfigError(Problem(what, "model.blocks", network.suggested_blocks(module), kind="undefined"))
    return tuple(blocks), between[0] if between else tuple(x.shape[1:]), tuple(x.shape)


class _Kept:
    """Counts the elements that autograd keeps while it is entered, each storage once, parameters left out."""

    def __init__(self, block: nn.Module):
        import torch

        self.elements = 0
        self._seen = {id(parameter) for parameter in block.parameters()}
        self._storages: list[Any] = []  # kept alive, so that no two have one address
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)

    def _pack(self, saved: Tensor) -> Tensor:
        if id(saved) not in self._seen and not saved.is_leaf and not any(saved is one for one in self._storages):
            self._storages.append(saved)
            self.elements += saved.numel()
        return saved

    def __enter__(self) -> _Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _call(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """block(x), or ConfigError naming the block."""
    from torch import Tensor

    try:
        out = block(x)
    except Exception as error:  # the user's code: whatever it raises
        what = f"block {name} fails on an input of shape {tuple(x.shape)}: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, " <- ".join(reversed(user_code.frames(error))) or "model.source")) from error
    if not isinstance(out, Tensor):
        what = f"block {name} gives {with_article(type(out).__name__)}; a block maps one tensor to one tensor"
        raise ConfigError(Problem(what, "model.blocks", kind="undefined"))
    return out


def _layers(module: nn.Module, block: str, listed: set[int]) -> list[LayerSpec]:
    """The layers of one block that hold parameters or have a role, in module order; adds to `listed` what it lists."""
    from parallelrun.models.module import source

    out = []
    first = {id(parameter): _full(name) for name, parameter in module.named_parameters()}
    for inner, part in module.get_submodule(block).named_modules():
        name = _full(".".join(filter(None, (block, inner))))
        role = getattr(part, "layer_role", "")
        parameters, tied = [], None
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) in listed:
                tied = first[id(parameter)]
                continue
            listed.add(id(parameter))
            parameters.append(
                ParameterSpec(f"{name}.{key}", tuple(parameter.shape), OWN, role, frozen=not parameter.requires_grad)
            )
        if parameters or tied or role:
            weight = next((tuple(p.shape) for p in part.parameters(recurse=False) if p.dim() == 2), (0, 0))
            sizes = weight if role == "embedding" else weight[::-1]
            possible = tuple(other for other, kinds in source.ROLES.items() if isinstance(part, kinds))
            out.append(LayerSpec(name, role, sizes[0], sizes[1], tuple(parameters), tied, possible))
    return out


def _tied(module: nn.Module) -> tuple[tuple[str, str], ...]:
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            pairs.append((_full(name), _full(original)))
    return tuple(pairs)


def _full(name: str) -> str:
    """One-device name of what the module calls `name`."""
    from parallelrun.models.module.network import ROOT

    return f"{ROOT}.{name}" if name else ROOT


def _check_output(config: Config, vocab: int, output: tuple[int, ...]) -> None:
    if len(output) < 2 or output[-1] < vocab:
        needed = f"logits (1, [seq,] vocab) with vocab >= {vocab} are needed"
        what = f"{config.model.source} gives shape {output} for one sample; {needed}"
        raise ConfigError(Problem(what, "model.source", "take vocab as an argument of the function", kind="arithmetic"))


def _check_chain(
    config: Config, vocab: int, names: list[str], kind: str, shape: tuple[int, ...], num_parameters: int
) -> None:
    """The chain of the blocks must be the module's forward: tried on real numbers where that is quick."""
    import torch

    from parallelrun.models.module import network, source

    if num_parameters > CHECKED_PARAMETERS:
        return
    with torch.device("cpu"), torch.no_grad():
        module = source.build(config, vocab).eval()
        x = _inputs(kind, shape, 2, "cpu")
        whole, chained = module(x), network.chain(module, names, x)
    if whole.shape != chained.shape or not torch.allclose(whole, chained, rtol=1e-4, atol=1e-5):
        what = f"the blocks {', '.join(names)}, one after the other, do not compute what {config.model.source} computes"
        raise ConfigError(Problem(what, "model.blocks", "every module of forward, in order", kind="undefined"))


def _check_split(config: Config, vocab: int, kind: str, shape: tuple[int, ...]) -> None:
    """With roles, forward must work on a part of the columns: tried on meta with every split layer cut.

    By tp; by 2 under a grid, where columns are split over some of its axes only: what works on halves works on parts.
    """
    import torch

    from parallelrun.models.module import network, source

    tp = config.tp or 2
    tp = tp if tp == 1 or config.strategy.tensor.kind == "megatron" else 2
    if tp == 1 or not set(config.model.roles.values()) & {"columns", "row"}:
        return
    with torch.device("meta"):
        module = source.build(config, vocab)
        source.apply_roles(module, config, torch.float32)
    whole = network.dropped_shapes(module.eval(), _inputs(kind, shape, 1, "meta"))
    entered = [""]
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        if not _cut(part, tp):
            return  # does not divide: the tensor strategy says so with the nearest legal degrees
    try:
        cut = network.dropped_shapes(module, _inputs(kind, shape, 1, "meta"))
    except Exception as error:
        what = (
            f"with its columns and rows cut by tp={tp}, {config.model.source} fails at or after {entered[-1]}: {error}"
        )
        fix = "no global sizes in forward: heads by unflatten(-1, (-1, head_dim)); columns are read by row layers only"
        raise ConfigError(Problem(what, "model.roles", fix, kind="undefined")) from error
    for name, before in whole.items():
        if before[:-1] != cut[name][:-1]:
            what = f"dropout {name} acts on something whose rows, not columns, tp={tp} cuts ({before} to {cut[name]})"
            fix = "drop before heads are split or after they are joined; probabilities of attention cannot be dropped"
            raise ConfigError(Problem(what, "model.roles", fix, kind="undefined"))


def _cut(part: nn.Module, tp: int) -> bool:
    """Cut the weights of a column or row layer on meta; False if they do not divide."""
    import torch
    from torch import nn

    role = getattr(part, "layer_role", "")
    dim = {"columns": 0, "row": 1}.get(role)
    if dim is None:
        return True
    for key, parameter in list(part.named_parameters(recurse=False)):
        if parameter.dim() <= dim:
            continue
        if parameter.size(dim) % tp:
            return False
        size = list(parameter.shape)
        size[dim] //= tp
        setattr(part, key, nn.Parameter(torch.empty(size, device="meta")))
    return True
