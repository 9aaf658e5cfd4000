"""The command `openinfer`, as a user runs it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from openinfer import cli
from openinfer.cli import recipes
from openinfer.frontend import is_users_error
from openinfer.kernels.store import cubins

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"


def openinfer(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openinfer.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_help_and_version_import_little() -> None:
    code = (
        "import sys; from openinfer.cli import main; main(['--help']); main(['--version']); main(['serv']); "
        "main(['serve', '--help']); "
        "bad = {'numpy', 'asyncio', 'msgspec', 'openinfer.tensor'} & set(sys.modules); assert not bad, bad; "
        "assert len(sys.modules) < 260, len(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_who_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "openinfer.cli", "serve", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_another_pipe_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_worker(argv: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("openinfer.cli.serve.main", lose_a_worker)
    with pytest.raises(BrokenPipeError):
        cli.main(["serve"])


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("openinfer.cli.plan.main", interrupted)
    assert cli.main(["plan"]) == 130


def test_help_names_every_command() -> None:
    text = openinfer("--help").stdout
    assert openinfer().stdout == text
    for command in ("serve", "compile", "bench", "explain", "selftest"):
        assert re.search(rf"^  {command} ", text, re.M)


def test_version_lists_every_part() -> None:
    lines = openinfer("--version").stdout.splitlines()
    assert len(lines) == 9
    for line in lines:
        assert re.fullmatch(r"openinfer(-[a-z]+)? +\d+\.\d+\.\d+", line)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "bench"])
def test_help_fits_a_screen_or_two(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    said = capsys.readouterr().out.splitlines()
    assert 10 < len(said) <= 60


def test_serve_help_has_the_flags_of_the_server_and_of_the_recipe() -> None:
    text = openinfer("serve", "--help").stdout
    assert max(map(len, text.splitlines())) <= 120
    assert text.index("openinfer serve demo/qwen3") < text.index("--port")
    assert "--help-engine lists the flags of the engine" in text
    text += openinfer("serve", "--help-engine").stdout
    assert re.search(r"--snapshot-interval N\s+only qwen3_5:", text)
    assert re.search(r"--block-size .*\n?\s+tokens of a cache page; .*; not deepseek_v4", text)
    assert re.search(r"--batch-invariant\s+one kernel an op", text)
    for flag in ("--port", "--api-key", "--max-model-len", "--enforce-eager"):
        assert flag in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serv"], 2, "unknown command 'serv'; did you mean 'serve'?"),
        (
            ["quantize"],
            2,
            "unknown command 'quantize'; there are serve, chat, compile, bench, tune, plan, check, explain, selftest",
        ),
        (["serve"], 2, "no model is given: openinfer serve MODEL [flags]"),
        (["serve", "--port", "1"], 2, "no model is given: openinfer serve MODEL [flags]"),
        (
            ["serve", str(TINY), "--max-model-length", "3"],
            2,
            "unrecognized arguments: --max-model-length 3; did you mean --max-model-len?",
        ),
        (["serve", str(TINY), "--snapshot-interval", "64"], 2, "unrecognized arguments: --snapshot-interval"),
        (
            ["serve", "-pp", "2", str(TINY)],
            2,
            (
                "-pp is a flag of vLLM that openinfer does not have: GPUs share a model by --tensor-parallel-size; "
                "leave it out"
            ),
        ),
        (["serve", "--no-enable-chunked-prefill", str(TINY)], 2, "it is always on; leave it out"),
        (["serve", "--config", "/nowhere.toml"], 2, "--config /nowhere.toml: [Errno 2]"),
        (["serve", "--port", "0", "--revision", "v1", str(TINY)], 1, "is a folder, not a name of the hub"),
        (["serve", "--port=0", "--max-model-len", "0", str(TINY)], 1, "--max-model-len"),
        (["explain", "--max-model-len", "x", str(TINY)], 2, "--max-model-len: x is not a number"),
        (
            ["serve", "/no/where"],
            1,
            "/no/where is not there: MODEL is the folder of a checkpoint, or a name of the hub",
        ),
        (["serve", "demo"], 1, "demo has no config.json: did you mean "),
        (["compile", str(TINY)], 2, "the following arguments are required: --arch"),
        (["chat", "--sytem", "x"], 2, "unrecognized arguments: --sytem; did you mean --system?"),
        (["bench", "serve", "--rate", "1"], 2, "unrecognized arguments: --rate; did you mean --rates?"),
        (["selftest", "--out", "/dev/null/x"], 2, "--out and --work are folders that can be made"),
        (["compile", str(TINY), "--arch", "75"], 1, "--arch 75: known are 80, 86, 89, 90, 100, 120"),
    ],
)
def test_wrong_arguments(
    main: Callable[..., tuple[int, str]], arguments: list[str], code: int, message: str
) -> None:
    found, errors = main(*arguments)
    assert found == code
    assert message in errors
    assert "Traceback" not in errors


def test_a_model_that_nobody_serves_is_refused_with_the_list_of_recipes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba9"}))
    for command in (["serve", str(tmp_path)], ["compile", str(tmp_path), "--arch", "90"]):
        done = openinfer(*command)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert "no recipe serves model_type 'mamba9'" in line
        assert "qwen3" in line.partition("installed: ")[2]


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        ([], "", "has no config.json: it is empty; a checkpoint has config.json"),
        (["a.txt", "b"], "", "has no config.json: it has a.txt, b; a checkpoint has"),
        (["q.gguf"], "", "has no config.json: it has q.gguf; a checkpoint has config.json"),
        (
            ["q.gguf"],
            "q.gguf",
            "is a file: give the folder with config.json and *.safetensors, or a *.gguf file",
        ),
        (["m.safetensors"], "m.safetensors", "is a file: give the folder with config.json and"),
        (["adapter_config.json"], "", "it is an adapter (LoRA): give its model, and --enable-lora"),
        (["one/config.json", "two/config.json"], "", "one or "),
        ([], "no where", "is not there: MODEL is the folder"),
    ],
)
def test_a_path_without_a_checkpoint_is_told_with_what_to_give(
    tmp_path: Path, files: list[str], given: str, message: str
) -> None:
    folder = tmp_path / "mödel ✓"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(recipes.NoRecipe, match=re.escape(message)) as refused:
        recipes.find(folder / given)
    assert str(folder) in str(refused.value)


def test_a_model_of_the_examples_is_told_where_its_recipe_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(recipes, "installed", list)
    with pytest.raises(recipes.NoRecipe, match=r"pip install \./examples/llama"):
        recipes.find(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    done = openinfer("serve", str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "config.json" in line


def test_another_distributions_recipe_is_found(tmp_path: Path) -> None:
    site, model = tmp_path / "site", tmp_path / "model"
    (site / "toy-1.0.dist-info").mkdir(parents=True)
    (site / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (site / "toy-1.0.dist-info" / "entry_points.txt").write_text("[openinfer.recipes]\ntoy = toy:RECIPE\n")
    (site / "toy.py").write_text(
        "class Toy:\n"
        "    name = 'toy'\n"
        "    def matches(self, config): return config.get('model_type') == 'toy'\n"
        "    def add_arguments(self, parser): parser.add_argument('--toys', type=int, default=1)\n"
        "    def engine_spec(self, model_dir, args): raise ValueError(f'{args.toys} toys wanted')\n"
        "RECIPE = Toy()\n"
    )
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "toy"}))
    done = openinfer("serve", str(model), "--toys", "7", PYTHONPATH=str(site))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("7 toys wanted")


FEW = ["--max-num-seqs", "1", "--max-num-batched-tokens", "1"]


def compiled_twice(run: Callable[[str], str], folder: Path) -> None:
    """`openinfer compile` by `run`, which is given the cache and returns what was printed: twice, the second time
    without work."""
    found = []
    for _ in range(2):
        line = re.search(
            r"^(\d+) kernels for sm_90 in .*, (\d+) of them compiled now", run(str(folder)), re.M
        )
        assert line is not None
        found.append((int(line[1]), int(line[2])))
    kernels = found[0][0]
    assert kernels > 0
    assert found == [(kernels, kernels), (kernels, 0)]
    assert len(list(folder.rglob("*.cubin"))) == kernels


def test_compile_fills_a_cache_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With workers that answer without compiling."""
    pytest.importorskip("triton")
    facts = {"name": "f", "shared": 0, "num_warps": 4, "num_ctas": 1, "tensor_maps": []}

    def answers(keys: Mapping[str, Any], arch: int) -> Iterator[dict[str, Any]]:
        assert arch == 90
        return ({"key": key, "meta": facts, "cubin": "AAAA"} for key in keys)

    def run(folder: str) -> str:
        assert cli.main(["compile", str(TINY), "--arch", "90", *FEW, "--out", folder]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(cubins, "_run_workers", answers)
    compiled_twice(run, tmp_path / "cache")


@pytest.mark.slow
def test_compile_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton")

    def run(folder: str) -> str:
        done = openinfer("compile", str(TINY), "--arch", "90", *FEW, "--out", folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    compiled_twice(run, tmp_path / "cache")


def test_a_selftest_without_a_driver_says_so_in_one_line(tmp_path: Path) -> None:
    done = openinfer("selftest", "--only", "device", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert re.match(r"device: FAILED in [\d.]+ s: .*(driver|CUDA)", line)


@pytest.mark.parametrize(
    "name",
    [
        "tensor:CheckpointError", "tensor:OutOfMemory", "tensor:DeviceError", "tensor:DriverNotFound",
        "kernels:KernelMissing", "kernels:InvalidTable", "kernels:UntrustedCache", "kernels:MissingExtra",
        "scheduler:InvalidSetup", "sampler:InvalidParams", "sampler:InvalidGrammar", "sampler:MissingExtra",
        "frontend:ModelFilesError", "frontend:EngineStartError", "frontend:MissingExtraError",
        "recipes.engine:SetupError", "recipes.engine:UnsupportedModel", "cli.recipes:NoRecipe",
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_one_line_whichever_library_says_so(name: str) -> None:
    module, _, kind = name.partition(":")
    error = getattr(importlib.import_module(f"openinfer.{module}"), kind)
    assert error.user_can_mend
    assert is_users_error(type("Any", (error,), {"__init__": lambda self: None, "__str__": lambda _: "x"})())


def test_a_name_of_the_hub_is_downloaded_and_served_under_that_name(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text(
        "def snapshot_download(name, revision, allow_patterns):\n"
        "    assert '*.safetensors' in allow_patterns\n"
        f"    print(name, revision)\n    return {str(tmp_path)!r}\n"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba9"}))
    done = openinfer("serve", "--revision", "v1", "Some/Mamba", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "Some/Mamba v1\n")
    assert "no recipe serves model_type 'mamba9'" in done.stderr


def test_a_demo_model_outside_a_checkout_is_named_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "__file__", "/site/openinfer/cli/recipes.py")
    assert recipes.checkpoint("demo/none") == Path("demo/none")
    with pytest.raises(
        recipes.NoRecipe, match=r"^demo/none is not there: .*; demo models come with a checkout"
    ):
        recipes.find(Path("demo/none"))


def test_the_advised_compiler_is_the_tested_one() -> None:
    constraints = (Path(__file__).parents[1] / "constraints.txt").read_text()
    assert f"\ntriton=={cubins.TESTED_TRITON}\n" in constraints


@pytest.mark.parametrize("source", ["raise ImportError", ""])
def test_a_hub_that_does_not_answer_ends_in_one_line_that_says_what_to_do(
    tmp_path: Path, source: str
) -> None:
    body = "def snapshot_download(*args, **flags): raise OSError('no\\nconnection')\n"
    (tmp_path / "huggingface_hub.py").write_text(body if not source else f"{source}\n")
    done = openinfer("serve", "Some/Mamba", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert len(line) < 400
    assert (
        "pip install 'openinfer-cli[hub]'" if source else "hf download Some/Mamba --local-dir Mamba"
    ) in line
