"""The example passes the suite that every recipe passes, gives what transformers gave, and works with every command."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


from openinfer.kernels.testing import Case, OpConformance
from openinfer.recipes.engine import UnsupportedModel
from openinfer.recipes.engine.testing import EngineConformance, Golden, write_random_checkpoint
from openinfer.tensor import bfloat16
from openinfer_llama import RECIPE
from openinfer_llama.bias import add_bias
from openinfer_llama.config import Config

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA, MISTRAL, QWEN2 = GOLDEN / "llama-tiny", GOLDEN / "mistral-tiny", GOLDEN / "qwen2-tiny"
COMMAND = (sys.executable, "-m", "openinfer.cli")


def normal(kind: np.dtype[Any], *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(kind)


def goldens(folder: Path) -> list[Golden]:
    with np.load(folder / "golden.npz") as numbers:
        found = []
        for n in range(sum(name.startswith("ids") for name in numbers)):
            ids, logits = numbers[f"ids{n}"].tolist(), numbers[f"logits{n}"]
            rows = dict(zip(range(len(ids) - len(logits), len(ids)), logits, strict=True))
            found.append(Golden(ids, numbers[f"greedy{n}"].tolist(), rows))
        return found


TODAY = datetime.date.today().toordinal()
"""Says which third of the options of requests each model is tried with."""


class TestLlama(EngineConformance):
    recipe, checkpoint, goldens = RECIPE, LLAMA, goldens(LLAMA)
    share = (TODAY % 3, 3)


class TestMistral(EngineConformance):
    recipe, checkpoint, goldens = RECIPE, MISTRAL, goldens(MISTRAL)
    share = ((TODAY + 1) % 3, 3)


class TestQwen2(EngineConformance):
    recipe, checkpoint, goldens = RECIPE, QWEN2, goldens(QWEN2)
    share = ((TODAY + 2) % 3, 3)


@pytest.mark.skipif(find_spec("triton") is None, reason="kernels need pip install 'openinfer-recipes[jit]'")
class TestAddBias(OpConformance):
    op = add_bias
    cases = tuple(
        Case({"x": normal(kind, rows, width), "bias": normal(kind, width)}, outputs={"x": 0.0})
        for kind, rows, width in ((bfloat16, 3, 1040), (np.dtype(np.float32), 1, 48))
    )


def test_the_small_model_has_weights_for_a_test(tmp_path: Path) -> None:
    class Suite(EngineConformance):
        recipe, checkpoint = RECIPE, write_random_checkpoint(RECIPE, tmp_path / "small")

    Suite.setup_class()
    Suite().test_sampled_tokens_are_those_of_the_definition()
    Suite.teardown_class()


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**json.loads((folder / "config.json").read_text()), **changes}


def test_what_the_configuration_says() -> None:
    llama, mistral, qwen2 = (Config.parse(config(folder)) for folder in (LLAMA, MISTRAL, QWEN2))
    assert (llama.window, mistral.window) == (0, 24)
    assert (llama.tied, mistral.tied, qwen2.tied) == (True, False, True)
    assert (llama.biased, mistral.biased, qwen2.biased) == (False, False, True)
    published = config(QWEN2, sliding_window=16, max_window_layers=2, layer_types=None, attention_bias=True)
    assert Config.parse(published).window == 0  # use_sliding_window is false
    plain = 10000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(mistral.inv_freq, plain, rtol=1e-6)
    ratio = llama.inv_freq / plain
    np.testing.assert_allclose(ratio[[0, -1]], [1, 1 / 8], rtol=1e-6)  # short wavelengths, long ones
    assert ((ratio[1:] <= ratio[:-1] + 1e-6) & (ratio[1:] > 0.1)).all()
    older = config(LLAMA, rope_parameters=None, rope_theta=10000.0)
    older["rope_scaling"] = {k: v for k, v in config(LLAMA)["rope_parameters"].items() if k != "rope_theta"}
    np.testing.assert_array_equal(Config.parse(older).inv_freq, llama.inv_freq)


WINDOWS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("folder", "changes", "words"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias is True; this recipe runs False"),
        (LLAMA, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": 3}, "4 attention heads cannot share 3 evenly"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is True; this recipe runs False"),
        (
            QWEN2,
            {"layer_types": WINDOWS},
            "layer_types is a list of 2; it must name full_attention for 2 layers",
        ),
        (QWEN2, {"attention_bias": False}, "attention_bias is False; this recipe runs True"),
        (
            QWEN2,
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            "dual_chunk_attention_config is an object",
        ),
    ],
)
def test_what_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Config.parse(config(folder, **changes))


def run(*arguments: str | Path) -> str:
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_explain() -> None:
    assert "norm_rope_attend" in run("explain", MISTRAL, "--decode", "4,200")


def test_bench_step() -> None:
    flags = ("--device", "cpu", "--max-num-seqs", "3", "--max-num-batched-tokens", "32")
    assert "decode:1,16" in run("bench", "step", LLAMA, *flags, "--points", "decode:1,16", "--repeats", "2")


def test_kernels_for_a_gpu_are_planned() -> None:
    from openinfer.kernels import H200
    from openinfer.recipes.engine import Source, startup

    specs = startup.kernel_specs(RECIPE, Source.read(LLAMA), RECIPE.options(device="cuda"), H200)
    assert any(spec.function == "attend_new" and ("q_norm", None) in spec.constants for spec in specs)
    assert not any(spec.function == "add_bias" for spec in specs)
    specs = startup.kernel_specs(RECIPE, Source.read(QWEN2), RECIPE.options(device="cuda"), H200)
    assert any(spec.function == "add_bias" for spec in specs)


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    assert "kernels for sm_90" in run("compile", LLAMA, "--arch", "90", "--out", tmp_path)


def test_serve() -> None:
    flags = ("--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", str(8 << 20))
    server = subprocess.Popen([*COMMAND, "serve", str(LLAMA), *flags], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    with server, server.stderr:
        try:
            lines = (re.search(r"ready on (http://\S+)", line) for line in server.stderr)
            url = next(found[1] for found in lines if found)
            golden = goldens(LLAMA)[2]
            body = {"prompt": golden.prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = post(f"{url}/v1/completions", {**body, "return_token_ids": True})
            assert answer["choices"][0]["token_ids"] == golden.greedy
            asked = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4}
            assert post(f"{url}/v1/chat/completions", asked)["usage"]["completion_tokens"] <= 4
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
    assert server.returncode == 0


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
