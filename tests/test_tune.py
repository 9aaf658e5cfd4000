"""`openinfer tune` with a meter whose times are made up: what is measured, kept, resumed, and used by engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import tune
from openinfer.cli.tune import ranks as tune_ranks
from openinfer.kernels import InvalidTable, Target
from openinfer.kernels.linear import choices
from openinfer.kernels.linear.choices import choose
from openinfer.kernels.measure import tuner
from openinfer.kernels.measure.tuner import Measured, ProductShape
from openinfer.kernels.ranks.exchange import NCCL, choose_exchange
from openinfer.kernels.store import tables
from openinfer.kernels.store.tables import Exchange, ProductChoice

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
GPU = "Fake GPU 3000"
TARGET = Target(90, 132, cublas=True, gpu=GPU)


class FakeMeter:
    """The last candidate is the fastest; one is wrong."""

    target = TARGET
    asked: list[tuple[ProductShape, int]]

    def __init__(self) -> None:
        FakeMeter.asked = []

    def layer(self, shape: ProductShape, most: int) -> Callable[[int, Sequence[ProductChoice]], Measured]:
        def measured(m: int, choices: Sequence[ProductChoice]) -> Measured:
            assert m <= most
            assert len(set(choices)) == len(choices)
            FakeMeter.asked.append((shape, m))
            times = {choice: 1e-5 / (n + 1) for n, choice in enumerate(choices) if n != 1}
            return Measured(shape, m, times, [f"{choices[1]}: wrong by 3.0e-01"])

        return measured


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for what is measured here."""
    monkeypatch.setenv("OPENINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "DeviceMeter", FakeMeter)
    for cached in (tables.gpu_table, choose, choose_exchange):
        cached.cache_clear()
    yield tmp_path
    for cached in (tables.gpu_table, choose, choose_exchange):
        cached.cache_clear()


def run(*flags: str) -> int:
    return tune.main([str(TINY), "--tokens", "1", "16", "300", *flags])


def test_every_layer_is_measured_at_every_count_and_engines_use_the_best(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json", str(cache / "tune.json"), "--commit", "abc") == 0
    layers = {shape for shape, _ in FakeMeter.asked}
    assert {shape.op for shape in layers} == {"norm_linear", "linear_add", "gate_up_silu", "logits"}
    assert len(FakeMeter.asked) == 3 * len(layers)
    file = cache / "tables" / "fake_gpu_3000.json"
    table = json.loads(file.read_text())
    for shape, m in FakeMeter.asked:
        candidates = list(dict.fromkeys(tuner.candidates(TARGET, shape.op, m, shape.n, shape.k)))
        entry = table[shape.op][f"{shape.n}x{shape.k}"][str(m)]
        assert entry == tuner.entry(candidates[-1])
        assert choose(TARGET, shape.op, m, shape.n, shape.k) == candidates[-1]
        assert choose(TARGET, shape.op, m, shape.n, shape.k) != choices.rule(
            TARGET, *shape[:1], m, *shape[1:]
        )
    data = json.loads((cache / "tune.json").read_text())
    assert (data["bench"], data["target"], len(data["results"])) == ("tune", GPU, len(FakeMeter.asked))
    out = capsys.readouterr()
    assert "is complete" in out.out
    assert "wrong by 3.0e-01" in out.out
    assert "100 %" in out.err


def test_a_run_that_was_stopped_goes_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(tuner.time, "monotonic", clock)  # type: ignore[attr-defined]
    assert run("--budget", "5") == 0
    first = list(FakeMeter.asked)
    assert 0 < len(first) < 6
    assert run() == 0
    assert not set(first) & set(FakeMeter.asked)
    every = len(first) + len(FakeMeter.asked)
    assert run() == 0
    assert FakeMeter.asked == []
    assert run("--again") == 0
    assert len(FakeMeter.asked) == every


def test_a_table_elsewhere_is_not_the_engines(cache: Path) -> None:
    assert run("--out", str(cache / "deep" / "mine.json")) == 0
    assert (cache / "deep" / "mine.json").is_file()
    shape, m = FakeMeter.asked[0]
    assert choose(TARGET, shape.op, m, shape.n, shape.k) == choices.rule(
        TARGET, shape.op, m, shape.n, shape.k
    )


@pytest.mark.parametrize("text", ["[", "[]", '{"linear_add": {"8x8": {"1": {"kind": "gemv", "speed": 9}}}}'])
def test_a_file_that_is_no_table_is_named(cache: Path, text: str) -> None:
    file = cache / "tables" / "fake_gpu_3000.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(InvalidTable, match=r"fake_gpu_3000\.json is no table of kernels"):
        choose(TARGET, "linear_add", 1, 64, 64)


def test_own_measurements_stand_over_the_packages() -> None:
    shipped: Any = {"linear_add": {"8x8": {"1": {"kind": "gemv"}, "16": {"kind": "small"}}}}
    own: Any = {"linear_add": {"8x8": {"16": {"kind": "cublas"}}, "8x16": {"1": {"kind": "gemv"}}}}
    assert tables.merged(shipped, own) == {
        "linear_add": {
            "8x8": {"1": {"kind": "gemv"}, "16": {"kind": "cublas"}}, "8x16": {"1": {"kind": "gemv"}}
        }
    }  # fmt: skip


def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([str(TINY), "--tokens", "0"]) == 1
    assert "--tokens [0]: they must be at least 1" in capsys.readouterr().err


def test_the_ways_to_add_up_are_measured_once_and_used(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(ranks: int, width: int, rows: Sequence[int]) -> Iterator[tune_ranks.Found]:
        asked.append((ranks, width, list(rows)))
        for count in rows:
            yield count, {Exchange("push", 8): count * 1e-6, Exchange("two_shot", 16): 10e-6, NCCL: 12e-6}

    monkeypatch.setattr(tune_ranks, "_measured", measured)
    assert run() == 0
    assert asked == []
    assert run("-tp", "2") == 0
    assert "sum of 2 ranks [1, 64]: one shot of 8 warps 1.0, two shots of 16 warps 10.0, NCCL 12.0 us" in (
        capsys.readouterr().out
    )
    assert run("-tp", "2") == 0
    assert asked == [(2, 64, [1, 16, 300])]
    tables.gpu_table.cache_clear()
    ways = [choose_exchange(TARGET, 2, rows, 64) for rows in (1, 2, 17, 301)]
    assert ways == [Exchange("push", 8), Exchange("two_shot"), Exchange("two_shot"), Exchange("push", 8)]
    assert choose_exchange(TARGET, 2, 1, 512) == Exchange("push")
