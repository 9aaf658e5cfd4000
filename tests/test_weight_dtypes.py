"""Checkpoints whose weights are float16 or float32 load like those in bfloat16, and a CPU keeps their values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from openinfer.cli import recipes
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session
from openinfer.tensor import Checkpoint, dtypes

GOLDENS = Path(__file__).parent / "goldens"
LLAMA = Path(__file__).parents[1] / "examples" / "llama" / "golden" / "llama-tiny"
FOLDERS = [*(GOLDENS / f"{name}-tiny" for name in ("qwen3", "qwen3_5", "qwen3_5-moe", "deepseek_v4")), LLAMA]


def rewritten(source: Path, target: Path, dtype: Any, change: float = 1.0) -> Path:
    """A copy of a checkpoint whose bfloat16 tensors are of `dtype`, their values times `change`."""
    target.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    with Checkpoint(source) as checkpoint:
        arrays = {name: checkpoint.array(name) for name in checkpoint.names}
    write(target / "model.safetensors", {
        name: (array.astype(np.float32) * change).astype(dtype) if array.dtype == dtypes.bfloat16 else array
        for name, array in arrays.items()
    })  # fmt: skip
    return target


def write(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """A safetensors file; the safetensors package has no E8M0 in numpy."""
    header, end = {}, 0
    for name, array in arrays.items():
        span = [end, end := end + array.nbytes]
        header[name] = {"dtype": dtypes.tag(array.dtype), "shape": array.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tokens(folder: Path, **flags: Any) -> list[int]:
    config = json.loads((folder / "config.json").read_text())
    recipe = next(one for one in recipes.installed() if one.matches(config))
    usual = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "kv_cache_memory_bytes": 64 << 20}
    session = Session(build(recipe, folder, **usual, **flags).engine)
    asked = session.submit(range(5, 45), 24, ignore_eos=True)
    session.finish()
    session.engine.close()
    return session.outcomes[asked].tokens


@pytest.mark.parametrize("source", FOLDERS, ids=lambda folder: folder.name)
def test_other_dtypes_give_the_same_tokens(source: Path, tmp_path: Path) -> None:
    want = tokens(source)
    for dtype in (np.float16, np.float32):
        assert tokens(rewritten(source, tmp_path / np.dtype(dtype).name, dtype)) == want


def test_a_cpu_keeps_the_values_of_float32(tmp_path: Path) -> None:
    """Values that no bfloat16 has: the model on a CPU has them, unless it is asked for bfloat16."""
    source = rewritten(GOLDENS / "qwen3-tiny", tmp_path / "fine", np.float32, change=1 + 2**-12)
    with safe_open(source / "model.safetensors", "numpy") as file:
        want = file.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert (want != want.astype(dtypes.bfloat16).astype(np.float32)).mean() > 0.9
    (recipe,) = (one for one in recipes.installed() if one.name == "qwen3")
    for dtype, expected in (("auto", want), ("bfloat16", want.astype(dtypes.bfloat16))):
        sizes = {"max_model_len": 64, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 20}
        engine = build(recipe, source, device="cpu", dtype=dtype, **sizes).engine
        loaded = engine.runner.model.weights.layers[0].down.weight.numpy()
        assert loaded.dtype == expected.dtype
        assert (loaded == expected).all()
        engine.close()


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    source = rewritten(GOLDENS / "qwen3-tiny", tmp_path / "wide", np.float64)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight .* is float64, must be bfloat16 or float16 or"
    ):
        tokens(source)
