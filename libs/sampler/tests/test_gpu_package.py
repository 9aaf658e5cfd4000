import subprocess
import sys
import types

import openinfer.sampler.gpu as gpu


def test_all_is_sorted_and_nothing_else_leaks():
    public = {
        name
        for name, value in vars(gpu).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    # Constants, classes, functions, as the linter sorts them.
    assert gpu.__all__ == sorted(gpu.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert public == set(gpu.__all__)
    assert all(getattr(gpu, name).__doc__ for name in gpu.__all__)


def test_importing_needs_no_triton_and_the_library_itself_no_kernels():
    code = (
        "import sys, openinfer.sampler; assert 'openinfer.kernels' not in sys.modules;"
        "import openinfer.sampler.gpu; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
