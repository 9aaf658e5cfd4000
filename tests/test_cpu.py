"""A CPU as it serves by default: the fastest forms of products and attention, on the cores that there are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CpuPack, attend, gate_up_silu, linear_add, norm_linear, usable_cores
from openinfer.kernels.lora.low_rank import Lora
from openinfer.kernels.op.cores import HOST_WAY, HostWay, together
from openinfer.tensor import Tensor

ROOT = Path(__file__).parents[1]


def product(x: Any, weight: Any, **way: Any) -> Any:
    out = np.empty((len(x), len(weight)), np.float32)
    tensors = {
        name: Tensor.from_numpy(array) for name, array in {"out": out, "x": x, "weight": weight}.items()
    }
    norm_linear(CpuPack(**way), **tensors)
    return out


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("n", "k"), [(2048, 128), (1040, 1536), (48, 32)])
def test_products_of_any_number_of_rows(n: int, k: int, threads: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = rng.standard_normal((23, k), np.float32), rng.standard_normal((n, k), np.float32)
    right = x.astype(np.float64) @ weight.T.astype(np.float64)
    fixed = product(x, weight, batch_invariant=True, threads=threads)
    for rows in (1, 2, 3, 6, 7, 8, 9, 23):
        assert np.abs(product(x[:rows], weight, threads=threads) - right[:rows]).max() < 1e-3
        alone = product(x[:rows], weight, batch_invariant=True, threads=threads)
        assert np.array_equal(alone, fixed[:rows])
    assert np.abs(fixed - right).max() < 1e-3


def attended(lengths: list[int], starts: list[int], window: int, **way: Any) -> Any:
    """Of rows of these lengths, which have `starts` tokens in the cache: 6 heads over 2 of keys, pages of 16."""
    rng, (heads, kv_heads, dim), tokens = np.random.default_rng(5), (6, 2, 32), sum(lengths)
    pages = [-(-(a + b) // 16) for a, b in zip(lengths, starts, strict=True)]
    tables = np.zeros((len(lengths) + 1, max(pages)), np.int32)
    numbers = rng.permutation(sum(pages)).astype(np.int32) + 1
    for row, count in enumerate(pages):
        tables[row + 1, :count], numbers = numbers[:count], numbers[count:]
    arrays = {
        "out": np.empty((tokens, heads * dim), np.float32),
        "q": rng.standard_normal((tokens, heads, dim), np.float32),
        "kv": rng.standard_normal((sum(pages) + 1, 2, kv_heads, 16, dim), np.float32),
        "slots": np.arange(1, len(lengths) + 1, dtype=np.int32),
        "q_starts": np.cumsum([0, *lengths], dtype=np.int32),
        "seq_lens": np.array([0, *starts], np.int32),
        "alive": np.ones(len(lengths) + 1, np.int32),
        "block_tables": tables,
    }
    tensors = {name: Tensor.from_numpy(array) for name, array in arrays.items()}
    attend(CpuPack(**way), **tensors, scale=dim**-0.5, window=window, max_q_len=max(lengths))
    return arrays["out"]


@pytest.mark.parametrize("window", [0, 1, 20, 500])
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_of_many_queries_at_once(window: int, threads: int) -> None:
    rows = [1, 70, 33, 1, 5, 1, 40], [40, 0, 19, 0, 64, 700, 300]
    right = attended(*rows, window, batch_invariant=True)
    assert np.abs(attended(*rows, window, threads=threads) - right).max() < 2e-6
    assert np.array_equal(attended(*rows, window, batch_invariant=True, threads=threads), right)


@pytest.mark.parametrize("rows", [3, 63, 64, 130])
def test_ops_whose_rows_cores_divide(rows: int) -> None:
    """With a norm, a gate and two adapters, whose tokens alternate."""
    rng, k, n = np.random.default_rng(rows), 64, 96

    def numbers(*shape: int) -> Any:
        return Tensor.from_numpy(rng.standard_normal(shape, np.float32))

    def lora(parts: tuple[int, ...], columns: int) -> Lora[Tensor]:
        slots = (np.arange(rows) % 3).astype(np.int32)
        adapters, token_slots = (Tensor.from_numpy(a) for a in (np.arange(3, dtype=np.int32), slots))
        a, b = numbers(2, 16 * len(parts), columns), numbers(2, sum(parts), 16)
        return Lora(a=a, b=b, adapters=adapters, token_slots=token_slots, parts=parts)

    x, h, norm, weights = numbers(rows, k), numbers(rows, n), numbers(k), [numbers(2 * n, k), numbers(k, n)]
    given = lora((n, n), k), lora((k,), n)
    found = []
    for way in ({"batch_invariant": True}, {"threads": 3}, {"threads": 3, "batch_invariant": True}):
        pack, added = CpuPack(**way), Tensor.from_numpy(x.numpy().copy())
        outs = [numbers(rows, 2 * n), numbers(rows, n)]
        norm_linear(pack, out=outs[0], x=x, weight=weights[0], norm_weight=norm, eps=1e-6, lora=given[0])
        gate_up_silu(pack, out=outs[1], x=x, weight=weights[0], norm_weight=norm, eps=1e-6, lora=given[0])
        linear_add(pack, x=added, h=h, weight=weights[1], lora=given[1])
        found.append([one.numpy() for one in (*outs, added)])
    for right, fast, fixed in zip(*found, strict=True):
        assert np.abs(fast - right).max() <= 1e-4 * np.abs(right).max()
        assert np.array_equal(fixed, right)


def on(threads: int, work: Callable[[], Any]) -> Any:
    token = HOST_WAY.set(HostWay(threads))
    try:
        return work()
    finally:
        HOST_WAY.reset(token)


def test_jobs_run_side_by_side() -> None:
    meeting = threading.Barrier(3, timeout=60)
    on(3, lambda: together([meeting.wait] * 3))


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_job_raises_reaches_its_caller(threads: int) -> None:
    done: list[int] = []

    def bad() -> None:
        raise ValueError("no such number")

    with pytest.raises(ValueError, match="no such number"):
        on(threads, lambda: together([lambda: done.append(1), bad, lambda: done.append(2)]))
    on(threads, lambda: together([lambda: done.append(3), lambda: done.append(4)]))  # the helpers go on
    assert {3, 4} <= set(done)


@pytest.mark.parametrize(
    ("own", "files", "environment", "cores"),
    [
        ("0::/", {"": "max 100000"}, "", 8),
        ("0::/", {"": "200000 100000"}, "", 2),
        ("0::/", {"": "150000 100000"}, "", 2),
        ("0::/", {"": "5000 100000"}, "", 1),
        ("0::/a/b", {"a/b": "max 100000", "a": "300000 100000"}, "", 3),
        ("4:cpu,cpuacct:/a", {"cpu/a": ("400000", "100000"), "cpu": ("-1", "100000")}, "", 4),
        ("4:memory:/a\n0::/", {"": "damaged"}, "", 8),
        ("0::/", {"": "max 100000"}, "3", 3),
        ("0::/", {"": "200000 100000"}, "6", 2),
        ("0::/", {"": "max 100000"}, "many", 8),
    ],
)
def test_the_cores_of_a_process(
    own: str, files: Any, environment: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{own}\n")
    for folder, content in files.items():
        group = tmp_path / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        names = ("cpu.max",) if isinstance(content, str) else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for name, text in zip(names, [content] if isinstance(content, str) else content, strict=True):
            (group / name).write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", environment)
    assert usable_cores(tmp_path) == cores


def test_the_engine_takes_its_cores_however_it_is_started() -> None:
    """One helper for each core but the caller's, and one thread of BLAS, without any variable."""
    code = (
        "import os, threading, numpy; cores = len(os.sched_getaffinity(0));"
        "from openinfer.llm import LLM; llm = LLM('demo/qwen3', device='cpu', max_model_len=64);"
        "llm.generate('What', max_tokens=2); names = [one.name for one in threading.enumerate()];"
        "print(names.count('cores') == cores - 1)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip() == "True", done.stderr
