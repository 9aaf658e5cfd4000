"""The Qwen3 recipe behind `openinfer serve`, over a real socket: tokens, concurrency, start-up errors."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_streams import check_greedy_tokens, check_streams, mixed

from openinfer.kernels.testing import of_the_day

TINY = Path(__file__).parent / "goldens" / "qwen3-tiny"
FLAGS = ("--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", str(64 << 20))


def test_greedy_tokens_are_the_goldens(golden: Any, start: Callable[..., Any]) -> None:
    check_greedy_tokens(start(golden.path).url, golden)


def test_the_log_alarms_no_one_on_a_cpu_and_gives_small_weights_in_kilobytes(
    tiny: Any, start: Callable[..., Any]
) -> None:
    server = start(tiny.path)
    log = "".join(server.log).partition(" ready on ")[0]
    assert re.search(r"^INFO openinfer\.engine: weights: [\d.]+ kB at [\d.]+ [kMG]B/s$", log, re.M)
    assert not re.search(r"^(WARNING|ERROR|CRITICAL)|\b0\.0 GB", log, re.M)


def test_text_chat_and_a_batch_of_prompts(tiny: Any, start: Callable[..., Any]) -> None:
    url = start(tiny.path).url
    with httpx.Client(base_url=url, timeout=60) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "qwen3-tiny"
        chat = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 4},
        ).json()
        assert chat["usage"]["completion_tokens"] <= 4
        assert isinstance(chat["choices"][0]["message"]["content"], str)
        texts = client.post(
            "/v1/completions", json={"prompt": ["Hello", "world"], "max_tokens": 3, "ignore_eos": True}
        ).json()
        assert [choice["index"] for choice in texts["choices"]] == [0, 1]
        assert texts["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("processes", of_the_day(["1", "2"]))
def test_64_streams_at_once_give_what_each_gives_alone(
    tiny: Any, start: Callable[..., Any], processes: str
) -> None:
    flags = ("--max-num-seqs", "24", "--max-num-batched-tokens", "96", "--frontends", processes)
    server, rng = start(tiny.path, *flags), random.Random(7)
    prompts = [tiny.prompt(rng.randrange(tiny.num_prompts)) for _ in range(12)]
    requests = mixed(rng, [prompt[: rng.randint(1, len(prompt))] for prompt in prompts])
    check_streams(server, requests, 64, rng)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def change_header(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    change(header[name])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def misshape(folder: Path) -> None:
    change_header(folder, "model.layers.1.self_attn.k_proj.weight", lambda entry: entry["shape"].insert(0, 1))


def wrong_dtype(folder: Path) -> None:
    change_header(folder, "model.norm.weight", lambda entry: entry.update(dtype="I16"))


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "flags", "names"),
    [
        (truncate, [], ["model.safetensors"]),
        (misshape, [], ["model.layers.1.self_attn.k_proj.weight", "[256, 64]"]),
        (wrong_dtype, [], ["model.norm.weight", "bfloat16"]),
        (remove("model.safetensors"), [], ["safetensors"]),
        (remove("tokenizer.json"), [], ["tokenizer.json", "--skip-tokenizer-init"]),
        (remove("config.json"), [], ["config.json"]),
        (change_config(model_type="mamba9"), [], ["config.json", "mamba9"]),
        (change_config(num_hidden_layers=0), [], ["config.json", "num_hidden_layers"]),
        (change_config(rope_scaling={"rope_type": "su", "factor": 2}), [], ["config.json", "su"]),
        (change_config(quantization_config={"quant_method": "gptq"}), [], ["quantization_config", "gptq"]),
        (nothing, ["--block-size", "7"], ["--block-size"]),
        (nothing, ["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (nothing, ["--max-model-len", "100000"], ["--max-model-len", "4096"]),
        (nothing, ["--kv-cache-memory-bytes", "1000"], ["--kv-cache-memory-bytes"]),
        (
            nothing,
            ["--dtype", "float16"],
            ["argument --dtype: float16 is not one of auto, bfloat16, float32"],
        ),
        (nothing, ["--device", "tpu"], ["tpu"]),
        (nothing, ["--max-seqs", "3"], ["--max-seqs"]),
        (nothing, ["--port", "http"], ["--port"]),
    ],
)
def test_bad_input_ends_in_one_line_that_names_it(
    tmp_path: Path,
    main: Callable[..., tuple[int, str]],
    spoil: Callable[[Path], None],
    flags: list[str],
    names: list[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    spoil(folder)
    code, errors = main("serve", str(folder), *FLAGS, *flags)
    assert code in (1, 2), errors
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert "error: " in last
    for name in names:
        assert name in last


def test_the_command_ends_with_that_line_and_code(
    tmp_path: Path, main: Callable[..., tuple[int, str]]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    truncate(folder)
    words = ["serve", str(folder), *FLAGS]
    command = [sys.executable, "-m", "openinfer.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    code, errors = main(*words)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, errors.splitlines()[-1])
