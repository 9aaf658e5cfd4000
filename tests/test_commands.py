"""Every shell command that a document shows is right: run as written, or checked as far as this machine can.

A command belongs to exactly one class of CLASSES, which says why it is not simply run. One that belongs to none fails.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "benchmarks/*.md",
        "libs/*/*.md",
        "recipes/**/*.md",
        "examples/*/*.md",
        "tools/*/*.md",
    )
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
PROGRAMS = (
    "make|curl|pip|python|pytest|openinfer|docker|nice|hf|git|pre-commit|export|npm|uvicorn|ruff|mypy|bash|sh"
)
SHELL = re.compile(rf"([A-Z_]+=\S+ )*(\S*/)?({PROGRAMS}|\w+\.sh)( .*|$)", re.S)
NOT_SHELL = re.compile(
    r"(ANTHROPIC|OPENAI)_BASE_URL=|pyproject\.toml |libs/<name>/|tensor +->|class |from |\[project|device = "
)
"""How indented blocks begin that are pictures, Python, TOML, or programs that `check_clients` runs."""
PLACES = {
    "MODEL_DIR": "demo/qwen3", "MODEL": "demo/qwen3", "DIR": "demo/qwen3", "demo/NAME": "demo/qwen3",
    "/models/Llama-3.2-1B-Instruct": "examples/llama/golden/llama-tiny", "Qwen/Qwen3-0.6B": "demo/qwen3",
    "Qwen/Qwen2.5-0.5B-Instruct": "examples/llama/golden/qwen2-tiny",
    "[fake|DIR]": "fake", "[MODEL_DIR|URL]": "demo/qwen3", "SECONDS": "600", "S": "1",
}  # fmt: skip
"""What stands for a word that a reader replaces."""


@dataclass(frozen=True)
class Command:
    """A command and where it is shown."""

    text: str
    path: Path
    line: int

    @property
    def words(self) -> list[str]:
        """As a shell splits it, after its variables, with something for what a reader replaces."""
        text = re.sub(
            r"\[([^]]*?)\]", lambda m: f"[{m[1].replace(' ', '')}]" if "|" in m[1] else m[0], self.text
        )
        return [PLACES.get(word, word) for word in shlex.split(text, comments=True)]

    def __str__(self) -> str:
        return f"{os.path.relpath(self.path, ROOT)}:{self.line}: {self.text}"


def commands_in(path: Path) -> list[Command]:
    """All commands of a document: of its blocks of shell, and of its code in sentences."""
    found: list[Command] = []
    prose: list[str] = []
    fence, before, kept = "", "", ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            fence = "" if fence else line[3:].strip() or "nothing"
            assert fence != "nothing", f"{path}:{number}: a block of code says which language it is"
        elif fence in ("sh", "bash") or (not fence and line.startswith("    ") and line.strip()):
            text = line.strip()
            indented = not fence
            if indented and not before.startswith("    "):
                assert (before, kept) == ("", ""), (
                    f"{path}:{number}: an empty line goes before a block of code"
                )
                shell = SHELL.fullmatch(text) is not None
                assert shell or NOT_SHELL.match(text), f"{path}:{number}: what kind of block is this? {text}"
            if fence or shell:
                kept = f"{kept} {text}".strip()
                if kept.endswith("\\"):
                    kept = kept[:-1].strip()
                else:
                    found += [Command(part, path, number) for part in parts(kept)]
                    kept = ""
        elif not fence:
            prose.append(line)
        before = line
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line in prose:
            spans = re.findall(r"`([^`]+)`", line.replace("\\|", "|"))
            found += [Command(span, path, number) for span in spans if SHELL.fullmatch(span) and " " in span]
    return found


def parts(text: str) -> list[str]:
    """The commands of a line: without its comment, cut where `;`, `&&` or two of them in columns end one."""
    text = re.sub(r"(^| +)# .*", "", text)
    pieces = re.split(r"; |&& ", text)
    return [piece.strip() for piece in pieces if piece.strip()]


@dataclass(frozen=True)
class Class:
    """Commands of one kind, and why they are not simply run."""

    pattern: str
    why: str


QUICK = "|".join(
    map(
        re.escape,
        (
            "openinfer serve --help",
            "openinfer explain MODEL_DIR",
            "openinfer plan demo/qwen3",
            "python -m openinfer.scheduler.sim",
        ),
    )
)
LONG = "|".join(
    map(
        re.escape,
        (
            "openinfer bench host",
            "openinfer bench eval demo/qwen3",
            "openinfer compile MODEL_DIR --arch 90",
            "python benchmarks/bench_host.py",
            "python benchmarks/bench_launch.py",
            "python benchmarks/bench_rows.py",
            "python benchmarks/bench_sample.py",
            "python libs/kvpool/benchmarks/bench_eviction.py",
            "python libs/kvpool/benchmarks/bench_pool.py",
            "python libs/scheduler/benchmarks/bench_loop.py",
            "python libs/frontend/benchmarks/requests.py",
        ),
    )
)
SCRIPT = r"(nice )?(\.venv-test/bin/)?python [\w/]+\.py( .*)?"
CLASSES = {
    "run": Class(QUICK, "it takes seconds on a CPU"),
    "run in make test-all": Class(LONG, "it takes up to some minutes on a CPU; make test parses it"),
    "named": Class(
        r"openinfer \w+|openinfer bench", "a sentence names it without what it needs; its --help answers"
    ),
    "parsed": Class(
        rf"openinfer (serve|chat|check|bench|compile|tune|explain|plan|selftest) .+|python -m openinfer\..+|{SCRIPT}",
        "it wants a GPU, a checkpoint, a network or minutes; its own parser takes its words",
    ),
    "collected": Class(
        r"(\.venv-test/bin/)?(python -m )?pytest .+",
        "its tests run in their own suites; its files, marks and names are there",
    ),
    "installed": Class(
        r"(OPENINFER_\w+=\S+ )?pip (install|wheel) .+",
        "it takes minutes and a network; folders, extras and siblings are those of pyproject.toml",
    ),
    "made": Class(r"(MODEL=DIR )?make [\w-]+", "it takes minutes; make knows the target"),
    "asked": Class(r"curl .+", "it is run against a server on a free port, not on 8000"),
    "contained": Class(
        r"(EXTRAS=\S+ )?docker .+",
        "it wants a daemon; its files, extras and the command in the image are right",
    ),
    "another program's": Class(
        r"hf download .+|pre-commit install|python -m dynamo\.indexer .+",
        "no environment of this project has it",
    ),
    "there": Class(
        r"tools/demo_models/train_all\.sh .+|export PYTHONPATH=.+",
        "it wants a GPU with torch; its files are there",
    ),
}
ALL = [command for path in DOCUMENTS for command in commands_in(path)]


def class_of(command: Command) -> str:
    """The name of its class. What is run, or only named, needs no other check."""
    first = ("run", "run in make test-all", "named")
    matching = [name for name, one in CLASSES.items() if re.fullmatch(one.pattern, command.text, re.S)]
    chosen = [name for name in matching if name in first] or matching
    assert len(chosen) == 1, (
        f"{command}: the classes {chosen} fit; it needs exactly one in tests/test_commands.py"
    )
    return chosen[0]


def of_class(*names: str) -> list[Command]:
    """Commands of these classes, each text once."""
    return list({c.text: c for c in ALL if class_of(c) in names}.values())


def folder_of(command: Command) -> Path:
    """Where a reader runs it: in the checkout, or in the library whose README shows it."""
    files = [word for word in command.words if word.endswith((".py", "/tests")) and "=" not in word]
    own = command.path.parent
    return own if files and not (ROOT / files[0]).exists() and own != ROOT / "docs" else ROOT


def run(command: Command, folder: Path, **replaced: str) -> subprocess.CompletedProcess[str]:
    """Run a command as written, with this environment's programs."""
    text = command.text
    for old, new in {"MODEL_DIR": str(ROOT / "demo/qwen3"), **replaced}.items():
        text = text.replace(old, new)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OPENINFER_CACHE": str(folder)}
    return subprocess.run(
        ["bash", "-ec", text], cwd=folder_of(command), env=env, capture_output=True, text=True
    )


def test_every_command_is_of_one_class(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter(map(class_of, ALL))
    with capsys.disabled():
        print(
            "\ncommands that documents show:", ", ".join(f"{n} {name}" for name, n in counts.items()), end=""
        )
    assert set(counts) == set(CLASSES), "a class without a command"
    assert len(ALL) > 100


def test_what_is_not_a_command_or_of_no_class_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("Text.\n\n    cargo build\n", "Text.\n    make serve\n", "```\nmake serve\n```\n"):
        page.write_text(text)
        with pytest.raises(AssertionError):
            commands_in(page)
    page.write_text(
        "`openinfer serve DIR --nothing`, `git push home`\n\n```sh\nmake a; make b  # both\n```\n"
    )
    found = commands_in(page)
    assert [one.text for one in found] == [
        "make a",
        "make b",
        "openinfer serve DIR --nothing",
        "git push home",
    ]
    with pytest.raises(AssertionError, match="exactly one"):
        class_of(found[-1])
    bad, missing = parse_alone(
        [(found[2].words, str(ROOT)), (["python", "benchmarks/nothing.py"], str(ROOT))]
    )
    assert "unrecognized arguments: --nothing" in bad
    assert "FileNotFoundError" in missing


@pytest.mark.parametrize("command", of_class("run"), ids=str)
def test_it_runs(command: Command, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", of_class("run in make test-all"), ids=str)
def test_it_runs_for_longer(command: Command, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr


def test_parsers_take_their_words() -> None:
    parsed = of_class("parsed", "run in make test-all")
    named = of_class("named")
    commands = [(python_first(c.words), str(folder_of(c))) for c in parsed]
    commands += [([*c.words, "--help"], str(ROOT)) for c in named]
    faults = parse_alone(commands)
    assert [f"{c}: {fault}" for c, fault in zip([*parsed, *named], faults, strict=True) if fault] == []


def python_first(words: list[str]) -> list[str]:
    """Without `nice` and the folder of Python."""
    words = words[words[0] == "nice" :]
    return ["python" if words[0].endswith("/python") else words[0], *words[1:]]


@pytest.mark.parametrize("command", of_class("collected"), ids=str)
def test_pytest_finds_tests(command: Command) -> None:
    words = python_first(command.words)
    options = words[words.index("pytest") + 1 :]
    paths = [ROOT / word for word in options if "/" in word]
    assert paths
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    names = " ".join(
        name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.M)
    )
    marks = "".join(file.read_text() for file in files)
    for option, value in itertools.pairwise(options):
        for word in value.split(" or ") if option in ("-k", "-m") else ():
            found = word in names if option == "-k" else f"mark.{word.removeprefix('not ')}" in marks
            assert found, f"{command}: no test has {word!r}"


def distributions() -> dict[str, dict[str, Any]]:
    """Each distribution of this checkout: its folder, and what it and its extras want of its siblings."""
    found = {}
    for file in ROOT.glob("**/pyproject.toml"):
        if not any(part.startswith(".") for part in file.relative_to(ROOT).parts):
            project = tomllib.loads(file.read_text())["project"]
            wants = {"": project["dependencies"], **project.get("optional-dependencies", {})}
            found[project["name"]] = {"folder": file.parent, "wants": wants}
    return found


@pytest.mark.parametrize("command", of_class("installed"), ids=str)
def test_what_is_installed_is_there(command: Command) -> None:
    there = distributions()
    names = {project["folder"]: name for name, project in there.items()}
    given: dict[str, set[str]] = {}
    words = iter(command.words[command.words.index("pip") + 2 :])
    for word in words:
        if word == "-c":
            assert (ROOT / next(words)).exists()
        elif word.startswith("."):
            folder, _, extras = word.rstrip("]").partition("[")
            folders = (
                [path for path in ROOT.glob(folder.removeprefix("./")) if path.is_dir()]
                if folder != "."
                else [ROOT]
            )
            assert folders, f"{command}: no folder {folder}"
            for path in folders:
                given.setdefault(names[path], {""}).update(filter(None, extras.split(",")))
        elif not word.startswith("-"):
            assert not word.startswith("openinfer"), f"{command}: no index has {word} before the release"
    if "--no-deps" in command.words:
        return
    for name, extras in list(given.items()):
        for extra in extras:
            assert extra in there[name]["wants"], f"{command}: {name} has no [{extra}]"
            wanted = {Requirement(text).name for text in there[name]["wants"][extra]} & set(there)
            assert wanted <= set(given), f"{command}: {name} needs {wanted - set(given)} on the same line"


@pytest.mark.parametrize("command", of_class("made"), ids=str)
def test_make_knows_the_target(command: Command) -> None:
    variables, target = command.words[:-2], command.words[-1]
    done = subprocess.run(
        ["make", "-n", target, *variables], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout


def test_the_question_of_the_readme_is_answered(start: Any) -> None:
    (asked,) = of_class("asked")
    server = start(ROOT / "demo" / "qwen3")
    done = run(asked, ROOT, **{"http://127.0.0.1:8000": server.url})
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_ranks_of_the_readme_serve(start: Any) -> None:
    (command,) = (c for c in of_class("parsed") if "-tp" in c.words and "demo/deepseek_v4" in c.words)
    folder, *flags = command.words[2:]
    server = start(ROOT / folder, *flags)
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("command", of_class("contained"), ids=str)
def test_images_are_built_and_run_as_they_can_be(command: Command) -> None:
    words = command.words
    for option, file in itertools.pairwise(words):
        assert option != "-f" or (ROOT / file).exists(), file
    for extras in re.findall(r"EXTRAS=(\S+)", command.text):
        assert set(extras.split(",")) <= set(distributions()["openinfer-cli"]["wants"])
    if "run" in words and words[-1] != "openinfer":
        inside = ["demo/qwen3" if word == "/model" else word for word in words[words.index("openinfer") :]]
        assert parse_alone([(inside, str(ROOT))]) == [""]


@pytest.mark.parametrize("command", of_class("there"), ids=str)
def test_the_files_that_it_names_are_there(command: Command) -> None:
    files = re.findall(r"[\w.]+/[\w/.]+", command.text)
    assert files
    for file in files:
        assert (ROOT / file).exists(), file


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "The capital of France is Paris.\n"


def parse_alone(commands: list[tuple[list[str], str]]) -> list[str]:
    """What the real parsers say against the words of each command (in that folder); "" where they take them."""
    script = Path(__file__).with_name("parse_commands.py")
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_the_parts_of_your_own_pass_their_suites(tmp_path: Path) -> None:
    """The programs of docs/parts.md, written to the files that their first lines name."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "docs" / "parts.md").read_text(), re.S)
    assert len(blocks) == 5
    for name, code in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    tests = [name for name, code in blocks if "class Test" in code]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
