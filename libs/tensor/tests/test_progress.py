import io

import pytest

from openinfer.tensor import ProgressBar, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_quarter() -> None:
    log = io.StringIO()
    bar = ProgressBar(file=log)
    for done in range(1001):
        bar(done * 8_000_000, 8_000_000_000)
    lines = log.getvalue().splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines] == ["25 %", "50 %", "75 %", "100 %"]
    assert lines[0].startswith("loading weights  2.0/8.0 GB  ")


def test_a_terminal_gets_one_line_redrawn_seldom() -> None:
    terminal = Terminal()
    bar = ProgressBar("copying", terminal)
    for done in range(1001):
        bar(done, 1000)
    text = terminal.getvalue()
    assert text.endswith("[########################]\n")
    assert text.count("\n") == 1
    assert text.count("\r") < 100
    assert "copying  " in text


def test_nothing_to_do_is_done() -> None:
    log = io.StringIO()
    ProgressBar(file=log)(0, 0)
    assert log.getvalue().endswith("100 %\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (7_712_345, "7.71 MB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (16_381_470_720, "16.4 GB"),
        (-3e9, "-3 GB"),
        (1.2345e13, "12345 GB"),
    ],
)
def test_bytes_have_the_unit_that_fits(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_rate_of_little_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.1])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    log = io.StringIO()
    ProgressBar(file=log)(7_700_000, 7_700_000)
    assert log.getvalue() == "loading weights  7.7/7.7 MB  77 MB/s  100 %\n"


def test_a_log_hears_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    log = io.StringIO()
    bar = ProgressBar("asking", log, things="answers")
    for done in range(1, 22):
        bar(done, 1000)
    assert log.getvalue() == "asking  10/1000 answers  1 %\nasking  20/1000 answers  2 %\n"
