"""Run a client's checks: `python run.py CLIENT REAL_URL SPEAKER_URL`, in the environment that has the client.

A check is a function check_*(real, speaker) in CLIENT.py: the addresses of a server with a small model of random
weights (named qwen3-tiny) and of one that says what it is asked for (named speaker, see speaker.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SKIPPED = 77


@contextmanager
def raises(kind: type[Exception], word: str) -> Iterator[None]:
    """The block must raise such an error, whose text has the word."""
    try:
        yield
    except kind as error:
        if word not in str(error):
            raise
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def main(client: str, real: str, speaker: str) -> int:
    """Every check, in order; the first that fails ends it. 0, or SKIPPED where missing() says what is not here."""
    module = importlib.import_module(client)
    if hasattr(module, "missing") and (reason := module.missing()):
        print(f"{client}: skipped, {reason}")
        return SKIPPED
    names = [name for name in vars(module) if name.startswith("check_")]
    for name in names:
        getattr(module, name)(real, speaker)
        print(f"{client}: {name}", flush=True)
    print(f"{client}: {len(names)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
