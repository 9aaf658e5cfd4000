"""A model in your own process: text in, text out. The engine is the one that `openinfer serve` runs.

    from openinfer.llm import LLM

    with LLM("demo/qwen3") as llm:
        (answer,) = llm.generate(["The capital of France is"], max_tokens=16)
        print(answer.text)
        for piece in llm.stream([{"role": "user", "content": "What is the capital of France?"}]):
            print(piece, end="", flush=True)

`generate` continues prompts, `chat` answers conversations, and `stream` yields one answer piece by piece. `Grammar`
gives answers a form: `llm.chat(asked, grammar=Grammar.of_schema({"type": "object"}))`.
"""

from openinfer.llm.model import LLM, Answer, PromptRefused
from openinfer.sampler import SamplingParams
from openinfer.sampler.form import Grammar

__all__ = ["LLM", "Answer", "Grammar", "PromptRefused", "SamplingParams"]
