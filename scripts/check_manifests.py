"""deploy/kubernetes against the schemas of Kubernetes: `python scripts/check_manifests.py [--environment FOLDER]`.

kubernetes-validate has the schemas and runs in an environment of its own. Kinds that are not Kubernetes' own (those of
llm-d and of gateways) have none there; tests/test_manifests.py compares them with the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kubernetes-validate==1.37.0"
OTHERS = ("llm-d.yaml",)
"""Manifests of other projects' kinds alone."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, help="folder with the validator, or to install it into")
    args = parser.parse_args()
    with ExitStack() as stack:
        kept = Path(args.environment or stack.enter_context(tempfile.TemporaryDirectory()))
        if not (kept / "bin" / "kubernetes-validate").exists():
            venv.create(kept, with_pip=True)
            pip = [str(kept / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
            subprocess.run([*pip, PACKAGE], check=True)
        files = [
            path for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml")) if path.name not in OTHERS
        ]
        return subprocess.run(
            [str(kept / "bin" / "kubernetes-validate"), "--strict", *map(str, files)]
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
