"""Checkpoints whose files beside the weights are damaged: one line, always, and soon."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend import FlagError, ModelFilesError, is_users_error, one_line, render_pool
from openinfer.frontend.chat.parts import template_spec
from openinfer.frontend.render_pool import RenderPool

pytestmark = pytest.mark.attack

SCRIPT = [sys.executable, str(Path(__file__).parent / "fake_recipe.py")]
NESTED = "{% if true %}" * 3000 + "x" + "{% endif %}" * 3000


def refused(model_dir: Path, *flags: str) -> str:
    """The one line of a start that fails."""
    command = [*SCRIPT, str(model_dir), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    assert "\x1b" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fake_recipe: error: ")
    return last


def write_template(model_dir: Path, template: Any) -> None:
    path = model_dir / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": template}))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NESTED, "template cannot be used"),
        pytest.param("{" * 5000 + "}" * 5000, "template cannot be used", marks=pytest.mark.slow),
        ("{{ 'x' * 10 ** 11 }}{% set", "template cannot be used"),
        ("{% if %}", "does not compile"),
        (3, "it must be a string"),
        (["x"], ""),
        pytest.param([{"name": "default", "template": 5}], "it must be a string", marks=pytest.mark.slow),
        pytest.param([{"name": []}], "", marks=pytest.mark.slow),
    ],
    ids=range(8),
)
def test_templates_of_a_wrong_form(model_dir: Path, template: Any, reason: str) -> None:
    write_template(model_dir, template)
    if reason:
        assert reason in refused(model_dir, "--start-delay", "3600")  # the engine is not waited for
        return
    process = subprocess.Popen([*SCRIPT, str(model_dir), "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("no chat template" in line for line in process.stderr)  # as where there is none
    process.kill()
    process.communicate()


def test_a_template_that_loops_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_pool, "START_TIMEOUT_S", 0.5)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    pool = RenderPool(template_spec(loop, {}))
    with pytest.raises(ModelFilesError, match=r"not ready after .* it seems to loop"):
        asyncio.run(pool.start())


def test_pipes_and_nested_json_are_no_files(model_dir: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"):
        path = model_dir / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        assert "no regular file" in refused(model_dir)
        path.unlink()
        if name.endswith(".json"):
            path.write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
            assert f"{name} is not JSON" in refused(model_dir)
        path.unlink(missing_ok=True)
        if kept is not None:
            path.write_bytes(kept)


def test_a_line_has_nothing_that_a_terminal_obeys() -> None:
    line = one_line(FlagError("tensor a\x1b[31m\x07b\r\nc: \ud800 ok"))
    assert line == r"tensor a\x1b[31m\x07b c: \ud800 ok"


def test_only_errors_that_say_so_are_the_users() -> None:
    assert is_users_error(FlagError("x"))
    assert is_users_error(FileNotFoundError("x"))
    assert not is_users_error(ValueError("operands could not be broadcast together"))
    assert not is_users_error(FlagError(""))
