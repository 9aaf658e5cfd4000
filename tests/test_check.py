"""openinfer check: what a checkpoint is, and every reason why it does not load, from its headers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openinfer.cli import main

DEMO = Path(__file__).parent.parent / "demo" / "qwen3"
HUB = """
import json
from pathlib import Path
from types import SimpleNamespace
FOLDER = Path({folder!r})
def snapshot_download(name, revision, allow_patterns):
    assert "*.safetensors" not in allow_patterns and revision == "v1"
    return FOLDER
def get_safetensors_metadata(name, revision):
    raw = Path({weights!r}).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    tensors = {{name: SimpleNamespace(**one) for name, one in header.items()}}
    return SimpleNamespace(files_metadata={{"model.safetensors": SimpleNamespace(tensors=tensors)}})
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for file in DEMO.iterdir():
        target = tmp_path / file.name
        target.symlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, target)
    return tmp_path


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_checkpoint_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DEMO), "--gpu-memory", "24", "--max-num-seqs", "8"]) == 0
    text = capsys.readouterr().out
    for words in ("qwen3, for model_type 'qwen3'", "in 68 tensors of 1 files: bfloat16", "2048 tokens\n",
                  "memory of 24 GB", "cache: kv", "it loads"):  # fmt: skip
        assert words in text


def test_all_reasons_are_said_at_once(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "mscale": 1.0}
    change(copy / "config.json", rope_scaling=rope)
    (copy / "tokenizer.json").unlink()
    assert main(["check", str(copy)]) == 1
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2
    assert "mscale and mscale_all_dim must be given together" in refused[0]
    assert "tokenizer.json does not exist" in refused[1]
    change(copy / "config.json", rope_scaling=None, num_hidden_layers=9)
    shutil.copy(DEMO / "tokenizer.json", copy)
    assert main(["check", str(copy)]) == 1
    assert "missing: model.layers." in capsys.readouterr().out
    (copy / "model.safetensors").unlink()
    assert main(["check", str(copy)]) == 1
    assert "refused: " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["check", "nowhere"], ["check", str(DEMO), "--revision", "v1"]])
def test_what_is_no_checkpoint_ends_in_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("openinfer check: error: ")


def test_a_name_of_the_hub_costs_headers_only(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    weights, module = (copy / "model.safetensors").resolve(), tmp_path_factory.mktemp("hub")
    (copy / "model.safetensors").unlink()
    (module / "huggingface_hub.py").write_text(HUB.format(folder=str(copy), weights=str(weights)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(module), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "openinfer.cli", "check", "Some/Qwen3", "--revision", "v1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Some/Qwen3\n")
    assert "68 tensors" in done.stdout
    assert done.stdout.endswith("it loads\n")


def test_a_repository_without_weights_to_read_ends_in_one_line(copy: Path, tmp_path_factory: Any) -> None:
    module = tmp_path_factory.mktemp("hub")
    body = HUB.format(folder=str(copy), weights="x").partition("def get_safetensors")[0]
    body += "class NotASafetensorsRepoError(Exception): pass\n"
    body += "def get_safetensors_metadata(name, revision): raise NotASafetensorsRepoError(name)\n"
    (module / "huggingface_hub.py").write_text(body)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(module), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "openinfer.cli", "check", "Some/Qwen3", "--revision", "v1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "NotASafetensorsRepoError: Some/Qwen3" in line) == (1, True)
