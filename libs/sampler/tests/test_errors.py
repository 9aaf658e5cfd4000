import pytest

from openinfer.sampler import InvalidLogits, InvalidParams, SamplerError


@pytest.mark.parametrize("kind", [InvalidLogits, InvalidParams])
def test_each_error_is_also_a_value_error(kind):
    assert issubclass(kind, SamplerError)
    assert issubclass(kind, ValueError)


def test_invalid_params_says_what_was_given_and_what_is_allowed():
    error = InvalidParams("top_p", 3, "a number in (0, 1]")
    assert str(error) == "top_p is 3: it must be a number in (0, 1]"
    assert error.param == "top_p"


def test_invalid_logits_keeps_every_row_and_prints_a_few():
    error = InvalidLogits(range(20))
    assert error.rows == tuple(range(20))
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, ... of" in str(error)
    assert "rows 3 of" in str(InvalidLogits([3]))
