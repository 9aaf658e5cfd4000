"""dspy: a signature with types, and plain prompts."""

from __future__ import annotations

import dspy


def check_a_signature(real: str, speaker: str) -> None:
    lm = dspy.LM("openai/speaker", api_base=f"{speaker}/v1", api_key="x", cache=False, num_retries=0)
    assert lm("hi")[0]
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> city: str, days: int")(question="Where? Answer in JSON.")
    assert (answer.city, answer.days) == ("Bonn", 2)


def check_noise(real: str, speaker: str) -> None:
    options = {"api_base": f"{real}/v1", "api_key": "x", "cache": False, "num_retries": 0}
    lm = dspy.LM("openai/qwen3-tiny", max_tokens=12, temperature=0, **options)
    assert lm("hi") == lm("hi")
