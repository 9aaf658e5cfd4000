"""`openinfer explain` shows the bytes that go to other ranks, where there are any."""

from __future__ import annotations

from openinfer.cli.explain import Line, table


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
