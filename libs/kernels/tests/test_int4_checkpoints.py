"""INT4 weights of checkpoints: what public packers wrote means what they say, in whole and in parts.

published_int4.safetensors holds four modules [32, 128] with groups of 32 columns. Their tensors came from
PackedQuantizationCompressor.compress of compressed-tensors 0.20.0 (symmetric, and with zero points), pack_original and
convert_gptq_v2_to_v1_format_module of gptqmodel 7.7.0, and WQLinear_GEMM.from_linear of autoawq 0.2.9, under torch
2.13.0. `values` are float32: what these packages' own decompress and dequantize_gemm gave; for GPTQ the rounded weights
that went in.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from openinfer.kernels import ContractError
from openinfer.kernels.formats.gptq import gptq_packing
from openinfer.kernels.formats.groups import WeightPart
from openinfer.kernels.formats.int4 import int4_packing
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.formats.weights import LinearPlaces
from openinfer.tensor import Arena, Checkpoint, CheckpointError, Device, Stream, bfloat16, int32, uint8

GPTQ = {style: gptq_packing(4, 32, v2=style == "gptq_v2", ordered=False) for style in ("gptq", "gptq_v2")}
FORMATS = {
    "symmetric": int4_packing("compressed-tensors", 32),
    "zeros": int4_packing("compressed-tensors", 32, zeros=True),
    "gptq": GPTQ["gptq"],
    "awq": int4_packing("awq", 32),
}
ROWS, COLUMNS = 32, 128


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    shutil.copy(Path(__file__).with_name("published_int4.safetensors"), folder / "model.safetensors")
    with Checkpoint(folder) as checkpoint:
        yield checkpoint


def places():
    return LinearPlaces(Arena(Device("cpu"), 1 << 20), bfloat16)


def values(linear):
    assert linear.weight.dtype == uint8
    assert linear.scales.dtype == int32
    return Linear(linear.weight.numpy(), linear.scales.numpy()).values()


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_packers_own(published, name):
    p = places()
    linear = p.linear((name, ROWS), columns=COLUMNS, packing=FORMATS[name])
    p.load(published, Stream(Device("cpu")))
    want = published.array(f"{name}.values")
    np.testing.assert_array_equal(values(linear), want)
    assert len(np.unique(want)) > 500  # scales differ


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("row", "rows", "column", "columns"), [(16, 16, 0, 128), (0, 32, 64, 64), (8, 16, 32, 96)]
)
def test_a_part_of_a_projection(published, name, row, rows, column, columns):
    p = places()
    linear = p.linear(WeightPart(name, rows, row, column), columns=columns, packing=FORMATS[name])
    p.load(published, Stream(Device("cpu")))
    want = published.array(f"{name}.values")[row : row + rows, column : column + columns]
    np.testing.assert_array_equal(values(linear), want)


@pytest.mark.parametrize("name", FORMATS)
def test_projections_are_stacked_and_padded(published, name):
    p = places()
    linear = p.linear(
        WeightPart(name, 16), WeightPart(name, 32), columns=COLUMNS, packing=FORMATS[name], pad=16
    )
    p.load(published, Stream(Device("cpu")))
    want = published.array(f"{name}.values")
    np.testing.assert_array_equal(values(linear), np.concatenate([want[:16], want, np.zeros_like(want[:16])]))


@pytest.mark.parametrize("name", FORMATS)
def test_the_tensors_that_must_be_there(published, name):
    p = places()
    p.linear((name, ROWS), columns=COLUMNS, packing=FORMATS[name])
    for tensor, (shape, dtypes) in p.expected().items():
        assert published.info(tensor).shape == shape
        assert published.info(tensor).dtype in dtypes
    said = {f"{name}.values", *p.expected(), *p.ignored}
    assert {one for one in published.names if one.startswith(f"{name}.")} <= said


def converted(packing, **arrays):
    """A module's conversions, applied to these arrays."""
    packed = packing.found_in([f"m.{name}" for name in arrays], frozenset(["m"]))
    linear = places().linear(WeightPart("m", 8), columns=64, packing=packed)
    for one in packed.fill(WeightPart("m", 8), 64, linear.weight, linear.scales):
        yield one.convert(*(arrays[name.removeprefix("m.")] for name in one.names))


def test_the_second_version_of_gptq_has_other_zero_points(published):
    """qzeros are the zero points themselves; each version refuses the other's."""
    arrays = {name: published.array(f"gptq.{name}") for name in ("qweight", "scales", "g_idx")}
    stored = {"gptq": published.array("gptq.qzeros"), "gptq_v2": published.array("gptq_v2.qzeros")}
    found = {style: list(converted(GPTQ[style], **arrays, qzeros=zeros)) for style, zeros in stored.items()}
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    for style, other in (("gptq", "gptq_v2"), ("gptq_v2", "gptq")):
        with pytest.raises(ValueError, match="a zero point is not 8"):
            list(converted(GPTQ[style], **arrays, qzeros=stored[other]))


def test_columns_in_the_order_of_activations_are_refused(published):
    arrays = {name: published.array(f"gptq.{name}") for name in ("qweight", "scales", "qzeros")}
    shuffled = published.array("gptq.g_idx")[::-1]
    with pytest.raises(ValueError, match=r"ordered by activations \(g_idx\)"):
        list(converted(GPTQ["gptq"], **arrays, g_idx=shuffled))


@pytest.mark.parametrize(("row", "column"), [(4, 0), (0, 16)])
def test_a_part_that_cuts_a_group_is_refused(row, column):
    with pytest.raises(ContractError, match=r"m: rows or columns .* are no whole groups of"):
        places().linear(WeightPart("m", 16, row, column), columns=64, packing=FORMATS["awq"])


def test_an_error_names_the_checkpoint_and_the_tensor(published, tmp_path):
    """A scale that is not finite."""
    raw = bytearray((published.directory / "model.safetensors").read_bytes())
    at = published.info("awq.scales").offset
    raw[at : at + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "model.safetensors").write_bytes(bytes(raw))
    p = places()
    p.linear(("awq", ROWS), columns=COLUMNS, packing=FORMATS["awq"])
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"'awq\.scales': a scale is not finite"),
    ):
        p.load(checkpoint, Stream(Device("cpu")))
