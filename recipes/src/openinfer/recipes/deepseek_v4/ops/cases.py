"""Cases of the attention's ops at the sizes of V4-Flash, for `openinfer bench kernels` and `openinfer selftest`."""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from openinfer.kernels import index_topk
from openinfer.kernels.authoring import Commands, Memory, OpCase, Target, Workload
from openinfer.recipes.deepseek_v4.ops import PAGE
from openinfer.recipes.deepseek_v4.ops import sparse_attend as sparse
from openinfer.recipes.deepseek_v4.ops.compress import compress
from openinfer.recipes.deepseek_v4.ops.queries import q_kv_write
from openinfer.recipes.deepseek_v4.ops.sparse_attend import sparse_attend
from openinfer.tensor import Tensor, float32, int32

HEADS, DIM, ROTARY, LOW_RANK, INDEX_DIM, TOPK = 64, 512, 64, 1024, 128, 512
CONTEXT = 4096
STEPS = {"decode 1": (1, 1), "decode 8": (8, 1), "decode 32": (32, 1), "decode 128": (128, 1),
         "prompt 4096": (1, 4096)}  # fmt: skip
"""Rows, and new tokens of each, at the end of CONTEXT tokens."""
ENTRIES_PER_PAGE = {"SWA": 0, "CSA": 32, "HCA": 1}


class _Batch:
    """Rows of `length` new tokens at the end of CONTEXT tokens, with pages in random order. Slot 0 is padding."""

    def __init__(self, memory: Memory, rows: int, length: int) -> None:
        self.memory, self.tokens = memory, rows * length
        self.workload = Workload.decode(rows, CONTEXT) if length == 1 else Workload.prefill(length)
        pages = CONTEXT // PAGE
        own = 2 if length == 1 else pages  # pages that a window still holds
        self.kv_pages, self.entry_pages = 1 + rows * own, 1 + rows * pages
        kv, entries = (np.zeros((1 + rows, pages + 1), np.int32) for _ in range(2))
        kv[1:, pages - own : pages] = 1 + memory.rng.permutation(rows * own).reshape(rows, own)
        entries[1:, :pages] = 1 + memory.rng.permutation(rows * pages).reshape(rows, pages)
        self.kv_tables, self.entry_tables = memory.ints(kv), memory.ints(entries)
        self.places = np.tile(np.arange(CONTEXT - length, CONTEXT), rows)
        angle = np.arange(CONTEXT)[:, None] * 10000.0 ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
        self.turns = memory.of(np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32))
        self.by_token = {
            "positions": memory.ints(self.places),
            "token_slots": memory.ints(np.repeat(np.arange(1, 1 + rows), length)),
            "cos_sin": self.turns,
        }
        self.by_row = {
            "slots": memory.ints(np.arange(1, 1 + rows)),
            "q_starts": memory.ints(np.arange(rows + 1) * length),
            "seq_lens": memory.ints(np.full(1 + rows, CONTEXT - length)),
            "alive": memory.ints(np.ones(1 + rows)),
            "cos_sin": self.turns,
            "max_q_len": length,
        }

    def chosen(self) -> Tensor:
        selected = np.full((self.tokens, TOPK), -1)
        for token, place in enumerate(self.places):
            sees = (place + 1) // 4
            selected[token, : min(TOPK, sees)] = np.sort(self.memory.rng.permutation(sees)[:TOPK])
        return self.memory.ints(selected)


def cases(memory: Memory) -> Iterator[OpCase]:
    """Every op of a layer's attention, for each kind of layer."""
    for step, (rows, length) in STEPS.items():
        batch = _Batch(memory, rows, length)
        for kind in ENTRIES_PER_PAGE:
            args = memory.copies(_attention(batch, kind), "kv", "entries")
            yield OpCase(f"V4-Flash {kind}, {step}", sparse_attend, args, batch.workload)
        args = memory.copies(_index(batch), "keys")
        yield OpCase(f"V4-Flash, {step}", index_topk, args, batch.workload)
        for name, window, dim, rounding in (
            ("CSA", 4, DIM, "q8"), ("index", 4, INDEX_DIM, "hadamard_q4"), ("HCA", PAGE, DIM, "q8"),
        ):  # fmt: skip
            args = memory.copies(_compress(batch, window, dim, rounding), "state", "az")
            yield OpCase(f"V4-Flash {name}, {step}", compress, args, batch.workload)
        args = memory.copies(_write(batch), "qkv", "kv")
        yield OpCase(f"V4-Flash, {step}", q_kv_write, args, batch.workload)


def _attention(batch: _Batch, kind: str) -> dict[str, Any]:
    memory, per_page = batch.memory, ENTRIES_PER_PAGE[kind]
    return {
        "out": memory.empty(batch.tokens, HEADS * DIM),
        "q": memory.normal(batch.tokens, HEADS, DIM),
        "kv": memory.normal(batch.kv_pages, PAGE, DIM),
        "entries": memory.normal(batch.entry_pages, per_page, DIM) if per_page else None,
        "selected": batch.chosen() if kind == "CSA" else None,
        "sinks": memory.normal(HEADS, dtype=float32),
        "kv_tables": batch.kv_tables,
        "entry_tables": batch.entry_tables,
        "scale": DIM**-0.5,
        "eps": 1e-6,
        "window": PAGE,
        **batch.by_token,
    }


def _index(batch: _Batch) -> dict[str, Any]:
    memory = batch.memory
    return {
        "selected": memory.empty(batch.tokens, TOPK, dtype=int32),
        "q": memory.normal(batch.tokens, HEADS, INDEX_DIM),
        "weights": memory.normal(batch.tokens, HEADS, dtype=float32),
        "keys": memory.normal(batch.entry_pages, PAGE // 4, INDEX_DIM),
        "block_tables": batch.entry_tables,
        "scale": 0.01,
        "window": 4,
        "quantized": True,
        **batch.by_token,
    }


def _compress(batch: _Batch, window: int, dim: int, rounding: str) -> dict[str, Any]:
    memory = batch.memory
    kinds, columns = (3, 2 * dim) if window == 4 else (1, dim)
    return {
        "entries": memory.empty(batch.entry_pages, PAGE // window, dim),
        "state": memory.normal(batch.kv_pages, kinds, 3, dim, dtype=float32),
        "az": memory.normal(batch.tokens, 2 * columns, dtype=float32),
        "ape": memory.normal(window, columns, dtype=float32),
        "norm_weight": memory.normal(dim, dtype=float32),
        **batch.by_row,
        "state_tables": batch.kv_tables,
        "entry_tables": batch.entry_tables,
        "eps": 1e-6,
        "rounding": rounding,
    }


def _write(batch: _Batch) -> dict[str, Any]:
    memory = batch.memory
    return {
        "kv": memory.empty(batch.kv_pages, PAGE, DIM),
        "qr": memory.coded(batch.tokens, LOW_RANK, empty=True),
        "qkv": memory.normal(batch.tokens, LOW_RANK + DIM),
        "q_norm": memory.normal(LOW_RANK, dtype=float32),
        "kv_norm": memory.normal(DIM, dtype=float32),
        "block_tables": batch.kv_tables,
        "eps": 1e-6,
        "quantized": True,
        **batch.by_token,
    }


def variants(target: Target, case: OpCase) -> Iterator[tuple[str, Commands]]:
    """Other tunings of sparse_attend and index_topk."""
    tunings: dict[str, Any] = {}
    if case.op is index_topk:
        usual = case.calls[0].tuning(target)
        for name, value in (("select_warps", 4), ("warps", 8), ("block", 64), ("stages", 2)):
            tunings[f"{name} {value}"] = dataclasses.replace(usual, **{name: value})
    if case.op is sparse_attend:
        one: sparse.SparseAttendArgs[Tensor] = case.calls[0]
        tokens, vectors, selected = one.q.shape[0], one.window + one.most, one.selected is not None
        tunings["in Triton"] = sparse.attend_tuning(target, tokens, HEADS, vectors, selected=selected)
        for block, stages in ((32, 4), (64, 2)):
            for splits in [n for n in (1, 2, 3, 4, 5, 10) if n <= max(1, 160 // tokens)]:
                tuning = sparse.HopperTuning(block, stages, splits)
                tunings[f"{block} x {splits}, {stages} stages"] = tuning
    for name, tuning in tunings.items():
        yield name, operator.methodcaller("launches", target, tuning)
