"""`openinfer explain` shows the bytes that go to other ranks, where there are any."""

from __future__ import annotations

import re
from pathlib import Path

from openinfer.cli import explain
from openinfer.cli.explain import Line, table
from openinfer.cli.explain.segments import Outline
from openinfer.cli.tune import shapes_of
from openinfer.kernels import H200
from openinfer.recipes.engine import Source
from openinfer.recipes.qwen3 import RECIPE

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"


def test_a_step_with_collectives_has_a_column_of_links() -> None:
    without = Line("norm_linear", 1, 1, 8, 8, floor_us=1.0, us=2.0)
    exchanged = Line("all_reduce", 2, 2, 64, 0, floor_us=1.0, us=2.0, link=3_000_000)
    assert "link MB" not in table([without], with_measured=False)
    rows = table([without, exchanged], with_measured=True).splitlines()
    assert "link MB" in rows[0]
    assert rows[1].split()[6] == "0.000"
    assert rows[2].split()[6] == "3.000"
    assert rows[3].startswith("sum")
    assert rows[3].split()[6] == "3.000"


def test_a_rank_of_two_has_half_of_the_weights_and_links(capsys) -> None:
    """By --ranks, and by the engine's own flag."""
    for flag in ("--ranks", "-tp"):
        assert explain.main([str(TINY), "--decode", "8,64", flag, "2"]) == 0
        shown = capsys.readouterr().out
        assert "link MB" in shown
        assert "gather_columns" in shown
        assert "between ranks: 4 x sum in one shot of [8, 64] with the norm" in shown
        assert re.search(r"predicted on an NVIDIA H200: 0\.\d\d ms: launches .*links 0\.\d\d", shown)
    assert explain.main([str(TINY), "--decode", "8,64"]) == 0
    shown = capsys.readouterr().out
    assert "link MB" not in shown
    assert re.search(r"predicted on an NVIDIA H200: 0\.\d\d ms: launches 0\.\d\d, bandwidth 0\.\d\d\n", shown)


def test_tables_are_measured_for_the_parts_of_a_rank() -> None:
    options = RECIPE.options(device="cuda", tensor_parallel_size=2)
    shapes = shapes_of(Outline(RECIPE, Source.read(TINY), options, H200))
    assert [tuple(shape) for shape in shapes] == [
        ("norm_linear", 512, 64), ("linear_add", 64, 256), ("gate_up_silu", 128, 64),
        ("linear_add", 64, 64), ("logits", 256, 64),
    ]  # fmt: skip
