"""What the package shows, what importing it costs and needs, and that the README is true."""

import subprocess
import sys
import types

import pytest

import openinfer.frontend
import openinfer.frontend.http
from openinfer.frontend import chat, server_flags


@pytest.mark.parametrize("module", [openinfer.frontend, openinfer.frontend.http])
def test_all_is_sorted_and_nothing_leaks(module: types.ModuleType) -> None:
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:  # those of openinfer.frontend come when they are asked for
        getattr(module, name)
    visible = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert visible == set(module.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Egnine'"):
        openinfer.frontend.Egnine  # noqa: B018


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_base_imports_no_web_framework() -> None:
    loaded = python(
        "import sys, openinfer.frontend, openinfer.frontend.serve, openinfer.frontend.testing\n"
        "print(*[name for name in ('starlette', 'uvicorn', 'tokenizers', 'jinja2', 'prometheus_client', 'zmq')"
        " if name in sys.modules])\n"
        "import openinfer.frontend.http; print('starlette' in sys.modules, 'jinja2' in sys.modules)"
    )
    assert loaded == "True False"


def test_the_command_line_knows_the_formats_without_importing_them() -> None:
    assert tuple(chat.TOOL_FORMATS) == server_flags.TOOL_PARSERS
    assert server_flags.REASONING_PARSERS == chat.REASONING_FORMATS


def test_the_client_loads_little() -> None:
    code = "import sys; before = len(sys.modules); import openinfer.frontend.client; print(len(sys.modules) - before)"
    assert int(python(code)) < 200  # asyncio alone has a hundred


@pytest.mark.parametrize(
    ("missing", "module", "extra"),
    [
        ("starlette", "openinfer.frontend.http", "http"),
        ("prometheus_client", "openinfer.frontend.http", "http"),
        ("opentelemetry", "openinfer.frontend.http.admin.tracing", "otel"),
        ("zmq", "openinfer.frontend.process_driver", "process"),
    ],
)
def test_a_missing_extra_names_the_command(missing: str, module: str, extra: str) -> None:
    message = python(
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"try: import {module}\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    assert message.startswith("MissingExtraError")
    assert message.endswith(f"pip install 'openinfer-frontend[{extra}]'")
