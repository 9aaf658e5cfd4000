"""Scripts, examples and other files outside of packages, as modules whose functions a test calls."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


@functools.cache
def module_at(path: Path) -> ModuleType:
    """The file as a module, loaded once a process. Files of its folder can be imported, as when Python runs it."""
    # The folder is in the name, because files of two folders may share a stem.
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # must be known before it runs, because dataclasses look their module up
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
