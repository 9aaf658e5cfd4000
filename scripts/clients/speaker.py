"""A server whose model says what a request tells it to say: text, a tool call, an answer to a tool's result, JSON.

A model of random weights never calls a tool by itself. This one always does when tools are offered, so that a client
can go through its whole loop. Run by check_clients; prints `ready on URL`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from openinfer.frontend import ThreadDriver
from openinfer.frontend.contract import StepOutputs
from openinfer.frontend.http import ChatTemplate, Tokenizer, create_app, run_server
from openinfer.frontend.testing import FakeEngine

DATA = Path(__file__).parents[2] / "libs/frontend/tests/data"
TEMPLATE = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif -%}"
    "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- endfor -%}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
SHELL = (
    '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo sunny > weather.txt"}}\n</tool_call>'
)
MARKDOWN = """# Title

**bold** and `x < y`, <img src=x onerror="document.title='owned'"> <script>document.title = 'owned'</script>

- one
- two [site](https://example.com/a) [evil](javascript:document.title='owned')

```python
print("hi")
```

| a | b |
| --- | --: |
| 1 | 2 |
"""
ANSWERS = (
    ("[tool]", "It will be sunny in Bonn."),
    ('"exec_command"', f"I look.\n{SHELL}"),
    ("<tools>", f"<think>\nI need the weather.\n</think>\n\nI look.\n{CALL}"),
    ("Markdown", MARKDOWN),
    ("JSON", '```json\n{"city": "Bonn", "days": 2}\n```'),
    ("", "<think>\nhm\n</think>\n\nHello there, friend."),
)


class Speaker(FakeEngine):
    """Says the first of ANSWERS whose mark is in the prompt, and ends; what a request forces changes nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(model="speaker", max_model_len=1 << 18, features=["grammar"])
        self._tokenizer = tokenizer
        self._answers = [(mark, [*tokenizer.encode_short(text), 2]) for mark, text in ANSWERS]

    def _generate(self, live: Any, outputs: StepOutputs) -> None:
        prompt = self._tokenizer.decode(live.request.prompt_token_ids, False)
        self._script = next(script for mark, script in self._answers if mark in prompt)
        super()._generate(live, outputs)


async def main() -> None:
    """Serve on a free port until SIGTERM."""
    tokenizer = Tokenizer.load(DATA, 1024)
    driver = ThreadDriver(lambda: Speaker(tokenizer))
    await driver.start()
    app = create_app(
        driver,
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE, {}),
        tool_parser="hermes",
        reasoning_parser="qwen3",
    )
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def ready() -> None:
        print(f"ready on {url}", file=sys.stderr, flush=True)

    await run_server(app, listener, shutdown_timeout_s=0, on_ready=ready)
    await driver.close()


if __name__ == "__main__":
    asyncio.run(main())
