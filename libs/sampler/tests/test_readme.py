import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="tests run without the checkout")
def test_the_examples_run_and_find_what_they_assert():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
