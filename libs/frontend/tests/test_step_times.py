"""Times of steps: told now and then, shown always."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from openinfer.frontend.client import Driver
from openinfer.frontend.contract import EngineInfo, EngineStats, StepOutputs, StepTimes
from openinfer.frontend.http.admin.metrics import Metrics
from openinfer.frontend.wire import Stepped

INFO = EngineInfo(
    model="m",
    max_model_len=8,
    vocab_size=8,
    eos_token_ids=[],
    kv_capacity_tokens=16,
    block_size=4,
    features=[],
)
TIMES = [StepTimes("decode, 1 rows", 4, 0.01, 0.015)]


def test_the_client_keeps_the_last_times_and_metrics_have_their_ratio() -> None:
    client: Any = SimpleNamespace(_stats=EngineStats(), _live=0, _last_sign=0.0, _handle=None, info=INFO)
    client.stats = lambda: client._stats
    client._route = lambda deltas: None
    told = EngineStats(steps=4, step_times=TIMES, outlier_steps=2)
    later = EngineStats(steps=9, outlier_steps=3)
    for stats in (told, later):
        Driver._receive(client, [Stepped(StepOutputs(), stats, 1)])
    assert client._stats.steps == 9
    text = Metrics(client, "m").render().decode()
    label = 'engine="0",model_name="m",step="decode, 1 rows"'
    assert f"openinfer:step_time_ratio{{{label}}} 1.5" in text
    assert f"openinfer:step_seconds_total{{{label}}} 0.015" in text
    assert f"openinfer:step_predicted_seconds_total{{{label}}} 0.01" in text
    assert 'openinfer:outlier_steps_total{engine="0",model_name="m"} 3.0' in text


def test_metrics_show_drafts_as_vllm_does() -> None:
    stats = EngineStats(drafts=5, draft_tokens=15, accepted_draft_tokens=7, accepted_by_position=[4, 2, 1])
    client: Any = SimpleNamespace(info=INFO, stats=lambda: stats)
    text = Metrics(client, "m").render().decode()
    label = 'engine="0",model_name="m"'
    assert f"vllm:spec_decode_num_drafts_total{{{label}}} 5.0" in text
    assert f"vllm:spec_decode_num_draft_tokens_total{{{label}}} 15.0" in text
    assert f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} 7.0" in text
    assert f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="1"}} 2.0' in text
