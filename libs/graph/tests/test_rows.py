from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from openinfer.graph import Field, FieldError, GraphError, Rows
from openinfer.tensor import Arena, Device, Stream, bfloat16, float32, int32, int64, uint32

FIELDS = [
    Field("lengths", (9,)),
    Field("tables", (9, 5)),
    Field("temperatures", (9,), float32),
    Field("seeds", (9, 2), uint32),
    Field("state", (9,), device_written=True),
]


def make(device: Device, stream: Stream, **options: Any) -> Rows:
    return Rows(Arena(device, 1 << 20), FIELDS, stream, **options)


def scatter(rows: Rows) -> list[int]:
    """What the caller's kernel does with a delta. Gives the indices that the delta names."""
    writes = rows.writes.numpy()
    count, capacity = int(writes[0]), (len(writes) - 1) // 2
    index = writes[1 : 1 + count]
    rows.words.numpy()[index] = writes[1 + capacity : 1 + capacity + count]
    return [int(i) for i in index]


@pytest.fixture
def stream() -> Stream:
    return Stream(Device("cpu"))


@pytest.fixture
def rows(stream: Stream) -> Any:
    made = make(Device("cpu"), stream, capacity=64)
    yield made
    made.close()


def upload(rows: Rows, stream: Stream) -> list[int]:
    """Bring the device up to date. Gives the sizes of the deltas."""
    sizes = []
    for delta in rows.uploads(stream):
        sizes.append(len(delta.places))
        assert len(scatter(rows)) == len(delta.places)
    return sizes


def test_fields_start_as_zeros_in_their_shape_and_dtype(rows: Rows) -> None:
    for field in FIELDS:
        tensor = rows[field.name]
        assert (tensor.shape, tensor.dtype) == (field.shape, field.dtype)
        assert not tensor.numpy().any()


def test_fields_do_not_overlap_and_start_at_256_bytes(rows: Rows) -> None:
    ends = []
    for field in FIELDS:
        tensor = rows[field.name]
        assert tensor.ptr % 256 == 0
        ends.append((tensor.ptr, tensor.ptr + tensor.nbytes))
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert end <= start
    assert ends[-1][1] <= rows.words.ptr + rows.words.nbytes


def test_the_device_sees_a_change_when_the_delta_is_applied(rows: Rows, stream: Stream) -> None:
    rows.set("lengths", 3, 17)
    rows.write("tables", 2, [7, 8], offset=3)
    assert not rows["lengths"].numpy().any()
    assert upload(rows, stream) == [3]
    assert rows["lengths"].numpy().tolist() == [0, 0, 0, 17, 0, 0, 0, 0, 0]
    assert rows["tables"].numpy()[2].tolist() == [0, 0, 0, 7, 8]
    assert np.count_nonzero(rows.words.numpy()) == 3


def test_nothing_changed_uploads_nothing(rows: Rows, stream: Stream) -> None:
    assert upload(rows, stream) == []
    rows.set("lengths", 1, 4)
    rows.write("tables", 1, [1, 2, 3])
    assert upload(rows, stream) == [4]
    rows.set("lengths", 1, 4)
    rows.write("tables", 1, [1, 2, 3])
    assert upload(rows, stream) == []
    rows.write("tables", 1, [1, 9, 3])
    assert upload(rows, stream) == [1]


def test_a_field_the_device_writes_is_sent_even_if_the_host_saw_no_change(rows: Rows, stream: Stream) -> None:
    rows.set("state", 2, 1)
    assert upload(rows, stream) == [1]
    rows["state"].numpy()[2] = 5  # a kernel did this
    rows.set("state", 2, 1)
    rows.write("state", 4, [0, 0])
    assert upload(rows, stream) == [3]
    assert rows["state"].numpy()[2] == 1


def test_a_field_of_one_axis_is_written_across_slots(rows: Rows, stream: Stream) -> None:
    rows.write("lengths", 6, [1, 2, 3])
    upload(rows, stream)
    assert rows["lengths"].numpy()[6:].tolist() == [1, 2, 3]


def test_other_dtypes_keep_their_bits(rows: Rows, stream: Stream) -> None:
    seeds = np.array([0xDEADBEEF, 0x80000000], np.uint32)
    rows.set("temperatures", 1, 0.7)
    rows.set("temperatures", 2, -0.0)
    rows.write("temperatures", 3, [float("inf"), float("nan")])
    rows.write("seeds", 4, seeds)
    upload(rows, stream)
    temperatures = rows["temperatures"].numpy()
    assert temperatures[1] == np.float32(0.7)
    assert np.signbit(temperatures[2])
    assert np.isinf(temperatures[3])
    assert np.isnan(temperatures[4])
    np.testing.assert_array_equal(rows["seeds"].numpy()[4], seeds)


def test_the_last_of_several_writes_to_a_word_holds(rows: Rows, stream: Stream) -> None:
    rows.set("lengths", 1, 1)
    rows.set("lengths", 1, 2)
    rows.write("lengths", 0, [5, 3])
    rows.set("lengths", 1, 4)
    upload(rows, stream)
    assert rows["lengths"].numpy()[:2].tolist() == [5, 4]


def test_more_changes_than_a_delta_holds_are_split(stream: Stream) -> None:
    rows = make(Device("cpu"), stream, capacity=10)
    table = np.arange(1, 46).reshape(9, 5)
    for slot in range(9):
        rows.write("tables", slot, table[slot])
    assert upload(rows, stream) == [10, 10, 10, 10, 5]
    np.testing.assert_array_equal(rows["tables"].numpy(), table)
    rows.close()


@pytest.mark.parametrize("seed", range(5))
def test_random_histories_end_in_what_was_written(seed: int, stream: Stream) -> None:
    rng = random.Random(seed)
    rows = make(Device("cpu"), stream, capacity=rng.choice([3, 16, 100]), ring=rng.choice([1, 3]))
    expected = {field.name: np.zeros(field.shape, field.dtype) for field in FIELDS}
    for _ in range(300):
        name = rng.choice(["lengths", "tables", "temperatures", "state"])
        array = expected[name]
        slot = rng.randrange(9)
        if array.ndim == 1 and rng.random() < 0.5:
            array[slot] = rng.randrange(4)
            rows.set(name, slot, float(array[slot]))
        else:
            room = 5 if array.ndim == 2 else 9 - slot
            offset = rng.randrange(room) if array.ndim == 2 else 0
            values = [rng.randrange(4) for _ in range(rng.randrange(room - offset + 1))]
            target = array[slot, offset:] if array.ndim == 2 else array[slot:]
            target[: len(values)] = values
            rows.write(name, slot, values, offset)
        if rng.random() < 0.2:
            upload(rows, stream)
    upload(rows, stream)
    for name, array in expected.items():
        np.testing.assert_array_equal(rows[name].numpy(), array, err_msg=name)
    rows.close()


def test_a_dtype_may_be_a_name() -> None:
    assert Field("a", (2,), "float32") == Field("a", (2,), np.dtype(np.float32))  # type: ignore[arg-type]


def test_memory_can_be_planned_on_null() -> None:
    arena = Arena(Device("null"), None)
    rows = Rows(arena, FIELDS, Stream(Device("null")), capacity=16)
    assert rows["tables"].shape == (9, 5)
    assert arena.used >= rows.words.nbytes + rows.writes.nbytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([Field("a", (2,)), Field("a", (3,))], "'a' is declared twice"),
        ([Field("a", (2,), int64)], "'a' is int64; row fields are 4 bytes an element"),
        ([Field("a", (2,), bfloat16)], "'a' is bfloat16"),
    ],
)
def test_bad_fields_are_refused(fields: list[Field], message: str, stream: Stream) -> None:
    with pytest.raises(FieldError, match=message):
        Rows(Arena(Device("cpu"), 1 << 20), fields, stream)


def test_bad_writes_are_refused_and_change_nothing(rows: Rows, stream: Stream) -> None:
    with pytest.raises(FieldError, match="no row field 'length'; there are lengths, tables"):
        rows.set("length", 0, 1)
    for slot in (-1, 9):
        with pytest.raises(FieldError, match="lengths"):
            rows.set("lengths", slot, 1)
        with pytest.raises(FieldError, match="tables"):
            rows.write("tables", slot, [1])
    with pytest.raises(FieldError, match="one element of one axis"):
        rows.set("tables", 0, 1)
    with pytest.raises(FieldError, match=r"3 values at \[1, 3\] do not fit 'tables'"):
        rows.write("tables", 1, [1, 2, 3], offset=3)
    with pytest.raises(FieldError, match="tables"):
        rows.write("tables", 1, [1], offset=-1)
    with pytest.raises(FieldError, match="4 values"):
        rows.write("lengths", 6, [1, 2, 3, 4])
    assert issubclass(FieldError, GraphError)
    assert upload(rows, stream) == []


@pytest.mark.gpu
def test_deltas_arrive_on_a_gpu(gpu: Device) -> None:
    with Stream(gpu) as stream:
        rows = make(gpu, stream, capacity=10, ring=2)
        seen = np.zeros(rows.words.shape, np.int32)
        for turn in range(50):
            for slot in range(9):
                rows.write("tables", slot, [turn + 1] * 5)
            for delta in rows.uploads(stream):
                stream.synchronize()
                writes, size = rows.writes.numpy(), len(delta.places)
                assert writes[0] == size
                seen[writes[1 : 1 + size]] = writes[11 : 11 + size]
        start = (rows["tables"].ptr - rows.words.ptr) // 4
        assert seen[start : start + 45].tolist() == [50] * 45
        assert not rows["lengths"].numpy().any()
        assert rows["lengths"].dtype == int32
        rows.close()


def test_words_anywhere_are_sent_where_they_differ(rows: Rows, stream: Stream) -> None:
    rows.scatter("tables", [0, 7, 44], [3, 4, 5])
    assert upload(rows, stream) == [3]
    rows.scatter("tables", [7, 8], [4, 6])
    assert upload(rows, stream) == [1]
    found = rows["tables"].numpy().reshape(-1)
    assert (found[[0, 7, 8, 44]] == [3, 4, 6, 5]).all()
    assert rows.held("tables", 1).tolist() == [0, 0, 4, 6, 0]
    assert (rows.width("tables"), rows.width("lengths")) == (5, 1)
    rows.scatter("state", [2], [0])
    assert upload(rows, stream) == [1]  # kernels write it too
    with pytest.raises(FieldError, match="not all in"):
        rows.scatter("tables", [45], [1])
