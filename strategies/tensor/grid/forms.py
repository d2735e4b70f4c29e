"""Choose how each pair of layers multiplies: the form that moves the fewest bytes among those that divide.

A pair is the column layers of a block and the row layer that reads them (`model_spec.Pair`). Between the two an
activation may be split otherwise than between blocks, so both forms are chosen together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product as combinations
from math import gcd, lcm

from parallelrun.models.moe.spec import inside_dim
from parallelrun.planner.model.model_spec import LayerSpec, ModelSpec, Pair, ParameterSpec
from parallelrun.planner.model.product import ActivationLayout, Product, Sizes, degree, num_panels, transfers
from parallelrun.planner.model.product import forms as products

KEPT = ("stationary_y", "stationary_x")  # forms that keep the layout of their input

Key = tuple[int, int, int, int]
Forms = tuple[str, str]


@dataclass(frozen=True)
class Misfit:
    """`size` (of heads, features or samples, at config key `key`, or of layer `key`) is not divisible by `parts`."""

    key: str
    size: int
    parts: int


def boundary_layout(sizes: Sizes) -> ActivationLayout:
    """Return the layout of activations between blocks: samples over the rows axes, features over the last axis."""
    *rows, features = sizes
    return ActivationLayout(tuple(rows), (features,))


def key_of(pair: Pair) -> Key:
    """The sizes that a pair's forms are kept by; 0 for the half that is missing."""
    columns, row = pair.columns, pair.row
    first = (columns[0].in_features, sum(layer.out_features for layer in columns)) if columns else (0, 0)
    return (*first, row.in_features, row.out_features) if row else (*first, 0, 0)


def make_product(form: str, outside: ActivationLayout) -> Product:
    """Return the product of a form (`products`), whose input has the layout `outside`."""
    product: Product = getattr(products, form)(outside)
    return product


def pair_products(forms: Forms, outside: ActivationLayout) -> tuple[Product, Product]:
    """(product of the column layers, of the row layer); for the half that is missing, that of the other."""
    first = make_product(forms[0] or forms[1], outside)
    return first, make_product(forms[1], first.y if forms[0] else outside) if forms[1] else first


def latent_product(layer: LayerSpec, spec: ModelSpec, boundary: ActivationLayout) -> Product | None:
    """The product of a layer that gives or reads latents, which are complete on every rank; None for any other."""
    layers = spec.latent_layers.get(layer.name, ())
    if not layers or spec.latent is None:
        return None
    if layer.layer_role == "column_parallel":
        reads_latent = spec.latent.q_rank is not None or layer is layers[-1]
        return products.from_latent(boundary) if reads_latent else None
    return products.to_latent(boundary) if layer.layer_role == "linear" else None


def candidates(pair: Pair, form: str, spec: ModelSpec) -> Iterator[Forms]:
    """Every pair of forms that could be, under `form`: `strategy.tensor.form`, or `cube` in 3D.

    Under `stationary_w` and `cube` the axes change roles, so that only complete pairs have them. In 2D, several column
    layers side by side could also be one after the other: only forms that keep the layout suit both, and latents.
    """
    swap = "cube" if form == "cube" else "stationary_w"
    can_swap = pair.columns and pair.row and (form == "cube" or len(pair.columns) == 1)
    can_swap = can_swap and pair.columns[0].name not in spec.latent_layers
    if form != swap or not can_swap:
        single = {"auto": KEPT, "stationary_w": KEPT, "cube": KEPT[:1]}.get(form, (form,))
        yield from combinations(single if pair.columns else ("",), single if pair.row else ("",))
    if can_swap and form in ("auto", swap):
        yield swap, swap


@dataclass(frozen=True)
class FormChoice:
    """The forms of a model's pairs on a grid. form: `strategy.tensor.form`, `cube` in 3D; sizes: of the axes, in mesh
    order.

    num_rows: rows of X in a microbatch; samples: of a microbatch (0: not known yet). compute, reduce: bytes of an
    element that moves, and of a weight gradient.
    """

    spec: ModelSpec
    form: str
    sizes: Sizes
    num_rows: int = 1
    samples: int = 0
    save_gathered: bool = True
    compute: int = 4
    reduce: int = 4

    @property
    def groups(self) -> dict[Key, list[Pair]]:
        """The model's pairs by their sizes; pairs of the same sizes may split their outputs differently."""
        groups: dict[Key, list[Pair]] = {}
        for pair in self.spec.distinct_pairs:
            groups.setdefault(key_of(pair), []).append(pair)
        return groups

    def choose(self) -> tuple[tuple[Key, Forms], ...]:
        """The forms of every pair of the model, by its sizes. Asked of sizes that fit some form."""
        choices = []
        for key, pairs in self.groups.items():
            # nothing fits only where nothing is checked: the matmul lesson
            possible = self.legal(pairs) or list(candidates(pairs[0], self.form, self.spec))
            choices.append((key, min(possible, key=lambda forms: self.volume(pairs[0], forms))))
        return tuple(choices)

    def legal(self, pairs: list[Pair]) -> list[Forms]:
        """The forms in which all of the pairs divide."""
        return [forms for forms in candidates(pairs[0], self.form, self.spec) if not self._misfits_of(pairs, forms)]

    def volume(self, pair: Pair, forms: Forms) -> float:
        """Bytes that a rank receives in the forward and backward pass of a microbatch through the pair."""
        total = 0.0
        for layer, product in self._products(pair, forms):
            shape = self.num_rows, layer.in_features, layer.out_features
            for transfer in transfers(product, *shape, self.sizes, save_gathered=self.save_gathered):
                total += transfer.received(self.sizes) * (self.reduce if transfer.operand == "dw" else self.compute)
        return total

    def sample_parts(self) -> int:
        """Into how many parts the samples of a microbatch are cut: the axes of rows, at their most, in any layer."""
        boundary = boundary_layout(self.sizes)
        parts = degree(boundary.rows, self.sizes)
        for pairs in self.groups.values():
            needed = []
            for forms in self.legal(pairs):
                columns, row = pair_products(forms, boundary)
                layouts = (columns.x, columns.y, row.x, row.y)
                needed.append(lcm(*(degree(layout.rows, self.sizes) for layout in layouts)))
            parts = lcm(parts, min(needed, default=1))
        return parts

    def head_parts(self) -> int:
        """Into how many parts the heads of attention are cut, in the forms that are chosen."""
        forms, boundary = dict(self.choose()), boundary_layout(self.sizes)
        for pair in self.spec.distinct_pairs:
            if any(parameter.heads for layer in pair.columns for parameter in layer.parameters):
                return degree(pair_products(forms[key_of(pair)], boundary)[0].y.features, self.sizes)
        return 1

    def misfits(self) -> list[Misfit]:
        """Return the model's sizes that do not divide, under the forms with the fewest of them."""
        boundary, features = boundary_layout(self.sizes), self.spec.boundary_shape[-1]
        misfits = [Misfit(self._key(features, "the model"), features, degree(boundary.features, self.sizes))]
        for pairs in self.groups.values():
            of_forms = [self._misfits_of(pairs, forms) for forms in candidates(pairs[0], self.form, self.spec)]
            fewest = min(of_forms, key=len)
            misfits += fewest
        alone = [layer for layer in self.spec.distinct_layers if layer.layer_role == "linear"]
        misfits += [
            misfit
            for layer in alone
            for misfit in self._misfits_in(
                layer, latent_product(layer, self.spec, boundary) or products.stationary_y(boundary)
            )
        ]
        for weight in [x.parameters[0] for x in self.spec.distinct_layers if x.layer_role == "expert"][:1]:  # all alike
            width = weight.shape[inside_dim(weight)]
            key = "model.ffn" if width == self.spec.ffn else "model.expert_ffn"
            misfits.append(Misfit(key, width, degree(boundary.features, self.sizes)))
        return [misfit for misfit in dict.fromkeys(misfits) if misfit.size % misfit.parts]

    def _products(self, pair: Pair, forms: Forms) -> list[tuple[LayerSpec, Product]]:
        boundary = boundary_layout(self.sizes)
        columns, row = pair_products(forms, boundary)
        opened = [(layer, latent_product(layer, self.spec, boundary) or columns) for layer in pair.columns]
        return opened + ([(pair.row, row)] if pair.row else [])

    def _misfits_of(self, pairs: list[Pair], forms: Forms) -> list[Misfit]:
        """Return all sizes of these pairs that do not divide under `forms`."""
        both = [product for pair in pairs for product in self._products(pair, forms)]
        return list(dict.fromkeys(misfit for layer, product in both for misfit in self._misfits_in(layer, product)))

    def _misfits_in(self, layer: LayerSpec, product: Product) -> list[Misfit]:
        """Return a layer's sizes that do not divide: heads, features in and out, rows and columns of W, samples."""
        rows, width = (degree(axes, self.sizes) for axes in product.weight.dims)
        inputs, outputs = (degree(layout.features, self.sizes) for layout in (product.x, product.y))
        parts = num_panels(product, self.sizes) if product.panels else max(inputs, width)
        misfits = [Misfit(self._key(layer.in_features, layer.name), layer.in_features, parts)]
        for parameter in layer.parameters:
            if parameter.heads and parameter.heads % outputs:
                which = "model.heads" if parameter.heads == self.spec.heads else "model.kv_heads"
                misfits.append(Misfit(which, parameter.heads, outputs))
            elif len(parameter.shape) == 2:
                misfits.append(self._output_misfit(layer, parameter, max(rows, outputs)))
        misfits += [Misfit("micro_batch", self.samples, degree(y.rows, self.sizes)) for y in (product.x, product.y)]
        return [misfit for misfit in misfits if misfit.size % misfit.parts]

    def _output_misfit(self, layer: LayerSpec, parameter: ParameterSpec, parts: int) -> Misfit:
        """Return the misfit of a weight's rows; of the rows of heads, in terms of the hidden size that gives them."""
        size = parameter.shape[0]
        if not parameter.heads or size % parts == 0 or self.spec.latent:
            return Misfit(self._key(size, layer.name), size, parts)
        if self.spec.head_dim:
            return Misfit("model.head_dim", self.spec.head_dim, parts // gcd(parts, parameter.heads))
        return Misfit("model.hidden", self.spec.hidden, self.spec.heads * (parts // gcd(parts, parameter.heads)))

    def _key(self, size: int, layer: str) -> str:
        """The config key that makes a number of features; the layer's name where no key does."""
        if self.spec.num_layers == 0:  # a user's module: its sizes are its own
            return layer
        keys = {self.spec.latent.q_rank: "model.q_lora_rank"} if self.spec.latent else {}
        return {**keys, self.spec.ffn: "model.ffn", self.spec.hidden: "model.hidden"}.get(size, layer)
