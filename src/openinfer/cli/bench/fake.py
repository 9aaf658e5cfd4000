"""`python -m openinfer.cli.bench.fake PORT DIR`: the HTTP frontend over a FakeEngine in a process of its own.

DIR gets a byte-level tokenizer of made-up words.
"""

import json
import socket
import sys
from pathlib import Path

VOCAB_SIZE = 1024
WORDS = list(range(300, 1000))
"""Ids of the tokens that the engine generates; all are whole words."""


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json whose ids above 255 are words with a space before them."""
    from openinfer.frontend.http.tiktoken import byte_letters

    letters = byte_letters()
    tokens = [letters[n] for n in range(256)] + [f"Ġw{n}" for n in range(256, VOCAB_SIZE)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": []}
    data = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))


async def _serve(port: int, folder: Path) -> int:
    from openinfer.frontend.contract import EngineSpec
    from openinfer.frontend.http import Tokenizer, create_app, run_server
    from openinfer.frontend.process_driver import ProcessDriver

    write_tokenizer(folder)
    fake = {"vocab_size": VOCAB_SIZE, "script": WORDS, "max_waiting": 4096}
    driver = ProcessDriver(EngineSpec("openinfer.frontend.testing:FakeEngine", fake))
    await driver.start()
    try:
        app = create_app(driver, tokenizer=Tokenizer.load(folder, VOCAB_SIZE))
        with socket.create_server(("127.0.0.1", port), backlog=2048) as listener:
            return await run_server(app, listener, shutdown_timeout_s=1, on_ready=lambda: None)
    finally:
        await driver.close()


if __name__ == "__main__":
    from openinfer.frontend.web import run_loop

    sys.exit(run_loop(_serve(int(sys.argv[1]), Path(sys.argv[2]))))
