"""The dashboard reads only what the server says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.contract import StepTimes

DASHBOARD = Path(__file__).parent.parent / "grafana.json"


@pytest.mark.skipif(not DASHBOARD.is_file(), reason="not in a checkout")
def test_every_metric_and_label_exists(start: Any) -> None:
    live = start({"max_running": 1, "max_waiting": 1})
    live.post("/v1/completions", prompt=[5], max_tokens=2)
    live.post("/v1/completions", prompt=[5], max_tokens=2, n=4)  # one refused: the label `reason` appears
    stats = live.driver.stats()
    stats.step_times = [StepTimes("decode, 1 rows", 1, 0.01, 0.01)]  # the fake engine predicts no step
    shown = live.http.get("/metrics").text
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        names = re.findall(r"(?:vllm|openinfer):\w+", expression)
        assert names
        for name in names:
            assert f"\n{name}{{" in shown, name
        for label in re.findall(r"by \((\w+)\)", expression):
            assert f'{label}="' in shown
