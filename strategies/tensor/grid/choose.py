"""Choose how each pair of layers multiplies: the form that moves the fewest bytes among those that divide. Torch-free.

A pair is the column layers of a block and the row layer that reads them (`model_spec.Pair`). Between the two an
activation may be split otherwise than between blocks, so both forms are chosen together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd, lcm, prod

from parallelrun import product as products
from parallelrun.model_spec import LayerSpec, ModelSpec, Pair, ParameterSpec
from parallelrun.product import ActivationLayout, Product, Sizes, transfers

MAKE: dict[str, Callable[[ActivationLayout], Product]] = {
    "stationary_y": products.stationary_y,
    "stationary_x": products.stationary_x,
    "stationary_w": products.stationary_w,
    "summa": products.summa,
    "cube": products.cube,
}
KEPT = ("stationary_y", "stationary_x")  # forms that keep the layout of their input
FORMS = ("auto", *KEPT, "stationary_w", "summa")

Key = tuple[int, int, int, int]
Forms = tuple[str, str]
Groups = dict[Key, list[Pair]]


@dataclass(frozen=True)
class Choice:
    """What the forms depend on. kind: 2d | 2.5d | 3d; asked: `strategy.tensor.form`; sizes: of the axes, in mesh order.

    num_rows: rows of X in a microbatch; samples: of a microbatch (0: not known yet). compute, reduce: bytes of an
    element that moves, and of a weight gradient.
    """

    kind: str
    asked: str
    sizes: Sizes
    num_rows: int = 1
    samples: int = 0
    save_gathered: bool = True
    compute: int = 4
    reduce: int = 4


def boundary_layout(sizes: Sizes) -> ActivationLayout:
    """Return the layout of activations between blocks: samples over the rows axes, features over the last axis."""
    *rows, features = sizes
    return ActivationLayout(tuple(rows), (features,))


def degree(axes: Iterable[str], sizes: Sizes) -> int:
    """Return the number of parts into which those axes split a dim."""
    return prod(sizes.get(axis, 1) for axis in axes)


@dataclass(frozen=True)
class Misfit:
    """`size` (of heads, features or samples, at config key `key`, or of layer `key`) does not divide by `parts`."""

    key: str
    size: int
    parts: int


def key_of(pair: Pair) -> Key:
    """The sizes that a pair's forms are kept by; 0 for the half that is missing."""
    columns, row = pair.columns, pair.row
    first = (columns[0].in_features, sum(layer.out_features for layer in columns)) if columns else (0, 0)
    return (*first, row.in_features, row.out_features) if row else (*first, 0, 0)


def pair_products(forms: Forms, outside: ActivationLayout) -> tuple[Product, Product]:
    """(product of the column layers, of the row layer); for the half that is missing, that of the other."""
    first = MAKE[forms[0] or forms[1]](outside)
    return first, MAKE[forms[1]](first.y if forms[0] else outside) if forms[1] else first


def candidates(pair: Pair, kind: str, asked: str) -> Iterator[Forms]:
    """Every pair of forms that could be, under `strategy.tensor.form`."""
    if kind == "3d":
        if pair.columns and pair.row:
            yield "cube", "cube"
        else:
            yield _halves(pair, "stationary_y", "stationary_y")
        return
    alone = not (pair.columns and pair.row)
    single = KEPT if asked in ("auto", "stationary_w") else (asked,)
    if asked != "stationary_w" or alone or len(pair.columns) > 1:
        for first in single if pair.columns else ("",):
            for second in single if pair.row else ("",):
                yield first, second
    # several column layers side by side could also be one after the other: only forms that keep the layout suit both
    if asked in ("auto", "stationary_w") and not alone and len(pair.columns) == 1:
        yield "stationary_w", "stationary_w"


def _halves(pair: Pair, first: str, second: str) -> Forms:
    return first if pair.columns else "", second if pair.row else ""


def choose(spec: ModelSpec, choice: Choice) -> tuple[tuple[Key, Forms], ...]:
    """The forms of every pair of the model, by its sizes. Asked of sizes that fit some form."""
    found = []
    for key, pairs in distinct(spec).items():
        # nothing fits only where nothing is checked: the matmul lesson
        possible = legal(pairs, choice, spec) or list(candidates(pairs[0], choice.kind, choice.asked))
        found.append((key, min(possible, key=lambda forms: volume(pairs[0], forms, choice))))
    return tuple(found)


def legal(pairs: list[Pair], choice: Choice, spec: ModelSpec) -> list[Forms]:
    """The forms in which all of the pairs divide."""
    possible = candidates(pairs[0], choice.kind, choice.asked)
    return [forms for forms in possible if not misfits(pairs, forms, choice, spec)]


def fewest_misfits(pairs: list[Pair], choice: Choice, spec: ModelSpec) -> list[Misfit]:
    """What does not divide in the forms where least does not."""
    return min(
        (misfits(pairs, forms, choice, spec) for forms in candidates(pairs[0], choice.kind, choice.asked)), key=len
    )


def sample_parts(forms: Forms, choice: Choice) -> int:
    """Into how many parts the samples must divide, for a pair that multiplies so."""
    columns, row = pair_products(forms, boundary_layout(choice.sizes))
    return lcm(*(degree(layout.rows, choice.sizes) for layout in (columns.x, columns.y, row.x, row.y)))


def linear_misfits(choice: Choice, spec: ModelSpec) -> list[Misfit]:
    """What does not divide of the layers that multiply alone."""
    layers = [layer for layer in spec.distinct_layers if layer.layer_role == "linear"]
    product = products.stationary_y(boundary_layout(choice.sizes))
    return [misfit for layer in layers for misfit in layer_misfits(layer, product, choice, spec)]


def distinct(spec: ModelSpec) -> Groups:
    """Return the model's pairs by their sizes; pairs of the same sizes may split their outputs differently."""
    found: Groups = {}
    for pair in spec.distinct_pairs:
        found.setdefault(key_of(pair), []).append(pair)
    return found


def _with_products(pair: Pair, columns: Product, row: Product) -> list[tuple[LayerSpec, Product]]:
    return [(layer, columns) for layer in pair.columns] + ([(pair.row, row)] if pair.row else [])


def volume(pair: Pair, forms: Forms, choice: Choice) -> float:
    """Bytes that a rank receives in the forward and backward pass of a microbatch through the pair."""
    columns, row = pair_products(forms, boundary_layout(choice.sizes))
    total = 0.0
    for layer, product in _with_products(pair, columns, row):
        shape = choice.num_rows, layer.in_features, layer.out_features
        for transfer in transfers(product, *shape, choice.sizes, save_gathered=choice.save_gathered):
            total += transfer.received(choice.sizes) * (choice.reduce if transfer.operand == "dw" else choice.compute)
    return total


def misfits(pairs: list[Pair], forms: Forms, choice: Choice, spec: ModelSpec) -> list[Misfit]:
    """All that does not divide when these pairs multiply so."""
    columns, row = pair_products(forms, boundary_layout(choice.sizes))
    found = [
        misfit
        for pair in pairs
        for layer, product in _with_products(pair, columns, row)
        for misfit in layer_misfits(layer, product, choice, spec)
    ]
    return list(dict.fromkeys(found))


def layer_misfits(layer: LayerSpec, product: Product, choice: Choice, spec: ModelSpec) -> list[Misfit]:
    """What of one layer does not divide: heads, features in and out, rows and columns of its weights, samples."""
    sizes = choice.sizes
    rows, width = (degree(axes, sizes) for axes in product.weight.dims)
    found = []
    parts = max(degree(product.x.features, sizes), width)
    if product.panels:
        parts = products.num_panels(product, sizes)
    found.append(_feature(layer, layer.in_features, parts, spec))
    outputs = degree(product.y.features, sizes)
    for parameter in layer.parameters:
        if parameter.heads and parameter.heads % outputs:
            which = "model.heads" if parameter.heads == spec.heads else "model.kv_heads"
            found.append(Misfit(which, parameter.heads, outputs))
        elif len(parameter.shape) == 2:
            found.append(_outputs(layer, parameter, max(rows, outputs), spec))
    for axes in (product.x.rows, product.y.rows):
        found.append(Misfit("micro_batch", choice.samples, degree(axes, sizes)))
    return [misfit for misfit in found if misfit.size % misfit.parts]


def _outputs(layer: LayerSpec, parameter: ParameterSpec, parts: int, spec: ModelSpec) -> Misfit:
    """Of the rows of a weight; where they are those of heads, in terms of the hidden size that makes them."""
    if not parameter.heads or parameter.shape[0] % parts == 0:
        return _feature(layer, parameter.shape[0], parts, spec)
    return Misfit("model.hidden", spec.hidden, spec.heads * (parts // gcd(parts, parameter.heads)))


def _feature(layer: LayerSpec, size: int, parts: int, spec: ModelSpec) -> Misfit:
    return Misfit(size_key(size, layer.name, spec), size, parts)


def size_key(size: int, layer: str, spec: ModelSpec) -> str:
    """The config key that makes a number of features; the layer's name where no key does."""
    if spec.num_layers == 0:  # a user's module: its sizes are its own
        return layer
    return {spec.ffn: "model.ffn", spec.hidden: "model.hidden"}.get(size, layer)
