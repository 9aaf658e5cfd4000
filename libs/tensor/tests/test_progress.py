import io

from openinfer.tensor import ProgressBar


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
