"""The kernels of a mixture of experts whose weights a product takes unchanged: bf16, float8 with float32
scales, INT4, INT8 or FP4.

The gate is part of the first product, and the experts' weights are part of the last sum.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openinfer.kernels.errors import ContractError
from openinfer.kernels.formats.fp4 import Fp4
from openinfer.kernels.formats.fp8 import Fp8
from openinfer.kernels.formats.int4 import Int4Groups
from openinfer.kernels.formats.linear import Linear, Plain
from openinfer.kernels.linear.few_bits import form_kernels, in_pairs, unpacks
from openinfer.kernels.moe import Pairs
from openinfer.kernels.moe.ring import launch_ring, ring_tile, takes_many
from openinfer.kernels.op.launch import Aligned, Arg, Launch, Scratch, depth, launch, power_of_two
from openinfer.kernels.op.op import tensors
from openinfer.kernels.op.target import Target, shared_bytes
from openinfer.tensor import Tensor, int32

_DEVICE = "openinfer.kernels.device.experts"
MANY = 64
"""The most places of a tile whose weights a product unpacks. Where tiles are as large, columns are arranged first."""
ROW_NUMBERS = 8192
"""Numbers of a float8 weight that a program of experts_rows keeps, twice as many in the first product."""
SUMMED_TOKENS, SUMMED_NUMBERS = 4, 16384
"""Tokens up to which the second product adds up its results (experts_sums), and the numbers of weights that a program
of it loads. So few tokens share few experts, and nearly all weights are read once. Where a program's columns are not
all real, only one token gains."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Rows of tokens, rows of weights and columns at a time. `tall`: the weights are the tall operand. `by_row`: the
    kernel is experts_rows, which multiplies without the tensor cores."""

    bm: int
    bn: int
    bk: int
    tall: bool
    warps: int = 4
    stages: int = 3
    by_row: bool = False


def expert_tile(target: Target, pairs: int, weight: Linear[Tensor], *, first: bool) -> ExpertTile:
    """The tile for a product with each expert's weights, two of them in the `first` product.

    Where experts get few rows each, reading the weights is all there is: small tiles, and more stages where there are
    few programs. Twice the mean fills a tile well enough, since the fullest experts get about that. Float8 is
    multiplied row by row where the other kernel has no program for three of four SMs.
    """
    experts, rows, k = weight.shape
    mean, alike, float8 = -(-pairs // experts), target.batch_invariant, isinstance(weight.form, Fp8)
    few, consumer = mean <= 32 and not alike, shared_bytes(target.arch) < 128 << 10
    bm = max(16, power_of_two(2 * mean)) if few else MANY
    blocks = rows // (1 + first) // 64
    if float8 and pairs * blocks * 4 < target.num_sms * 3 and k <= ROW_NUMBERS and not alike:
        columns = power_of_two(k)
        return ExpertTile(16, min(128, ROW_NUMBERS // columns), columns, True, 4, 1, by_row=True)
    if bits := _word_bits(weight):
        wide = bm == MANY and not first
        stages = 2 if consumer or (bits == 4 and bm == MANY) else 3
        return ExpertTile(bm, 128 if wide else 64, 0, True, 8 if wide else 4, stages)
    if weight.scales is not None:  # codes are unpacked in the product
        return ExpertTile(bm, 64, depth(k, 128) if float8 else 0, True, 4, 2 if consumer and float8 else 3)
    if few:
        idle = min(pairs, experts) * blocks < 2 * target.num_sms
        return ExpertTile(bm, 64, depth(k, 128), True, 4, 2 if consumer else 5 if idle else 3)
    if alike or consumer:
        return ExpertTile(64, 64, depth(k, 64), False, 4, 2 if consumer else 3)
    return ExpertTile(128, 64 if first else 128, depth(k, 64), False, 8, 3)


def _word_bits(weight: Linear[Tensor]) -> int:
    """Bits of a code where words of codes come from memory to their place in the operand, else 0."""
    form, whole = weight.form, weight.shape[-1] % 128 == 0
    return (8 if isinstance(form, Fp8) else 4 if isinstance(form, Fp4) else 0) if whole else 0


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """The arguments of one experts_add after the norm, and its tiles. `hidden` [T, H] is the normed x. `adds`: whether
    the sums are added onto `x`, or become its values."""

    target: Target
    x: Tensor
    hidden: Tensor | Scratch
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: Linear[Tensor]
    down: Linear[Tensor]
    adds: bool
    first: ExpertTile
    second: ExpertTile
    results: Scratch  # [pairs, H]

    def _ids(self, pairs: Pairs) -> int:
        """See Pairs.looked_through."""
        return pairs.looked_through(max(self.first.bm, self.second.bm))

    def _sums(self, pairs: Pairs) -> bool:
        """Whether the second product adds up its results."""
        k = self.down.shape[-1]
        columns, form = power_of_two(k), self.down.form
        fits = power_of_two(pairs.chosen) * columns <= SUMMED_NUMBERS and isinstance(form, Plain | Fp8)
        return fits and pairs.tokens <= (SUMMED_TOKENS if k == columns else 1) and self._ids(pairs) > 0

    def launches(self, pairs: Pairs) -> Iterator[Launch]:
        """The pairs in order unless the products look through them, the products, and their sums."""
        if not self._ids(pairs):
            yield self._sort(pairs)
        inter = self.gate_up.shape[1] // 2
        mlp, x, bits = Scratch((pairs.count, inter), self.x.dtype), self.hidden, _word_bits(self.gate_up)
        many = not self._ids(pairs) and takes_many(self.target, pairs.count, self.gate_up, self.down)
        arranged = many or (self.first.bm == MANY and bits > 0 and bits == _word_bits(self.down))
        if arranged:
            x = Scratch(self.hidden.shape, self.x.dtype)
            numbers, block = math.prod(x.shape), 2048
            args: dict[str, Arg] = {"out": x, "x": self.hidden, "numbers": Aligned(numbers)}
            constants = {"BITS": 16 if many else bits, "BLOCK": block}
            yield launch(_DEVICE, "arrange_rows", (-(-numbers // block),), args, constants, num_warps=8)
        if many:
            yield launch_ring(self.target, pairs, None, mlp, x, self.gate_up, first=True)
            yield launch_ring(self.target, pairs, None, self.results, mlp, self.down, first=False)
            yield self._add(pairs)
            return
        yield self._product(pairs, mlp, x, arranged, first=True)
        if self._sums(pairs):
            yield self._summed(pairs, mlp)
        else:
            yield self._product(pairs, self.results, mlp, arranged, first=False)
            yield self._add(pairs)

    def _sort(self, pairs: Pairs) -> Launch:
        """Fill `order` and `starts`."""
        args: dict[str, Arg] = {**pairs.sorted, "expert_ids": self.expert_ids, "pairs": pairs.count}
        grid, constants = (pairs.experts + 1,), {"BLOCK": pairs.sorted_at_once}
        return launch(_DEVICE, "sort_pairs", grid, args, constants, early=self.target.starts_early)

    def _summed(self, pairs: Pairs, hidden: Scratch) -> Launch:
        """The second product, which adds up its results."""
        weight, scales = self.down.weight, self.down.scales
        (n, k), choices = weight.shape[1:], power_of_two(pairs.chosen)
        columns = power_of_two(k)
        rows = min(128, SUMMED_NUMBERS // (choices * columns))
        args: dict[str, Arg] = {"x": self.x, "hidden": hidden, "weight": weight, "scales": scales or hidden}
        args |= {**tensors(self, "expert_ids", "expert_weights"), "N": Aligned(n), "K": Aligned(k)}
        constants = {"CHOSEN": pairs.chosen, "CHOICES": choices, "BN": rows, "BK": columns}
        constants |= {"SCALED": scales is not None, "ADDS": self.adds}
        early = self.target.early(pairs.tokens)
        return launch(_DEVICE, "experts_sums", (-(-n // rows), pairs.tokens), args, constants, early=early)

    def _add(self, pairs: Pairs) -> Launch:
        """The weighted results of a token, added up."""
        width = self.x.shape[1]
        block = min(1024, power_of_two(width))
        args: dict[str, Arg] = {"x": self.x, "results": self.results}
        args |= {**tensors(self, "expert_ids", "expert_weights"), "width": Aligned(width)}
        grid, constants = (pairs.tokens, -(-width // block)), {"CHOSEN": pairs.chosen, "BLOCK": block}
        constants["ADDS"] = self.adds
        return launch(_DEVICE, "add_chosen", grid, args, constants, early=self.target.starts_early)

    def _product(
        self, pairs: Pairs, out: Scratch, x: Tensor | Scratch, arranged: bool, *, first: bool
    ) -> Launch:
        """One of the two products; the first is that from the tokens' hidden rows."""
        tile, weight = (self.first, self.gate_up) if first else (self.second, self.down)
        n, k, ids = out.shape[1], x.shape[1], self._ids(pairs)
        if not ids and (ring := ring_tile(self.target, pairs.count, weight, first=first)):
            return launch_ring(self.target, pairs, ring, out, x, weight, first=first)
        own: dict[str, int | bool]
        module, form, scales = _DEVICE, weight.form, weight.scales or x
        args: Mapping[str, Arg] = {"weight": weight.weight, "scales": scales}
        if isinstance(form, Int4Groups):
            kernel, own = "experts_product_int4", {"GROUP": form.group}
            args = {"weight": weight.weight, "words": scales}
        elif (kernels := form_kernels(weight)) is not None:
            if not unpacks(form, k):
                raise ContractError(
                    f"experts are {form} with {k} columns; on a GPU they are a multiple of 128"
                )
            module, kernel = kernels.device, f"experts_product_{kernels.name}"
            own, args = kernels.of_products(self.target, tile.warps), kernels.args
            if kernels.paired:
                own, args = {**own, "ARRANGED": arranged}, kernels.words()
        elif tile.by_row:
            kernel, own = "experts_rows", {"BK": tile.bk}
        elif _word_bits(weight):
            kernel, own = "experts_product_float8", {"ARRANGED": arranged, "WARPS": tile.warps}
            own["PAIRS"] = in_pairs(self.target)
            args = {"weight": weight.weight.view_as(int32), "scales": scales}
        else:
            kernel, own = "experts_product", {"BK": tile.bk, "TALL": tile.tall}
            own["SCALED"] = weight.scales is not None
        found = dict.fromkeys(("order", "starts"), self.expert_ids) if ids else pairs.sorted
        args = {"out": out, "x": x, **args, **found, "N": Aligned(n), "K": Aligned(k)}
        own = {**own, "CHOSEN": pairs.chosen, "EXPERTS": pairs.experts, "BM": tile.bm, "BN": tile.bn}
        own |= {"E_BLOCK": power_of_two(pairs.experts), "FIRST": first, "FEW": pairs.few(tile.bm), "IDS": ids}
        grid, warps, stages = (-(-n // tile.bn), pairs.tiles(tile.bm)), tile.warps, tile.stages
        early = self.target.early(pairs.tokens)
        return launch(module, kernel, grid, args, own, num_warps=warps, num_stages=stages, early=early)
