"""Weights of linear layers: where each tensor of a checkpoint goes, stacked, packed, expanded and padded."""

import json
import struct

import numpy as np
import pytest

from openinfer.kernels import ContractError
from openinfer.kernels.formats.fp8 import row_codes, row_scales
from openinfer.kernels.formats.groups import WeightPart
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.formats.weights import (
    FP4_E8M0,
    FP8_E8M0,
    FP8_FLOAT32,
    FP8_ROWS,
    FP8_TENSOR,
    LinearPlaces,
)
from openinfer.tensor import (
    Arena,
    Checkpoint,
    CheckpointError,
    Device,
    Stream,
    Tensor,
    bfloat16,
    float8_e4m3fn,
    float8_e8m0fnu,
    float32,
    uint8,
)

TAGS = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
}


@pytest.fixture
def checkpoint(tmp_path, rng):
    """checkpoint(**arrays): these tensors, opened."""
    opened = []

    def write(arrays):
        header, at = {}, 0
        for name, array in arrays.items():
            place = [at, at + array.nbytes]
            header[name] = {
                "dtype": TAGS[array.dtype.name],
                "shape": list(array.shape),
                "data_offsets": place,
            }
            at += array.nbytes
        raw = json.dumps(header).encode()
        data = b"".join(array.tobytes() for array in arrays.values())
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
        opened.append(Checkpoint(tmp_path))
        return opened[-1]

    yield write
    for made in opened:
        made.close()


@pytest.fixture
def places():
    """places(dtype, **options): on the CPU."""
    return lambda dtype=bfloat16, **options: LinearPlaces(Arena(Device("cpu"), 1 << 22), dtype, **options)


def codes(rng, *shape):
    return rng.integers(0, 120, shape, np.uint8).view(float8_e4m3fn)


def of(packing, rng, name, n, k):
    """A module's tensors in a checkpoint. Scales differ by row and by column of blocks."""
    blocks = (-(-n // 128), -(-k // 128))
    if packing.fp4:
        scales = rng.integers(120, 130, (n, k // 32), np.uint8).view(float8_e8m0fnu)
        return {
            f"{name}.weight": rng.integers(-128, 128, (n, k // 2)).astype(np.int8),
            f"{name}.scale": scales,
        }
    exponents = 2 * np.arange(blocks[0])[:, None] + np.arange(blocks[1])
    if packing == FP8_FLOAT32:
        return {
            f"{name}.weight": codes(rng, n, k),
            f"{name}.weight_scale_inv": (2.0**exponents).astype(bfloat16),
        }
    scales = (120 + exponents).astype(np.uint8).view(float8_e8m0fnu)
    return {f"{name}.weight": codes(rng, n, k), f"{name}.scale": scales}


def meant(tensors, name, packing):
    """The float32 values of a module."""
    weight, scales = tensors[f"{name}.weight"], tensors[name + packing.scales]
    scales = scales.astype(np.float32) if packing == FP8_FLOAT32 else scales.view(np.uint8)
    return Linear(weight.view(np.uint8) if packing.fp4 else weight, scales).values()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("packing", [FP8_FLOAT32, FP8_E8M0, FP4_E8M0], ids=["float32", "e8m0", "fp4"])
@pytest.mark.parametrize(("first", "second", "k"), [(256, 256, 256), (128, 80, 384)])
def test_packed_projections_are_stacked(checkpoint, places, rng, packing, expand, first, second, k):
    """A grid of scales is square where a projection is 256 x 256: its transpose must show."""
    tensors = of(packing, rng, "a", first, k) | of(packing, rng, "b", second, k)
    p = places(float32 if expand else bfloat16, expand=expand)
    linear = p.linear(("a", first), ("b", second), columns=k, packing=packing, pad=16)
    p.load(checkpoint(tensors), Stream(Device("cpu")))
    weight = linear.weight.numpy()
    assert weight.shape[0] == first + second + 16
    if expand:
        assert linear.scales is None
        got = weight[: first + second]
    else:
        scales = linear.scales.numpy()
        assert scales.dtype == (float32 if packing == FP8_FLOAT32 else uint8)
        parts = (
            (scales[: first // 128], scales[first // 128 :])
            if not packing.fp4
            else (scales[:first], scales[first:])
        )
        halves = (weight[:first], weight[first : first + second])
        rows = [
            Linear(w, s[: len(w)] if packing.fp4 else s).values() for w, s in zip(halves, parts, strict=True)
        ]
        got = np.concatenate(rows)
    want = np.concatenate([meant(tensors, name, packing) for name in ("a", "b")])
    np.testing.assert_array_equal(got, want)
    assert not weight[first + second :].view(np.uint8).any()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize(
    "packing", [FP8_FLOAT32, FP8_E8M0, FP4_E8M0, None], ids=["float32", "e8m0", "fp4", "plain"]
)
@pytest.mark.parametrize(
    ("row", "rows", "column", "columns"), [(256, 128, 128, 256), (320, 64, 0, 384), (64, 32, 64, 64)]
)
def test_a_part_of_a_projection(checkpoint, places, rng, packing, expand, row, rows, column, columns):
    """Whole blocks, or a part within one."""
    if packing is None:
        tensors = {"a.weight": rng.standard_normal((384, 384)).astype(bfloat16)}
        whole = tensors["a.weight"].astype(float32)
    else:
        tensors = of(packing, rng, "a", 384, 384)
        whole = meant(tensors, "a", packing)
    p = places(float32 if expand else bfloat16, expand=expand)
    linear = p.linear(WeightPart("a", rows, row, column), columns=columns, packing=packing)
    p.load(checkpoint(tensors), Stream(Device("cpu")))
    scales = None if linear.scales is None else linear.scales.numpy()
    want = whole[row : row + rows, column : column + columns]
    np.testing.assert_array_equal(Linear(linear.weight.numpy(), scales).values(), want)


def test_rows_are_rounded_to_the_nearest_code(rng):
    """As a conversion of numpy rounds them: ties to even, small values to subnormal codes, the largest to 448."""
    halves = np.arange(256, dtype=np.uint8)[:127].view(float8_e4m3fn).astype(float32)
    ties = np.concatenate([(halves[1:] + halves[:-1]) / 2, halves[1:], [448, 0]])
    near = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])[None]
    row = np.clip(np.concatenate([near, -near], axis=1), -448, 448).astype(float32)  # its scale is 1
    wide = np.concatenate(
        [row, (rng.standard_normal((700, row.shape[1])) * 10.0 ** rng.integers(-6, 3, (700, 1)))]
    )
    for weight in (wide.astype(float32), wide.astype(bfloat16)):
        scales = row_scales(weight)
        for columns in (slice(0, row.shape[1]), slice(16, 48)):
            got = row_codes(weight, columns=columns)
            want = (weight[:, columns].astype(float32) / scales).astype(float8_e4m3fn)
            np.testing.assert_array_equal(got.view(uint8), want.view(uint8))
    assert scales[0] == 1


def test_a_part_that_blocks_do_not_fit_is_refused(places):
    with pytest.raises(
        ContractError, match="a: 192 rows or columns from 192 on do not begin at an FP8 block"
    ):
        places().linear(WeightPart("a", 192, 192), columns=128, packing=FP8_E8M0)


def test_experts_are_filled_one_by_one(checkpoint, places, rng):
    tensors = {}
    for expert in range(3):
        tensors |= of(FP8_FLOAT32, rng, f"{expert}.gate", 128, 256) | of(
            FP8_FLOAT32, rng, f"{expert}.up", 128, 256
        )
    p = places()
    linear = p.empty((3,), [128, 128], 256, FP8_FLOAT32, "experts")
    for expert in range(3):
        p.fill(linear[expert], [(f"{expert}.gate", 128), (f"{expert}.up", 128)], FP8_FLOAT32)
    p.load(checkpoint(tensors), Stream(Device("cpu")))
    assert sorted(p.names()) == sorted(tensors)
    got = Linear(linear.weight.numpy(), linear.scales.numpy()).values(2)
    for expert in range(3):
        parts = [meant(tensors, f"{expert}.{name}", FP8_FLOAT32) for name in ("gate", "up")]
        np.testing.assert_array_equal(got[expert], np.concatenate(parts))


def test_plain_weights_and_vectors(checkpoint, places, rng):
    tensors = {
        "a.weight": rng.standard_normal((5, 32)).astype(bfloat16),
        "b.weight": rng.standard_normal((6, 32)).astype(bfloat16),
        "norm": rng.standard_normal(32).astype(bfloat16),
    }
    p = places()
    stacked, gain = (
        p.linear(("a", 5), ("b", 6), columns=32, pad=5),
        p.converted("norm", 32, convert=lambda w: 1 + w),
    )
    half = p.converted("norm", 16, convert=lambda w: 1 + w, source=(slice(16, 32),))
    p.load(checkpoint(tensors), Stream(Device("cpu")))
    assert stacked.scales is None
    np.testing.assert_array_equal(
        stacked.weight.numpy()[:11], np.concatenate([tensors["a.weight"], tensors["b.weight"]])
    )
    assert not stacked.weight.numpy()[11:].any()
    np.testing.assert_array_equal(gain.numpy(), (1 + tensors["norm"]).astype(float32))
    np.testing.assert_array_equal(half.numpy(), gain.numpy()[16:])


def test_a_tensor_in_several_parts_is_expected_whole(places):
    p = places()
    p.linear(WeightPart("fc", 16), columns=32)
    p.linear(WeightPart("fc", 16, column=32), columns=16)
    p.plain("bias", 16, dtype=float32, source=(slice(16, 32),))
    assert {name: shape for name, (shape, _) in p.expected().items()} == {
        "fc.weight": (16, 48),
        "bias": (32,),
    }


def test_values_that_a_conversion_refuses_are_an_error_of_the_checkpoint(checkpoint, places):
    def refuse(array):
        raise ValueError("names expert 9; there are 8")

    p = places()
    p.converted("table", 4, convert=refuse)
    with pytest.raises(CheckpointError, match="'table': names expert 9; there are 8"):
        p.load(checkpoint({"table": np.zeros(4, np.float32)}), Stream(Device("cpu")))


@pytest.mark.parametrize(
    ("packing", "shape", "expand"),
    [
        (FP8_FLOAT32, (2, 2), False),
        (FP8_FLOAT32, (2, 2), True),
        (FP8_ROWS, (256, 1), False),
        (FP8_TENSOR, (1,), False),
    ],
)
def test_scales_that_are_not_finite_are_refused(checkpoint, places, rng, packing, shape, expand):
    scales = np.ones(shape, float32)
    scales[-1] = np.nan
    p = places(float32, expand=expand)
    p.linear(("a", 256), columns=256, packing=packing)
    tensors = {"a.weight": codes(rng, 256, 256), "a" + packing.scales: scales}
    with pytest.raises(CheckpointError, match=r"tensor 'a.*': a scale is not finite"):
        p.load(checkpoint(tensors), Stream(Device("cpu")))


@pytest.mark.parametrize("value", [0, -0.5, np.inf])
def test_scales_of_activations_are_above_zero_and_finite(checkpoint, places, rng, value):
    p = places()
    p.linear(("a", 16), ("b", 16), columns=32, packing=FP8_TENSOR._replace(coding="tensor"))
    tensors = {}
    for name, scale in (("a", 0.5), ("b", value)):
        tensors[f"{name}.weight"] = codes(rng, 16, 32)
        tensors[f"{name}.weight_scale"] = np.ones(1, float32)
        tensors[f"{name}.input_scale"] = np.full(1, scale, float32)
    with pytest.raises(CheckpointError, match=r"input_scale': a scale (of activations is|is) not"):
        p.load(checkpoint(tensors), Stream(Device("cpu")))


@pytest.mark.parametrize("by_row", [True, False])
def test_the_last_rows_of_a_weight_keep_their_scales_and_coding(rng, by_row):
    scales = rng.random((384, 1) if by_row else (3, 2)).astype(np.float32)
    weight = rng.standard_normal((384, 256)).astype(float8_e4m3fn)
    whole = Linear(Tensor.from_numpy(weight), Tensor.from_numpy(scales), "token")
    last = whole.rows(128)
    assert last.coding == "token"
    wanted = Linear(weight, scales).values()[128:]
    np.testing.assert_array_equal(Linear(last.weight.numpy(), last.scales.numpy()).values(), wanted)
    plain = Linear(Tensor.from_numpy(wanted), None).rows(64)
    np.testing.assert_array_equal(plain.weight.numpy(), wanted[64:])


@pytest.mark.parametrize("expand", [False, True])
def test_exponents_may_be_float32(rng, checkpoint, places, expand):
    """Repacked experts of DeepSeek-V4 have them so; other numbers than powers of two are refused."""
    numbers = codes(rng, 256, 256)
    scales = (2.0 ** rng.integers(-9, 3, (2, 2))).astype(np.float32)
    found = checkpoint({"m.weight": numbers, "m.scale": scales})
    p = places(float32 if expand else bfloat16, expand=expand)
    linear = p.linear(("m", 256), columns=256, packing=FP8_E8M0)
    found.require(p.expected(), ignore=p.ignored)
    p.load(found, Stream(Device("cpu")))
    got = Linear(linear.weight.numpy(), None if linear.scales is None else linear.scales.numpy()).values()
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)
    np.testing.assert_array_equal(got, numbers.astype(np.float32) * wide)
    if not expand:
        with pytest.raises(CheckpointError, match=r"'m\.scale': a scale is no power of two up to 2\^7"):
            p.load(
                checkpoint({"m.weight": numbers, "m.scale": scales * np.float32(3)}), Stream(Device("cpu"))
            )
