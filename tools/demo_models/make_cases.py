"""Write the held-out evaluation set: `python tools/demo_models/make_cases.py demo/eval.jsonl`.

Chats whose key falls among the held-out ones, which no training text holds. The same bytes every time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

from chat import Chat
from extraction import extraction
from sums import arithmetic, counting, sorting, spelling
from talk import fact, memory, story, unknown

from tools import refusal, tool_answer, tool_call

SEED = 2026
COUNTS: dict[Callable[[Random], Chat], int] = {
    arithmetic: 60, fact: 60, extraction: 60, tool_call: 60, tool_answer: 30, refusal: 30, memory: 30, counting: 20,
    spelling: 20, sorting: 20, story: 10, unknown: 10,
}  # fmt: skip


def main(path: Path) -> None:
    """One JSON object a line."""
    rng, lines, seen = Random(SEED), [], set()
    for maker, count in COUNTS.items():
        while count:
            chat = maker(rng)
            line = json.dumps(
                {
                    "kind": chat.kind, "messages": chat.messages[:-1], "tools": chat.tools, "thinking": chat.thinking,
                    "check": chat.check,
                },
                ensure_ascii=False,
            )  # fmt: skip
            if chat.held_out and line not in seen:
                seen.add(line)
                lines.append(line)
                count -= 1
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/demo_models/make_cases.py FILE")
    main(Path(sys.argv[1]))
