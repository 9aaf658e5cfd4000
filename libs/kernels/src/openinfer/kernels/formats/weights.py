"""Weights of linear layers from a checkpoint: plain or packed, one projection or several stacked in one weight."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels.errors import ContractError, UnsupportedQuantization
from openinfer.kernels.formats.fp8 import FP8_SCALE_MOST, block_codes, block_scales, row_codes, row_scales
from openinfer.kernels.formats.groups import Grouped, WeightPart, finite
from openinfer.kernels.formats.linear import Form, Linear
from openinfer.kernels.op.rounding import BEFOREHAND, FP4_BLOCK, SCALE_BLOCK, Coding
from openinfer.tensor import Conversion, Places, Tensor, TensorLoad, dtypes

Array = np.ndarray[Any, Any]


class Packing(NamedTuple):
    """How a checkpoint stores a packed weight: the ending of its scales' name (the weight's is ".weight"), their dtype,
    and whether values are FP4 pairs (int8) or float8_e4m3fn. by_row: float8 has scales of rows, not of blocks. whole:
    the checkpoint has one scale for all rows. made: the checkpoint's weights are plain, and become float8 by row while
    they are loaded. coding: how activations are quantised; None: they are not. modules: the packed ones; None: all that
    a model may pack."""

    scales: str
    dtype: np.dtype[Any]
    fp4: bool = False
    by_row: bool = False
    whole: bool = False
    made: bool = False
    coding: Coding | None = None
    modules: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        """The name that messages use."""
        return "FP8"

    @property
    def marker(self) -> str:
        """The ending of a name that only packed modules have; every weight's where weights become float8."""
        return self.scales

    @property
    def block(self) -> int:
        """Columns of a rank's part are a multiple of this."""
        return 16 if self.by_row else SCALE_BLOCK

    @property
    def block_rows(self) -> bool:
        """Whether a scale is of several rows."""
        return not self.by_row

    @property
    def kept(self) -> bool:
        """Whether weights stay packed."""
        return True


class Mixed(NamedTuple):
    """Packings of different modules of one checkpoint, and which one a module has by config.json. coded: whether
    activations may be quantised."""

    packings: tuple[Packing | Grouped, ...]
    pick: Callable[[str], Packing | Grouped | None]
    coded: bool = True

    @property
    def kind(self) -> str:
        """The name that messages use."""
        return " and ".join(dict.fromkeys(one.kind for one in self.packings))

    @property
    def block(self) -> int:
        """Columns of a rank's part are a multiple of this."""
        return math.lcm(*(one.block for one in self.packings))

    @property
    def made(self) -> bool:
        """Whether the checkpoint's weights are plain, and packed while they are loaded."""
        return False

    @property
    def kept(self) -> bool:
        """Whether weights stay packed."""
        return all(one.kept for one in self.packings)

    @property
    def modules(self) -> frozenset[str] | None:
        """The packed ones; None: they are not known yet."""
        return frozenset().union(*(one.modules or () for one in self.packings)) or None

    def of(self, module: str) -> Packing | Grouped | None:
        """The packing of a module: by its tensors once these are known, before by config.json."""
        if self.modules:
            own = next((one for one in self.packings if module in (one.modules or ())), None)
        else:
            own = self.pick(module)
        return own if own is None or self.coded else _uncoded(own)


AnyPacking = Packing | Grouped | Mixed
"""How a checkpoint stores its packed weights."""
AnyPart = WeightPart | tuple[str, int]
"""A module and its rows are enough where the weight is taken whole, or from its first row and column on."""

FP8_FLOAT32 = Packing(".weight_scale_inv", dtypes.float32, coding="block")
FP8_ROWS = Packing(".weight_scale", dtypes.float32, by_row=True)
FP8_TENSOR = Packing(".weight_scale", dtypes.float32, by_row=True, whole=True)
FP8_MADE = Packing(".weight", dtypes.float32, by_row=True, made=True, coding="token")
FP8_E8M0 = Packing(".scale", dtypes.float8_e8m0fnu)
FP4_E8M0 = Packing(".scale", dtypes.float8_e8m0fnu, fp4=True)


def scale_blocks(size: int) -> int:
    """Scale blocks of an FP8 weight along an axis."""
    return -(-size // SCALE_BLOCK)


def padded_rows(rows: int) -> int:
    """Rows of a weight that products take: a multiple of 16."""
    return -(-rows // 16) * 16


def form_of(layer: Any) -> tuple[Form, ...]:
    """The formats of the linear weights in a layer, a dataclass. The same kernels run layers of one form."""
    if isinstance(layer, Linear):
        return (layer.form,)
    parts = [getattr(layer, field.name) for field in fields(layer)]
    return tuple(form for part in parts if is_dataclass(part) for form in form_of(part))


@dataclass(slots=True)
class LinearPlaces(Places):
    """Places for linear layers. `expand`: FP8 and FP4 weights become the model's dtype while they are loaded. A model
    on a CPU does it once instead of at every step."""

    expand: bool = False
    _layers: list[TensorLoad] = field(default_factory=list)
    _ignored: list[str] = field(default_factory=list)
    dtypes: dict[str, tuple[np.dtype[Any], ...]] = field(default_factory=dict)
    """The dtypes that a tensor may have, where they are not those of its place or of plain weights."""
    single: set[str] = field(default_factory=set)
    """Tensors of one value, [] or [1]."""

    @property
    def layers(self) -> list[TensorLoad]:
        """Which rows and columns of a layer's weight lie where, by the name of a plain weight."""
        self.complete()
        return self._layers

    @property
    def ignored(self) -> list[str]:
        """Tensors that belong to packed weights and say nothing that is needed."""
        self.complete()
        return self._ignored

    def linear(
        self, *parts: AnyPart, columns: int, packing: AnyPacking | None = None, pad: int = 0
    ) -> Linear[Tensor]:
        """Projections stacked in one weight, with `pad` rows of zeros after them. FP8 blocks begin anew at each
        projection, so the rows of all but the last are whole blocks, or all have as many rows. Raises
        UnsupportedQuantization for others, and where some projections are packed and some are not."""
        rows, names = [part[1] for part in parts], ", ".join(part[0] for part in parts)
        packing = _of_all(packing, parts, names)
        fits = not any(size % SCALE_BLOCK for size in rows[:-1]) or rows[0] * len(rows) == sum(rows)
        if packing is not None and packing.block_rows and not fits:
            raise UnsupportedQuantization(
                f"{names}: FP8 blocks of {SCALE_BLOCK} rows do not fit projections of {rows} rows"
            )
        linear = self.empty((), rows, columns, packing, names, pad)
        self.fill(linear, parts, packing)
        if pad:
            self.pads.append(linear.weight[sum(rows) :])
            if linear.scales is not None and linear.scales.shape[-2] == linear.weight.shape[-2]:
                self.pads.append(linear.scales[sum(rows) :])
        if packing is None or packing.coding is None:
            return linear
        return replace(linear, coding=packing.coding, x_scale=self._x_scale(parts, packing))

    def _x_scale(self, parts: Sequence[AnyPart], packing: Packing | Grouped) -> Tensor | None:
        """The scale of the activations of stacked projections: the largest published one."""
        names = tuple(f"{part[0]}.input_scale" for part in parts)
        if packing.coding not in BEFOREHAND:
            return None
        scale = self.arena.alloc((1,), dtypes.float32, names[0])
        self.conversions.append(Conversion(names, scale, _largest))
        self.single |= set(names)
        self._ignored = [name for name in self._ignored if name not in names]
        return scale

    def table(
        self, module: str, rows: int, columns: int, packing: AnyPacking | None = None, row: int = 0
    ) -> Tensor:
        """An embedding or a head [rows, columns], from a module's row `row` on. A packed one becomes plain while it is
        loaded."""
        own = module_packing(packing, module)
        if own is None or own.made or not own.modules:
            return self.plain(module + ".weight", rows, columns, source=(_range(row, rows),))
        table = self.arena.alloc((rows, columns), self.dtype, module)
        self.fill(Linear(table), [WeightPart(module, rows, row)], own)
        return table

    def empty(
        self,
        count: tuple[int, ...],
        rows: Sequence[int],
        columns: int,
        packing: Packing | Grouped | None,
        name: str,
        pad: int = 0,
    ) -> Linear[Tensor]:
        """A weight [*count, sum of rows + pad, columns] that nothing fills yet."""
        alloc, total = self.arena.alloc, sum(rows) + pad
        if packing is None or self.expand or not packing.kept:
            return Linear(alloc((*count, total, columns), self.dtype, name), None)
        if isinstance(packing, Grouped):
            codes, scales = (
                alloc((*count, *shape), dtype, name) for shape, dtype in packing.form.empty(total, columns)
            )
            return Linear(codes, scales)
        if packing.fp4:
            weight = alloc((*count, total, columns // 2), dtypes.int8, name).view_as(dtypes.uint8)
            scales = alloc((*count, total, columns // FP4_BLOCK), packing.dtype, name)
        else:
            weight = alloc((*count, total, columns), dtypes.float8_e4m3fn, name)
            if packing.by_row:
                return Linear(weight, alloc((*count, total, 1), packing.dtype, name))
            scales = alloc((*count, sum(map(scale_blocks, rows)), scale_blocks(columns)), packing.dtype, name)
        return Linear(weight, scales if packing.dtype == dtypes.float32 else scales.view_as(dtypes.uint8))

    def fill(
        self, linear: Linear[Tensor], parts: Sequence[AnyPart], packing: Packing | Grouped | None
    ) -> None:
        """Projections one below the other in a weight [N, K]. Raises ContractError where a part of a packed weight does
        not begin with a block or group, and is not within one."""
        start, block, columns = 0, 0, linear.columns
        for one in parts:
            part = WeightPart(*one)
            rows = _range(start, part.rows)
            start += part.rows
            weight, scales = linear.weight[rows], linear.scales
            source = _range(part.row, part.rows), _range(part.column, columns)
            layer = TensorLoad(part.module + ".weight", weight, source)
            self._layers.append(layer)
            if packing is None:
                self.loads.append(layer)
            elif isinstance(packing, Grouped):
                self._grouped(part, columns, weight, None if scales is None else scales[rows], packing)
            elif packing.made and packing.by_row and scales is not None:
                self._quantise_rows(part, weight, scales[rows])
            elif packing.made and scales is not None:
                block += self.quantise(weight, scales[block:], layer.name, layer.source)
            else:
                block += self._blocks(part, weight, None if scales is None else scales[block:], packing)

    def quantise(self, weight: Tensor, scales: Tensor, name: str, source: tuple[slice, ...]) -> int:
        """Make FP8 in blocks of a part of a plain tensor. scales: from the part's first on. Returns their rows."""
        height = scale_blocks(weight.shape[0])
        for dst, convert in ((weight, block_codes), (scales[:height], block_scales)):
            self.conversions.append(Conversion((name,), dst, convert, (source,)))
        return height

    def _grouped(
        self, part: WeightPart, columns: int, weight: Tensor, scales: Tensor | None, packing: Grouped
    ) -> None:
        for one in packing.fill(part, columns, weight, scales):
            if isinstance(one, TensorLoad):
                self.loads.append(one)
            else:
                self.conversions.append(one)
        stored = (packing.codes, *packing.scales)
        self.dtypes |= {part.module + one.ending: (one.dtype,) for one in stored if one.dtype is not None}
        self.single |= {part.module + one.ending for one in stored if one.rows is one.columns is None}
        self._ignored += [part.module + ending for ending in (*packing.ignored, ".input_scale")]

    def _quantise_rows(self, part: WeightPart, weight: Tensor, scales: Tensor) -> None:
        """Make FP8 by row of a part of a plain tensor: of whole rows, so that all ranks have the same codes."""
        of_rows = ((_range(part.row, part.rows), slice(None)),)
        codes = functools.partial(row_codes, columns=_range(part.column, weight.shape[1]))
        for dst, convert in ((weight, codes), (scales, row_scales)):
            self.conversions.append(Conversion((part.module + ".weight",), dst, convert, of_rows))

    def _blocks(self, part: WeightPart, dst: Tensor, left: Tensor | None, packing: Packing) -> int:
        """left: the scales from the part's first on. Returns how many rows of them the part has."""
        module, rows, row, column = part
        pairs = 2 if packing.fp4 else 1  # columns of a byte
        columns = dst.shape[1] * (pairs if left is not None else 1)
        source = _range(row, rows), _range(column // pairs, columns // pairs)
        of_scales: tuple[slice, ...]
        if packing.by_row:
            self._ignored.append(module + ".input_scale")
        if packing.whole:
            of_scales = ()
            self.single.add(module + packing.scales)
        elif packing.by_row:
            of_scales = _range(row, rows), slice(0, 1)
        elif packing.fp4:
            of_scales = _range(row, rows), _range(column // FP4_BLOCK, columns // FP4_BLOCK)
        else:
            of_scales = _blocks_of(module, row, rows), _blocks_of(module, column, columns)
        weight, name = module + ".weight", module + packing.scales
        if left is None:
            self.conversions.append(Conversion((weight, name), dst, _expanded, (source, of_scales)))
            self.dtypes |= {weight: (dtypes.int8 if packing.fp4 else dtypes.float8_e4m3fn,)}
            self.dtypes |= {} if packing.dtype == dtypes.float32 else {name: (packing.dtype, dtypes.float32)}
            return 0
        height = rows if packing.fp4 or packing.by_row else scale_blocks(rows)
        scales = left[:height]
        self.loads.append(TensorLoad(weight, dst.view_as(dtypes.int8) if packing.fp4 else dst, source))
        if packing.dtype == dtypes.float32:  # checkpoints may hold them in bfloat16
            convert = functools.partial(_repeated, rows) if packing.whole else finite
            self.conversions.append(Conversion((name,), scales, convert, (of_scales,)))
        elif packing.fp4:
            self.loads.append(TensorLoad(name, scales.view_as(packing.dtype), of_scales))
        else:
            self.dtypes[name] = (packing.dtype, dtypes.float32)
            self.conversions.append(Conversion((name,), scales, _exponents, (of_scales,)))
        return height

    def expected(self) -> dict[str, tuple[tuple[int, ...], tuple[np.dtype[Any], ...]]]:
        """The tensors that a checkpoint must have, their shapes and possible dtypes (see Checkpoint.require). The
        places must be those of whole tensors, each in one part or several."""
        self.complete()
        found: dict[str, tuple[tuple[int, ...], tuple[np.dtype[Any], ...]]] = {}

        def add(name: str, dst: Tensor, source: tuple[slice, ...], kinds: tuple[np.dtype[Any], ...]) -> None:
            stops = [1] if name in self.single else [one.stop for one in source]
            shape = tuple(stops) if stops and None not in stops else dst.shape
            known, kinds = found.get(name, (shape, self.dtypes.get(name, kinds)))
            found[name] = tuple(map(max, known, shape)) if len(known) == len(shape) else known, kinds

        for name, dst, source in self.loads:
            rest = (slice(0, size) for size in dst.shape[len(source) :])
            add(name, dst, (*source, *rest), dtypes.WEIGHTS if dst.dtype in dtypes.WEIGHTS else (dst.dtype,))
        for conversion in self.conversions:
            for name, source in conversion.parts():
                add(name, conversion.dst, source, dtypes.WEIGHTS)
        return found


def without_coding(packing: AnyPacking | None) -> AnyPacking | None:
    """The packing with activations that are not quantised."""
    return packing._replace(coded=False) if isinstance(packing, Mixed) else packing and _uncoded(packing)


def _uncoded(packing: Packing | Grouped) -> Packing | Grouped:
    return packing._replace(coding=None) if isinstance(packing, Packing) else replace(packing, coding=None)


def packing_text(packing: AnyPacking) -> str:
    """What people are told of a packing, and of what becomes of activations."""
    each = packing.packings if isinstance(packing, Mixed) else (packing,)
    codings = [None if isinstance(packing, Mixed) and not packing.coded else one.coding for one in each]
    return "; ".join(
        f"{one.kind}, activations {'plain' if coding is None else f'quantised ({coding})'}"
        + ("" if one.kept else ", made plain while they are loaded")
        for one, coding in zip(each, codings, strict=True)
    )


def module_packing(packing: AnyPacking | None, module: str) -> Packing | Grouped | None:
    """The packing of this module's weight; None for a plain one."""
    if isinstance(packing, Mixed):
        return packing.of(module)
    packed = packing is None or packing.modules is None or module in packing.modules
    return packing if packed else None


def _of_all(packing: AnyPacking | None, parts: Sequence[AnyPart], names: str) -> Packing | Grouped | None:
    """The one packing of all parts."""
    kinds = dict.fromkeys(module_packing(packing, part[0]) for part in parts)
    if len(kinds) > 1:
        found = [one.kind for one in kinds if one is not None] + ["not"] * (None in kinds)
        raise UnsupportedQuantization(
            f"{names}: some are {' and some are '.join(found)}; they are run as one product"
        )
    (one,) = kinds
    return one


def _range(start: int, size: int) -> slice:
    return slice(start, start + size)


def _blocks_of(module: str, start: int, size: int) -> slice:
    """The FP8 blocks of rows or columns, which are whole blocks, or lie in one."""
    if start % SCALE_BLOCK and start % SCALE_BLOCK + size > SCALE_BLOCK:
        raise ContractError(
            f"{module}: {size} rows or columns from {start} on do not begin at an FP8 block of {SCALE_BLOCK}"
        )
    return _range(start // SCALE_BLOCK, scale_blocks(size))


def _largest(*scales: Array) -> Array:
    wide = [finite(scale) for scale in scales]
    if np.min(wide) <= 0:
        raise ValueError("a scale of activations is not above zero")
    return np.asarray(np.max(wide, axis=0))


def _repeated(rows: int, scale: Array) -> Array:
    return np.full((rows, 1), finite(scale).item(), np.float32)


def _exponents(scales: Array) -> Array:
    """The bytes of E8M0 scales, which some checkpoints hold in float32."""
    if scales.itemsize == 1:
        return scales.view(np.uint8)
    mantissa, exponent = np.frexp(finite(scales))
    if (mantissa != 0.5).any() or exponent.min() < -126 or exponent.max() > FP8_SCALE_MOST - 126:
        raise ValueError(f"a scale is no power of two up to 2^{FP8_SCALE_MOST - 127}")
    return np.asarray(exponent + 126, np.uint8)


def _expanded(weight: Array, scales: Array) -> Array:
    """A packed weight of a checkpoint in float32."""
    values = weight.view(np.uint8) if weight.dtype == np.int8 else weight
    if scales.size == 1:  # of the whole weight
        return np.asarray(values.astype(np.float32) * finite(scales).item())
    return Linear(values, finite(scales) if scales.itemsize > 1 else scales.view(np.uint8)).values()
