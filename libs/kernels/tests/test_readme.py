import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="tests run without the checkout")
def test_the_example_runs_and_prints_a_plan(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "gate_up_silu: at least 21.7 us" in printed
    assert "3 kernels to compile" in printed
