"""A server whose model says what a request tells it to say: text, a tool call, an answer to a tool's result, JSON.

A model of random weights never calls a tool by itself. This one always does when tools are offered, so that a client
can go through its whole loop. Run by check_clients; prints `ready on URL`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

from openinfer.frontend import ThreadDriver
from openinfer.frontend.contract import StepOutputs
from openinfer.frontend.http import ChatTemplate, Tokenizer, create_app, run_server
from openinfer.frontend.testing import FakeEngine

DATA = Path(__file__).parents[2] / "libs/frontend/tests/data"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
SHELLS = {
    "exec_command": "cmd",  # Codex
    "Bash": "command",  # Claude Code
    "run_shell_command": "command",  # Qwen Code
    "bash": "command",  # opencode
}
"""Tools of coding agents that run a command, and what they call it."""
MCP = "mcp__w__weather"
"""A tool of an MCP server, as Codex names it."""
COMMANDS = ("echo sunny > weather.txt", "cat weather.txt")
"""What an agent is told to run, one after the other."""
EDIT = """weather.txt
```
<<<<<<< SEARCH
=======
sunny
>>>>>>> REPLACE
```
"""
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
    ("SEARCH/REPLACE", f"<think>\nI write a file.\n</think>\n\nIt will be sunny in Bonn.\n\n{EDIT}"),
    ("<tools>", f"<think>\nI need the weather.\n</think>\n\nI look.\n{CALL}"),
    ("Markdown", MARKDOWN),
    ("JSON", '```json\n{"city": "Bonn", "days": 2}\n```'),
    ("", "<think>\nhm\n</think>\n\nHello there, friend."),
)
LAST = "It will be sunny in Bonn."


def answer(prompt: str) -> str:
    """What to say: calls while an agent has something to run, the weather once the tools have answered."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for name, field in SHELLS.items():
        if f'"name": "{name}"' in prompt:
            more = {"is_background": False} if name == "run_shell_command" else {}
            calls += [
                (name, {field: command, "description": "Tells the weather", **more}) for command in COMMANDS
            ]
    if calls and f'"name": "{MCP}"' in prompt:
        calls.append((MCP, {"city": "Bonn"}))
    results = prompt.rpartition("<|im_start|>user\n")[2].count("<|im_start|>tool\n")
    if results < len(calls):
        call = json.dumps(dict(zip(("name", "arguments"), calls[results], strict=True)))
        return f"<think>\nI need the weather.\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>"
    if "<|im_start|>tool\n" in prompt:
        return LAST
    return next(text for mark, text in ANSWERS if mark in prompt)


class Speaker(FakeEngine):
    """Says what `answer` does, and ends; what a request forces changes nothing. A prompt that closes the thoughts gets
    none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(model="speaker", max_model_len=1 << 18, features=["grammar"])
        self._tokenizer = tokenizer
        self._scripts: dict[int, list[int]] = {}

    def _generate(self, live: Any, outputs: StepOutputs) -> None:
        if live.generated == 0:
            prompt = self._tokenizer.decode(live.request.prompt_token_ids, False)
            said = answer(prompt)
            if prompt.rstrip().endswith("</think>"):
                said = said.rpartition("</think>\n\n")[2]
            self._scripts[live.request.id] = [*self._tokenizer.encode_short(said), 2]
        self.script = self._scripts[live.request.id]
        super()._generate(live, outputs)


async def main() -> None:
    """Serve on a free port until SIGTERM."""
    tokenizer = Tokenizer.load(DATA, 1024)
    driver = ThreadDriver(lambda: Speaker(tokenizer))
    await driver.start()
    app = create_app(
        driver,
        tokenizer=tokenizer,
        template=ChatTemplate((DATA / "agents.jinja").read_text(), {}),
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
