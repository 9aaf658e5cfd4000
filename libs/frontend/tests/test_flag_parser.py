"""Flags in any order, from a file, and what is said of those that are not there."""

import argparse
import re
from pathlib import Path

import pytest

from openinfer.frontend import FlagError
from openinfer.frontend.flag_parser import NOT_POSSIBLE, FlagParser, merge
from openinfer.frontend.flag_types import check_plan, number, strings, tokens
from openinfer.frontend.server_flags import server_parser
from openinfer.frontend.vllm_flags import VLLM_FLAGS


@pytest.fixture
def parser() -> FlagParser:
    made = FlagParser("serve")
    made.add_argument("model")
    made.add_argument("--config")
    made.add_argument("--port", type=int, default=1)
    made.add_argument("--part", type=float, default=0.5)
    made.add_argument("--name", nargs="+", default=[])
    made.add_argument("--origins", type=strings, default=[])
    made.add_argument("--eager", action="store_true")
    made.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
    return made


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("m --port 2", 0),
        ("--port 2 m", 2),
        ("--port=2 m", 1),
        ("--eager m", 1),
        ("--no-cache m --port 2", 1),
        ("--name a b --eager m", 4),
        ("--port 2", None),
        ("--name a b", None),
        ("", None),
    ],
)
def test_the_model_is_found_among_flags(parser: FlagParser, words: str, place: int | None) -> None:
    assert parser.position(words.split()) == place


def test_a_file_gives_flags_and_the_command_line_counts_for_more(parser: FlagParser, tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text(
        'model = "m"\nport = 2\nname = ["a", "b"]\norigins = ["*"]\neager = true\ncache = false\n'
    )
    args = parser.parse_args(["--config", str(file), "--port", "3"])
    assert (args.model, args.port, args.name, args.origins) == ("m", 3, ["a", "b"], ["*"])
    assert (args.eager, args.cache) == (True, False)
    assert parser.parse_args([f"--config={file}", "other"]).model == "other"
    file.write_text("eager = false\ncache = true\n")
    args = parser.parse_args(["m", "--config", str(file)])
    assert (args.eager, args.cache) == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 2", "it is TOML, a line a flag"),
        ("prot = 2", "unrecognized arguments: --prot; did you mean --port?"),
        ("swap-space = 4", "--swap-space is a flag of vLLM that openinfer does not have"),
        ("[server]\nport = 2", "unrecognized arguments: --server"),
        ("[port]\nport = 2", "port is a table"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(
    parser: FlagParser, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flags.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["m", "--config", str(tmp_path / "flags.toml")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert message in line


@pytest.mark.attack
@pytest.mark.parametrize(
    "words",
    [
        ["--allowed-origins", "[" * 100_000],
        ["--default-chat-template-kwargs", '{"a":' * 100_000],
        ["--default-chat-template-kwargs", "\x1b[2J\n"],
        ["--served-model-name", ""],
        ["--served-model-name", "a", " "],
        ["--served-model-name", "a\x1b[2J\nb"],
        ["--served-model-name", "a\x9b2J"],
        ["--served-model-name", "x" * 300],
        ["--shutdown-timeout", "nan"],
        ["--shutdown-timeout", "1e300"],
        ["--engine-hang-timeout", "-1"],
        ["--port", "9" * 5000],
        ["--frontends", "1e3"],
        ["--no-such\x1b[2J"],
        ["--otlp-traces-endpoint", "\x1b"],
    ],
    ids=range(15),
)
def test_absurd_values_are_refused_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        server_parser("serve", "").parse_args(["m", *words])
    assert ended.value.code == 2
    assert re.fullmatch(r"serve: error: [^\x00-\x1f\x7f-\x9f]{1,1300}\n", capsys.readouterr().err)


def test_a_plan_and_a_file_of_flags_that_are_nested_are_refused(
    parser: FlagParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("a = " + "[" * 100_000)
    with pytest.raises(SystemExit):
        parser.parse_args(["m", "--config", str(tmp_path / "file")])
    assert "it is TOML, a line a flag" in capsys.readouterr().err
    (tmp_path / "file").write_text("[" * 100_000)
    with pytest.raises(FlagError, match="this is no file of"):
        check_plan(tmp_path / "file")


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_numbers_that_json_has_not_are_refused(
    parser: FlagParser, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["m", f"--part={word}"])
    assert f"argument --part: {word} is not a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--swap-space 4 --port 2 --no-eager -O3 m",
            [
                "flags of vLLM that openinfer does not have: --swap-space (preempted requests",
                "; --no-eager (it is the default; leave it out); -O3 (kernels are compiled",
            ],
        ),
        ("--compilation-config.mode 3 m", ["--compilation-config.mode is a flag of vLLM"]),
        ("--origins.x 3 m", ["give all of --origins in one JSON text"]),
        (
            "--prot 2 --seed 0 --port -1 m",
            ["--seed is a flag of vLLM", "unrecognized arguments: --prot; did you mean --port?"],
        ),
    ],
)
def test_all_flags_that_are_not_here_are_told_at_once(
    parser: FlagParser, words: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for act in (parser.position, parser.parse_args):
        with pytest.raises(SystemExit):
            act(words.split())
        (line,) = capsys.readouterr().err.splitlines()
        assert [text for text in told if text not in line] == []


def test_flags_with_underscores_are_the_same_flags(parser: FlagParser) -> None:
    parser.add_argument("--max-len", type=int)
    words = parser.with_config(["m", "--max_len=3", "--name", "a_b"])
    assert parser.position(words) == 0
    args = parser.parse_args(words)
    assert (args.max_len, args.name) == (3, ["a_b"])
    together = ["--compare", "--speeds /tmp/a_b.json"]  # a value that has flags of its own
    assert parser.with_config(together) == together


def test_a_choice_that_is_not_there_is_refused_with_the_flags_help(
    parser: FlagParser, capsys: pytest.CaptureFixture[str]
) -> None:
    parser.add_argument("--quant", choices=("fp8",), help="packed checkpoints need no flag")
    with pytest.raises(SystemExit):
        parser.parse_args(["m", "--quant", "awq"])
    assert (
        "argument --quant: awq is not one of fp8 (packed checkpoints need no flag)" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "value"), [("32k", 32_000), ("1K", 1024), ("1.5k", 1500), ("4G", 1 << 32), ("7", 7)]
)
def test_numbers_may_have_the_units_of_vllm(text: str, value: int) -> None:
    assert number(text) == tokens(text) == value


def test_a_number_that_is_none_is_refused() -> None:
    assert tokens("auto") is tokens("-1") is None
    for text in ("", "k", "1.5", "4GiB", "1e400k", "nank"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number, which may end in k, m, g"):
            number(text)


def test_flags_of_several_parsers_are_listed_once(parser: FlagParser) -> None:
    others = {name: argparse.ArgumentParser(add_help=False) for name in ("a", "b", "c")}
    for name, other in others.items():
        other.add_argument("--same", help="as ever")
        other.add_argument("--often", help="odd" if name == "a" else "usual")
        other.add_argument("--refused", help=f"{NOT_POSSIBLE}because" if name in "ac" else "what it does")
    others["c"].add_argument("--rare", help="seldom")
    merge(parser, others)
    text = " ".join(parser.format_help(engine=True).split())
    assert "--same TEXT as ever" in text
    assert "--often TEXT usual; a: odd" in text
    assert "--rare TEXT only c: seldom" in text
    assert "--refused TEXT what it does; not a, c" in text


def test_no_flag_of_the_server_is_refused_as_vllms() -> None:
    from openinfer.frontend.server_flags import server_parser

    assert not VLLM_FLAGS.keys() & set(server_parser("serve", "")._option_string_actions)
