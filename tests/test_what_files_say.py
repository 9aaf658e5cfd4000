"""What a checkpoint's files say is what runs, also where they say it in an unusual place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.recipes.engine.config_fields import end_token
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.engine.testing import write_random_checkpoint
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.recipes.qwen3_5 import RECIPE as QWEN3_5
from openinfer.tensor import Checkpoint

GOLDENS = Path(__file__).parent / "goldens"
DEMO = Path(__file__).parent.parent / "demo"


def change(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    said = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """copy(folder): a checkpoint whose JSON files may be changed."""

    def of(folder: Path) -> Path:
        for file in folder.iterdir():
            target = tmp_path / file.name
            target.symlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, target)
        return tmp_path

    return of


@pytest.mark.parametrize(
    ("generation", "said"),
    [({"eos_token_id": 1}, [1]), ({"eos_token_id": [0, 1]}, [0, 1]), ({}, [0]), (None, [0])],
)
def test_the_end_token_of_the_tokenizer_ends_turns(
    generation: Any, said: list[int], copy: Any, session: Any
) -> None:
    folder = copy(DEMO / "qwen3")
    change(folder / "config.json", eos_token_id=0)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (end,) = end_token(folder)
    assert end != 0
    assert session(folder).engine.info.eos_token_ids == [*said, end]


END = {"eos_token": "<end>"}
ADDED = {"added_tokens": [{"id": 3, "content": "<pad>"}, {"id": 7, "content": "<end>"}]}


@pytest.mark.parametrize(
    ("settings", "tokenizer", "found"),
    [
        (END | {"added_tokens_decoder": {"5": {"content": "<end>"}, "6": {"content": "x"}}}, ADDED, (5,)),
        ({"eos_token": {"__type": "AddedToken", "content": "<end>"}}, ADDED, (7,)),
        (END | {"added_tokens_decoder": {"6": {"content": "x"}}}, ADDED, (7,)),
        (END, {"model": {"vocab": {"<end>": 9}}}, (9,)),
        (END, {"model": {"vocab": [["<end>", -1.0]]}, "added_tokens": 5}, ()),
        (END, None, ()),
        ({"eos_token": None}, ADDED, ()),
        ({}, ADDED, ()),
        (None, ADDED, ()),
    ],
)
def test_the_id_of_the_end_token_is_found(settings: Any, tokenizer: Any, found: Any, tmp_path: Path) -> None:
    for name, said in (("tokenizer_config.json", settings), ("tokenizer.json", tokenizer)):
        if said is not None:
            (tmp_path / name).write_text(json.dumps(said))
    assert end_token(tmp_path) == found


def test_a_tokenizer_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config\.json is not JSON"):
        end_token(tmp_path)


def test_a_trained_head_is_used_although_config_says_tied(copy: Any, session: Any, golden_of: Any) -> None:
    """As transformers 5 does; vLLM leaves such a head out."""
    golden = golden_of("qwen3-tiny-untied")
    folder = copy(golden.path)
    change(folder / "config.json", tie_word_embeddings=True)
    run = session(folder)
    run.submit(golden.prompt(2), 32, ignore_eos=True)
    run.finish()
    assert [outcome.tokens for outcome in run.outcomes.values()] == [golden.greedy(2)]


@pytest.mark.parametrize("own", [False, True])
def test_a_copy_of_the_embedding_is_no_head(own: bool, session: Any, tmp_path: Path) -> None:
    folder = write_random_checkpoint(QWEN3_5, tmp_path)
    with Checkpoint(folder) as checkpoint:
        arrays = {name: np.array(checkpoint.array(name)) for name in checkpoint}
    head = arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    if own:
        head[-1, -1] = -head[-1, -1]  # of the last bytes that are compared
    write_tensors(folder / "model.safetensors", arrays)
    weights = session(folder).engine.runner.model.weights
    assert (weights.lm_head is not weights.embed) == own
    np.testing.assert_array_equal(weights.lm_head.numpy(), head.astype(np.float32))
