from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer.tensor import (
    Arena,
    Device,
    DeviceError,
    DTypeError,
    IndexRangeError,
    ShapeError,
    Stream,
    Tensor,
    TensorError,
    bfloat16,
    dtypes,
    float8_e4m3fn,
)

CPU, NULL, CUDA = Device("cpu"), Device("null"), Device("cuda")


def _iota(*shape: int) -> tuple[Tensor, np.ndarray[Any, Any]]:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return Tensor.from_numpy(array), array


@st.composite
def _indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    index: list[Any] = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-7, 7)
        index.append(draw(st.slices(0) | st.builds(slice, bound, bound) | st.integers(-n - 1, n)))
    return shape, tuple(i if not isinstance(i, slice) else slice(i.start, i.stop) for i in index)


@settings(max_examples=150, deadline=None)
@given(_indexed())
def test_indexing_is_numpys(case: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
    shape, index = case
    tensor, array = _iota(*shape)
    try:
        want = array[index]
    except IndexError:
        with pytest.raises(IndexRangeError):
            tensor[index]
        return
    got = tensor[index]
    assert got.shape == want.shape
    assert (got.numpy() == want).all()
    assert got.is_contiguous == want.flags.c_contiguous
    assert (got.numel, got.ndim, got.nbytes) == (want.size, want.ndim, want.nbytes)


def test_views_share_memory_owner_and_name() -> None:
    with Arena(CPU, 4096) as arena:
        whole = arena.alloc((4, 6), "float32", "w")
    whole.zero_()
    part = whole[1:3, 2:4]
    part.copy_from(np.ones((2, 2), np.float32))
    assert part.owner is whole.owner
    assert part.name == "w"
    assert whole.numpy().sum() == 4
    assert [row.shape for row in whole] == [(6,)] * 4  # IndexRangeError ends the iteration


def test_indexing_refuses_what_is_no_view() -> None:
    tensor, _ = _iota(4, 6)
    with pytest.raises(ShapeError, match="step 2 on axis 0"):
        tensor[::2]
    with pytest.raises(ShapeError, match="step -1"):
        tensor[:, ::-1]
    with pytest.raises(IndexRangeError, match="3 indices for the 2 axes"):
        tensor[0, 0, 0]
    with pytest.raises(IndexError, match=r"index 6 on axis 1.*-6\.\.5"):
        tensor[0, 6]


def test_reshape() -> None:
    tensor, array = _iota(4, 6)
    assert (tensor.reshape(2, 12).numpy() == array.reshape(2, 12)).all()
    assert tensor.reshape((3, -1)).shape == (3, 8)
    assert tensor.reshape([24]).strides == (1,)
    assert tensor[:1].reshape(6).shape == (6,)
    assert Tensor.empty((0, 3), "int8", CPU).reshape(-1).shape == (0,)
    assert Tensor.empty((0, 3), "int8", CPU).reshape(3, -1).shape == (3, 0)
    assert tensor[0, 0].reshape(()).shape == ()
    assert tensor[0, 0].reshape(1, 1).shape == (1, 1)
    for bad in ((5, 5), (5, -1), (-1, -1), (-4, -6), (0, -1), (), (-24,)):
        with pytest.raises(ShapeError):
            tensor.reshape(bad)
    with pytest.raises(ShapeError, match="contiguous"):
        tensor[:, :3].reshape(12)


def test_view_as() -> None:
    tensor, array = _iota(4, 6)
    assert (tensor.view_as("uint8").numpy() == array.view(np.uint8)).all()
    assert (tensor.view_as("int64").numpy() == array.view(np.int64)).all()
    assert tensor.view_as(np.float32).shape == (4, 6)
    assert tensor[0, 0].view_as("float32").shape == ()
    with pytest.raises(ShapeError, match="whole elements"):
        tensor[0, :3].view_as("int64")
    with pytest.raises(ShapeError, match="whole elements"):
        tensor[0, 0].view_as("int8")
    with pytest.raises(ShapeError, match="whole elements"):  # 4-byte aligned only
        tensor.reshape(-1)[1:5].view_as("int64") if tensor.ptr % 8 == 0 else tensor.reshape(-1)[:4].view_as(
            "int64"
        )
    with pytest.raises(ShapeError, match="contiguous"):
        tensor[:, 1:3].view_as("uint8")


def test_contiguity_ignores_axes_of_one_and_nothing() -> None:
    assert Tensor(256, (1, 5), dtypes.int8, NULL, (99, 1)).is_contiguous
    assert Tensor(256, (0, 5), dtypes.int8, NULL, (1, 7)).is_contiguous
    assert not Tensor(256, (2, 5), dtypes.int8, NULL, (6, 1)).is_contiguous


@pytest.mark.parametrize("dtype", [d for d in dtypes._TAGS if d != dtypes.bool_])
def test_every_dtype_round_trips_on_cpu(dtype: Any) -> None:
    tensor = Tensor.empty((2, 3), dtype, CPU)
    values = np.array([[0.5, 1, 2], [4, 8, 16]]).astype(dtype)
    tensor.copy_from(values)
    assert tensor.numpy().dtype == dtype
    assert (tensor.numpy().view(np.uint8) == values.view(np.uint8)).all()


def test_numpy_view_outlives_everything() -> None:
    view = Tensor.empty((1000,), "int64", CPU).numpy()
    view[:] = 7
    _ = [Tensor.empty((1000,), "int64", CPU).zero_() for _ in range(4)]
    assert (view == 7).all()


def test_from_numpy_shares_and_keeps() -> None:
    array = np.zeros((3, 4), bfloat16)
    tensor = Tensor.from_numpy(array[:, 1:], "x")
    tensor.copy_from(np.ones((3, 3), bfloat16))
    assert array[:, 1:].astype(np.float32).sum() == 9
    assert tensor.strides == (4, 1)
    assert repr(tensor) == "Tensor('x', bfloat16[3, 3], cpu)"


def test_from_numpy_refuses() -> None:
    array = np.zeros((3, 4), np.int32)
    with pytest.raises(ShapeError, match="negative"):
        Tensor.from_numpy(array[::-1])
    with pytest.raises(DTypeError, match="complex"):
        Tensor.from_numpy(np.zeros(3, np.complex64))
    record = np.zeros(3, np.dtype([("a", "i4"), ("b", "i1")], align=False))
    with pytest.raises(ShapeError, match="multiple"):
        Tensor.from_numpy(record["a"])
    with pytest.raises(DTypeError, match="given list; pass a numpy array"):
        Tensor.from_numpy([1, 2])  # type: ignore[arg-type]
    array.flags.writeable = False
    with pytest.raises(ShapeError, match=r"read-only.*copy"):
        Tensor.from_numpy(array)


@pytest.mark.parametrize("device", [CPU, NULL, CUDA])
def test_copies_are_checked_on_every_device(fake: Any, device: Device) -> None:
    tensor = Tensor.empty((2, 3), "float32", device)
    with pytest.raises(ShapeError, match=r"\(3, 2\)"):
        tensor.copy_from(np.zeros((3, 2), np.float32))
    with pytest.raises(DTypeError, match="float64"):
        tensor.copy_from(np.zeros((2, 3)))
    with pytest.raises(DTypeError, match="bfloat16"):
        tensor.copy_from(Tensor.empty((2, 3), bfloat16, CPU))


def test_null_has_no_data() -> None:
    tensor = Tensor.empty((2, 3), "float32", NULL, "w")
    tensor.zero_()
    tensor.copy_from(np.zeros((2, 3), np.float32))
    tensor.copy_from(tensor)
    for read in (tensor.numpy, tensor.__dlpack__, tensor.__dlpack_device__):
        with pytest.raises(DeviceError, match="null"):
            read()
    with pytest.raises(DeviceError, match="null device has no data"):
        Tensor.empty((2, 3), "float32", CPU).copy_from(tensor)


def test_cuda_round_trip(fake: Any) -> None:
    values = np.random.default_rng(0).standard_normal((8, 16)).astype(bfloat16)
    tensor = Tensor.empty((8, 16), bfloat16, CUDA)
    tensor.copy_from(values)
    assert (tensor.numpy() == values).all()
    assert (tensor[2:4].numpy() == values[2:4]).all()
    host = Tensor.empty((8, 16), bfloat16, CPU)
    host.copy_from(tensor)
    assert (host.numpy() == values).all()
    tensor[0].zero_()
    other = Tensor.empty((8, 16), bfloat16, CUDA)
    other.copy_from(tensor)
    assert (other.numpy()[1:] == values[1:]).all()
    assert not other.numpy()[0].any()
    assert fake.live()[2] == 0  # synchronous copies leave no stream behind


def test_cuda_copies_with_a_stream_do_not_wait(fake: Any) -> None:
    tensor = Tensor.empty((4,), "int32", CUDA)
    back = np.zeros(4, np.int32)
    with Stream(CUDA) as stream:
        tensor.zero_(stream)
        tensor.copy_from(np.arange(4, dtype=np.int32), stream)
        Tensor.from_numpy(back).copy_from(tensor, stream)
        assert fake.count("cuStreamSynchronize") == fake.count("cuCtxSynchronize") == 0
        assert back.tolist() == [0, 0, 0, 0]
    assert back.tolist() == [0, 1, 2, 3]


def test_synchronous_reads_see_the_work_of_every_stream(fake: Any) -> None:
    tensor = Tensor.empty((4,), "int32", CUDA)
    busy = Stream(CUDA)
    tensor.zero_(busy)
    assert tensor.numpy().tolist() == [0, 0, 0, 0]


def test_cuda_refusals(fake: Any) -> None:
    tensor = Tensor.empty((4, 4), "int32", CUDA)
    array = np.zeros((4, 4), np.int32)
    for call in (
        lambda: tensor[:, :2].copy_from(array[:, :2].copy()),
        lambda: tensor[:, :2].numpy(),
        lambda: tensor[:, :2].zero_(),
        lambda: tensor.copy_from(array.T),
    ):
        with pytest.raises(ShapeError, match="contiguous"):
            call()
    with Stream(CPU) as stream, pytest.raises(DeviceError, match="cpu cannot order work on cuda:0"):
        tensor.copy_from(array, stream)
    with pytest.raises(DeviceError, match="from cuda:1 to cuda:0"):
        tensor.copy_from(Tensor.empty((4, 4), "int32", Device("cuda", 1)))


def test_errors_are_catchable_as_one() -> None:
    with pytest.raises(TensorError):
        Tensor.empty((-1,), "int8", CPU)
    with pytest.raises(TensorError):
        Tensor.empty((1,), "int7", CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bfloat16, float8_e4m3fn, dtypes.float32, dtypes.bool_])
def test_real_round_trip(gpu: Device, dtype: Any) -> None:
    values = (np.random.default_rng(0).standard_normal((64, 1000)) > 0).astype(dtype)
    with Arena(gpu, 1 << 20) as arena, Stream(gpu) as stream:
        x, y = arena.alloc(values.shape, dtype), arena.alloc(values.shape, dtype)
        x.copy_from(values, stream)
        y.copy_from(x, stream)
        y[0].zero_(stream)
        stream.synchronize()
        assert (y.numpy()[1:].view(np.uint8) == values[1:].view(np.uint8)).all()
        assert not y.numpy()[0].any()
        assert (x.numpy().view(np.uint8) == values.view(np.uint8)).all()
