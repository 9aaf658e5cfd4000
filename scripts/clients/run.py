"""Run a client's checks: `python run.py CLIENT REAL_URL SPEAKER_URL DEMO_URL`, in the environment that has the client.

A check is a function check_* in CLIENT.py that takes the addresses it wants. `real` has a small model of random
weights, named qwen3-tiny. `speaker` says what a request tells it to say (model speaker, see speaker.py). `demo` has a
small trained model, which ends its thoughts, named qwen3.
"""

from __future__ import annotations

import importlib
import inspect
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


def main(client: str, real: str, speaker: str, demo: str) -> int:
    """Every check, in order; the first that fails ends it. 0, or SKIPPED where missing() says what is not here."""
    module = importlib.import_module(client)
    if hasattr(module, "missing") and (reason := module.missing()):
        print(f"{client}: skipped, {reason}")
        return SKIPPED
    names = [name for name in vars(module) if name.startswith("check_")]
    urls = {"real": real, "speaker": speaker, "demo": demo}
    for name in names:
        check = getattr(module, name)
        check(**{wanted: urls[wanted] for wanted in inspect.signature(check).parameters})
        print(f"{client}: {name}", flush=True)
    print(f"{client}: {len(names)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
