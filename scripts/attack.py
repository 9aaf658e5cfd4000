"""Try to break it: `python scripts/attack.py [ARGUMENT ...]`, arguments as pytest's (`-k kv`, `--collect-only -q`).

Runs the tests marked `attack`, each a way in which input from outside has broken something once: strangers, clients,
peers, files. Most start a server and talk to it over sockets. docs/faults.md says what must happen instead.
"""

from __future__ import annotations

import subprocess
import sys

from check_wheels import PYTEST, ROOT


def main() -> int:
    """0 if every attack failed."""
    folders = [*ROOT.glob("libs/*/tests"), ROOT / "recipes" / "tests", ROOT / "tests"]
    paths = [path for folder in folders for path in folder.rglob("test_*.py")]
    files = [path for path in paths if "mark.attack" in path.read_text()]
    command = [sys.executable, "-c", PYTEST, "-q", "-m", "attack", *sys.argv[1:], *map(str, sorted(files))]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
