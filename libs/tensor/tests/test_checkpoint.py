import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer.tensor import Checkpoint, CheckpointError, ClosedError, bfloat16, dtypes, float32
from openinfer.tensor.headers import MAX_HEADER_BYTES

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
}


def _write(path: Path, header: Any, data: bytes = bytes(20)) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def _open(tmp_path: Path, header: Any, data: bytes = bytes(20)) -> Checkpoint:
    _write(tmp_path / "model.safetensors", header, data)
    return Checkpoint(tmp_path)


def _save(path: Path, **arrays: Any) -> None:
    """A file as written here, so that what we read is not what we wrote with the same code."""
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {
            "dtype": dtypes.tag(array.dtype),
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    _write(path, header, data)


def _shards(tmp_path: Path) -> dict[str, Any]:
    _save(tmp_path / "m-1.safetensors", a=np.zeros(2, np.float32), b=np.ones(3, bfloat16))
    _save(tmp_path / "m-2.safetensors", c=np.arange(4))
    return {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}


def _index(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"t{i}": rng.standard_normal((i, 3)).astype(t)
        for i, t in enumerate([np.float32, np.float16, np.float64])
    }
    arrays |= {
        "i": rng.integers(-9, 9, (2, 2, 2)),
        "flag": np.array([True, False]),
        "scalar": np.array(3, np.uint8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    with Checkpoint(tmp_path) as ckpt:
        assert set(ckpt.names) == set(ckpt) == set(arrays)
        assert len(ckpt) == len(arrays)
        assert "i" in ckpt
        assert "__metadata__" not in ckpt
        assert ckpt.total_bytes == sum(a.nbytes for a in arrays.values())
        for name, array in arrays.items():
            assert ckpt.info(name)[:3] == (name, array.dtype, array.shape)
            assert ckpt.array(name).dtype == array.dtype
            assert (ckpt.array(name) == array).all()


@pytest.mark.parametrize("dtype", list(dtypes._TAGS))
def test_every_dtype(tmp_path: Path, dtype: Any) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    _save(tmp_path / "model.safetensors", pad=np.zeros(1, np.uint8), x=array)  # x is unaligned
    with Checkpoint(tmp_path) as ckpt:
        got = ckpt.array("x")
    assert got.dtype == dtype
    assert (got.view(np.uint8) == array.view(np.uint8)).all()


def test_arrays_are_read_only_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors", a=np.arange(4, dtype=np.int32))
    with Checkpoint(tmp_path) as ckpt:
        array = ckpt.array("a")
    assert array.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ClosedError, match="closed"):
        ckpt.array("a")
    with pytest.raises(ClosedError, match="closed"):
        ckpt.read_into("a", np.zeros(16, np.uint8))


def test_read_into_reads_parts_and_refuses_more(tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors", pad=np.zeros(3, np.uint8), a=np.arange(100, dtype=np.uint8))
    out = np.zeros(10, np.uint8)
    with Checkpoint(tmp_path) as ckpt:
        ckpt.read_into("a", out, 50)
        assert out.tolist() == list(range(50, 60))
        for start in (-1, 91):
            with pytest.raises(CheckpointError, match="it has 100"):
                ckpt.read_into("a", out, start)
        os.truncate(tmp_path / "model.safetensors", 100)
        with pytest.raises(CheckpointError, match=r"'a': the file ended early"):
            ckpt.read_into("a", np.zeros(100, np.uint8))


def test_shards_with_an_index(tmp_path: Path) -> None:
    _index(tmp_path, _shards(tmp_path))
    with Checkpoint(tmp_path) as ckpt:
        assert ckpt.names == ["a", "b", "c"]
        assert ckpt.info("c").file == tmp_path / "m-2.safetensors"
        assert ckpt.array("c").tolist() == [0, 1, 2, 3]
        assert repr(ckpt).endswith("3 tensors, 46 bytes)")


def test_the_single_file_comes_first(tmp_path: Path) -> None:
    _index(tmp_path, _shards(tmp_path))
    _save(tmp_path / "model.safetensors", only=np.zeros(1))
    with Checkpoint(tmp_path) as ckpt:
        assert ckpt.names == ["only"]


@pytest.mark.parametrize(
    ("change", "tensor", "why"),
    [
        ({"d": "m-2.safetensors"}, "d", "is said to be in m-2.safetensors, which does not"),
        ({"a": "m-2.safetensors"}, "a", "is said to be in m-2.safetensors, which does not"),
        ({"c": None}, "c", "must be a"),
        ({"c": "../m-2.safetensors"}, "c", "in this directory"),
        ({"c": "/etc/passwd"}, "c", "in this directory"),
        ({"c": "m-2.bin"}, "c", "must be a"),
        ({"d": "m-3.safetensors"}, None, "cannot be opened: No such file"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, change: dict[str, Any], tensor: str | None, why: str) -> None:
    _index(tmp_path, _shards(tmp_path) | change)
    with pytest.raises(CheckpointError, match=why) as e:
        Checkpoint(tmp_path)
    assert e.value.tensor == tensor


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    _save(tmp_path / "adapter_model.safetensors", a=np.zeros(2, np.float32))
    with Checkpoint(tmp_path, "adapter_model.safetensors") as checkpoint:
        assert checkpoint.names == ["a"]
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors"):
        Checkpoint(tmp_path)
    _index(tmp_path, _shards(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no other\.safetensors"):
        Checkpoint(tmp_path, "other.safetensors")


def test_the_index_says_which_tensors_count(tmp_path: Path) -> None:
    weight_map = _shards(tmp_path)
    _index(tmp_path, {k: v for k, v in weight_map.items() if k != "b"})
    with Checkpoint(tmp_path) as ckpt:
        assert ckpt.names == ["a", "c"]
        with pytest.raises(CheckpointError, match="missing: b"):
            ckpt.require({name: (ckpt.info("a").shape, [float32]) for name in "b"}, ignore=["*"])
    with Checkpoint(tmp_path) as ckpt:
        one = ckpt.array("a").copy()
    for name, stale in (("m-0.safetensors", "a"), ("m-2.safetensors", "a"), ("m-2.safetensors", "b")):
        _save(tmp_path / name, **{stale: np.zeros(1), "c": np.zeros(1)})
        _index(tmp_path, weight_map | {"c": name})
        with Checkpoint(tmp_path) as ckpt:
            assert sorted(ckpt.names) == ["a", "b", "c"]
            assert ckpt.info("a").file.name == ckpt.info("b").file.name == "m-1.safetensors"
            np.testing.assert_array_equal(ckpt.array("a"), one)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_of_the_wrong_form(tmp_path: Path, weight_map: Any) -> None:
    _index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="weight_map must be"):
        Checkpoint(tmp_path)


def test_a_shard_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    weight_map = _shards(tmp_path)
    _index(tmp_path, weight_map)
    (tmp_path / "m-2.safetensors").unlink()
    os.mkfifo(tmp_path / "m-2.safetensors")
    with pytest.raises(CheckpointError, match=r"m-2\.safetensors: is no regular file"):
        Checkpoint(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor"):
        Checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"missing: is not there. A checkpoint is a folder with model.saf"
    ):
        Checkpoint(tmp_path / "missing")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has model.gguf, and only safetensors are read"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.gguf: is a file; give its folder"):
        Checkpoint(tmp_path / "model.gguf")


def _entry(**change: Any) -> dict[str, Any]:
    return GOOD | {"b": GOOD["b"] | change}


HOSTILE = {
    "unknown dtype": (_entry(dtype="F4"), "unknown safetensors dtype 'F4'"),
    "dtype no string": (_entry(dtype=["F32"]), "unknown safetensors dtype"),
    "shape and bytes": (_entry(shape=[2, 4]), r"BF16\[2, 4\] is 16 bytes, its data_offsets span 12"),
    "negative size": (_entry(shape=[-2, -3]), "invalid value: integer `-2`"),
    "float size": (_entry(shape=[2.0, 3]), "floating point"),
    "bool size": (_entry(shape=[True, 6]), "boolean `true`"),
    "shape no list": (_entry(shape=6), "'b': its header entry is wrong: .*expected a sequence"),
    "too many axes": (_entry(shape=[1] * 65), "at most 64"),
    "huge product": (_entry(shape=[2**62, 2**62]), "below 2"),
    "huge empty": (_entry(shape=[0, 2**62, 2**62]), "below 2"),
    "huge empty, no bytes": (_entry(shape=[0, 2**62, 2**62], data_offsets=[8, 8]), "below 2"),
    "a dtype of four bits": (_entry(dtype="F4", shape=[24]), "'b': unknown safetensors dtype 'F4'"),
    "backward offsets": (_entry(data_offsets=[20, 8]), "'b': .* data_offsets span -12"),
    "negative offset": (_entry(data_offsets=[-4, 8]), "'b': data at -4 overlaps"),
    "one offset": (_entry(data_offsets=[8]), "'b': its header entry is wrong: .*a tuple of size 2"),
    "overlap": (_entry(data_offsets=[4, 16]), "'b': data at 4 overlaps the tensor before it"),
    "hole": (_entry(data_offsets=[9, 21]), "'b': data at 9 leaves a hole"),
    "hole at start": ({"b": GOOD["b"]}, "'b': data at 8 leaves a hole"),
    "data past the end": (
        GOOD | {"c": {"dtype": "I8", "shape": [9], "data_offsets": [20, 29]}},
        "the file was cut, or padded",
    ),
    "data left over": ({"a": GOOD["a"]}, "the file was cut, or padded"),
    "missing key": (GOOD | {"b": {"dtype": "F32"}}, "'b': its header entry is wrong: .*missing field"),
    "entry no object": (GOOD | {"b": 3}, "'b': its header entry is wrong"),
    "metadata": (GOOD | {"__metadata__": {"a": 1}}, "has a wrong header. .*expected a string"),
    "not JSON": (b'{"a": ', "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "not an object": (b"[]", "does not start with"),
    "deep": (b'{"a":' + b"[" * 100_000, "not valid JSON"),
    "long number": (b'{"a":' + b"1" * 5000 + b"}", "not valid JSON"),
    "named twice": (b'{"a": {}, "a": {}}', "'a': its header entry is wrong: .*missing field"),
    "key twice": (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "duplicate field `dtype`"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, why = HOSTILE[case]
    with pytest.raises(CheckpointError, match=why) as e:
        _open(tmp_path, header)
    assert e.value.file == tmp_path / "model.safetensors"
    assert isinstance(e.value, ValueError)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "run git lfs pull"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes; the file has 10"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "claims a header"),
        (struct.pack("<Q", 0), "does not start"),
    ],
)
def test_hostile_lengths_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=why):
        Checkpoint(tmp_path)


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{")
    os.truncate(path, MAX_HEADER_BYTES + 100)  # sparse
    with pytest.raises(CheckpointError, match="is the limit"):
        Checkpoint(tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_or_consistent(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Any bytes changed anywhere: CheckpointError, or a checkpoint whose arrays lie inside the file."""
    tmp_path = tmp_path_factory.mktemp("fuzz")
    _write(tmp_path / "model.safetensors", GOOD)
    raw = bytearray((tmp_path / "model.safetensors").read_bytes())
    for at, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), min_size=1)
    ):
        raw[at] = byte
    (tmp_path / "model.safetensors").write_bytes(
        bytes(raw[: data.draw(st.just(None) | st.integers(0, len(raw)))])
    )
    try:
        ckpt = Checkpoint(tmp_path)
    except CheckpointError:
        return
    with ckpt:
        assert sum(ckpt.array(name).nbytes for name in ckpt) == ckpt.total_bytes <= len(raw)


def test_files_are_closed_after_a_refusal(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    weight_map = _shards(tmp_path)
    _index(tmp_path, weight_map | {"d": "m-2.safetensors"})
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_require_accepts_what_fits(tmp_path: Path) -> None:
    with _open(tmp_path, GOOD) as ckpt:
        ckpt.require({"a": ((2,), [float32]), "b": ((2, 3), {"bfloat16", "float32"})})
        ckpt.require({"a": ((2,), [ml_dtypes.bfloat16, np.float32])}, ignore=["b"])
        ckpt.require({"a": ((2,), [float32]), "c": ((1,), [float32])}, optional=["c"], ignore=["b*"])
        ckpt.require({}, ignore=["*"])
        ckpt.require({"a": ((2,), [float32])}, ignore=["*b"])


@pytest.mark.parametrize("shape", [[], [1]])
def test_one_value_may_have_no_axis(tmp_path: Path, shape: list[int]) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    with _open(tmp_path, header, bytes(4)) as ckpt:
        ckpt.require({"a": ((1,), [float32])})
        with pytest.raises(CheckpointError, match="must be"):
            ckpt.require({"a": ((2,), [float32])})


def test_require_lists_everything_at_once(tmp_path: Path) -> None:
    with _open(tmp_path, GOOD) as ckpt:
        expected: dict[str, Any] = {"a": ((3,), [bfloat16, float32]), "b": ((2, 3), ["float32", "float16"])}
        expected |= {f"layer.{i}": ((1,), [float32]) for i in range(20)}
        with pytest.raises(CheckpointError) as e:
            ckpt.require(expected)
        assert e.value.why == (
            "missing: layer.0, layer.1, layer.2, layer.3 and 16 more; "
            "wrong shape: a in model.safetensors is [2], must be [3]; "
            "wrong dtype: b in model.safetensors is bfloat16, must be float16 or float32"
        )
        with pytest.raises(CheckpointError, match=r"unexpected: b$"):
            ckpt.require({"a": ((2,), [float32])}, ignore=["bb", "b.*"])


def test_an_unknown_name_is_our_error(tmp_path: Path) -> None:
    with (
        _open(tmp_path, GOOD) as ckpt,
        pytest.raises(CheckpointError, match="'zz': is not in this checkpoint"),
    ):
        ckpt.array("zz")


def saved(folder: Path, *shards: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """The digest of a checkpoint of these shards."""
    folder.mkdir()
    names = [f"model-{index}.safetensors" for index in range(len(shards))]
    for name, arrays in zip(names, shards, strict=True):
        safetensors.numpy.save_file(arrays, folder / name)
    index = {"weight_map": {key: name for name, arrays in zip(names, shards, strict=True) for key in arrays}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint(folder) as checkpoint:
        return checkpoint.digest()


def test_a_digest_is_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are divided among files, and not of their places."""
    monkeypatch.setattr("openinfer.tensor.checkpoint._DIGEST_BYTES", 64)
    rng = np.random.default_rng(1)
    arrays = {"a": rng.bytes(200), "b": rng.bytes(64), "c": b"", "d": rng.bytes(63)}
    whole = {name: np.frombuffer(data, np.uint8) for name, data in arrays.items()}
    first = saved(tmp_path / "one", whole)
    a, b = ({name: whole[name] for name in names} for names in ("db", "ca"))
    assert saved(tmp_path / "two", a, b) == first
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert saved(tmp_path / "three", whole) == first
    others = {first}
    for count, (name, place) in enumerate(
        [*(("a", n) for n in range(0, 200, 7)), ("b", 63), ("d", 0), ("d", 62)], 2
    ):
        flipped = whole[name].copy()
        flipped[place] ^= 1
        others.add(saved(tmp_path / str(count), whole | {name: flipped}))
        assert len(others) == count
    changes = [
        {"a": whole["a"].reshape(20, 10)},
        {"a": whole["a"].view(np.int8)},
        {"a": whole["d"], "d": whole["a"]},
        {"b": whole["a"][:64], "a": whole["a"][64:]},
        {"e": whole["c"]},
    ]
    for change in changes:
        others.add(saved(tmp_path / f"x{len(others)}", whole | change))
    assert len(others) == count + len(changes)


def test_a_digest_of_a_file_that_was_cut_fails(tmp_path: Path) -> None:
    saved(tmp_path / "one", {"a": np.zeros(1 << 16, np.uint8)})
    with Checkpoint(tmp_path / "one") as checkpoint:
        os.truncate(tmp_path / "one" / "model-0.safetensors", 1 << 10)
        with pytest.raises(CheckpointError, match="ended early"):
            checkpoint.digest()
