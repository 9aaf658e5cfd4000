"""A process that writes chats as prompts: `python -m openinfer.frontend.render_process`, a child of a RenderPool.

A template may loop for ever, take all memory or nest too deeply for the interpreter. Here it can be killed. Standard
input has a JSON object a line: first a RendererSpec's fields, then the arguments of each render(). Standard output has
two lines for each: an empty one once it was read, as a sign of life, and an answer: {"variables"} or {"text"}, or
{"refused", "param"} or {"error"}. When standard input ends, the parent is gone, and so are we.
"""

import importlib
import json
import resource
import sys

from openinfer.frontend.chat import Renderer
from openinfer.frontend.errors import APIError, one_line

MEMORY_BYTES = 2 << 30
"""The limit of the address space: a template that wants more gets a MemoryError."""


def main() -> int:
    """Answer until standard input ends."""
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if allowed == resource.RLIM_INFINITY else min(allowed, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    lines, out = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a renderer that prints must not break the answers
    renderer: Renderer | None = None
    while line := lines.readline():
        out.write(b"\n")
        out.flush()
        try:
            given = json.loads(line)
            if renderer is None:
                module, _, name = given["target"].partition(":")
                renderer = getattr(importlib.import_module(module), name)(**given["kwargs"])
                said = json.dumps({"variables": sorted(renderer.variables)})
            else:
                said = json.dumps({"text": renderer.render(**given)})
        except APIError as error:
            said = json.dumps({"refused": str(error), "param": error.param})
        except Exception as error:
            said = json.dumps({"error": f"{type(error).__name__}: {one_line(error)}"[:1000]})
        out.write(said.encode() + b"\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
