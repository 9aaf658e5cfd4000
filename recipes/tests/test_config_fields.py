"""config.json with values that no model has: refused in one line, at once, whatever the field."""

import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openinfer.recipes.deepseek_v4 import config as deepseek_v4
from openinfer.recipes.deepseek_v4 import published as deepseek_v4_published
from openinfer.recipes.engine.config_fields import Fields, eos_ids, read_config
from openinfer.recipes.engine.errors import UnsupportedModel
from openinfer.recipes.qwen3 import config as qwen3
from openinfer.recipes.qwen3 import published as qwen3_published
from openinfer.recipes.qwen3_5 import config as qwen3_5
from openinfer.recipes.qwen3_5 import published as qwen3_5_published

HOSTILE: list[Any] = [
    *(10**9, 10**15, 10**18, 10**4000, 0, -1, 1.5, -1e9, float("nan"), float("inf"), -float("inf"), 1e300),
    *("x", "\x1b[31m", True, [], [[]], [None] * 1000, {}, {"a": 1}, ["full_attention"], [1] * 4, [10**18]),
    json.loads("[" * 400 + "]" * 400),
]


def configs() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, class and a sound config.json of each family."""
    yield "qwen3", qwen3.Config, dict(qwen3_published.config_json(next(iter(qwen3_published.SIZES))))
    sizes = list(qwen3_5_published.SIZES)
    for size in (sizes[0], sizes[-1]):
        yield f"qwen3_5 {size}", qwen3_5.Config, qwen3_5_published.config_json(size)
    size = next(iter(deepseek_v4_published.SIZES))
    yield "deepseek_v4", deepseek_v4.Config, deepseek_v4_published.config_json(size)


def places(value: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every field, of objects within objects too."""
    for key, inner in value.items():
        yield (*before, key)
        if isinstance(inner, dict):
            yield from places(inner, (*before, key))


ROPES = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.0,
    },
}


@pytest.mark.parametrize(("name", "kind", "raw"), list(configs()), ids=[name for name, _, _ in configs()])
def test_any_field_may_have_any_value(name: str, kind: Any, raw: dict[str, Any]) -> None:
    kind.parse(raw, None)
    began, messages = time.process_time(), []
    raws = [raw] + ([{**raw, key: value} for key, value in ROPES.items()] if name == "qwen3" else [])
    for base in raws:
        for place in places(base):
            for value in HOSTILE:
                changed = copy.deepcopy(base)
                inner = changed
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                try:
                    kind.parse(changed, None)
                except UnsupportedModel as error:
                    messages.append(str(error))
    assert len(messages) > 100
    assert max(map(len, messages)) < 600
    assert not any("\x1b" in message for message in messages)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("value", [-1, 10**18, "x", [1.5], [True], [0] * 1000, {}])
def test_eos_ids_are_ids(value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"ids must be in \[0, 10\)"):
        eos_ids(value, 10)
    assert (eos_ids(None, 10), eos_ids(3, 10), eos_ids([3, 4], 10)) == ((), (3,), (3, 4))


def test_messages_name_the_field_what_it_is_and_what_it_may_be() -> None:
    fields = Fields({"head_dim": 10**9, "rms_norm_eps": float("nan"), "rope_scaling": 5, "tied": 1})
    for ask, text in (
        (
            lambda: fields.size("head_dim"),
            "config.json: head_dim is 1000000000; it must be a positive integer of at",
        ),
        (
            lambda: fields.number("rms_norm_eps", most=1),
            "rms_norm_eps is nan; it must be a number above 0, at most 1",
        ),
        (lambda: fields.fields("rope_scaling"), "rope_scaling is 5; it must be an object"),
        (lambda: fields.flag("tied"), "tied is 1; it must be true or false"),
        (lambda: fields.size("gone"), "gone is None; it must be a positive integer"),
    ):
        with pytest.raises(UnsupportedModel, match=text):
            ask()


def test_files_that_hold_no_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, reason in (
        ("[" * 200_000 + "]" * 200_000, "is not JSON"),
        ("[1]", "holds a list"),
        ("{", "is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not JSON"),
        ("\udc80", "is not JSON"),
    ):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UnsupportedModel, match=reason):
            read_config(path)
    path.unlink()
    with pytest.raises(UnsupportedModel, match="does not exist"):
        read_config(path)
    os.mkfifo(path)
    with pytest.raises(UnsupportedModel, match="no regular file"):
        read_config(path)
