"""Buckets: every step that can happen has a recorded segment that holds it, with bounded padding."""

import pytest

from openinfer.graph import Buckets

DECODE_ROWS = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32))


@pytest.mark.parametrize(
    ("max_rows", "max_tokens"), [(1, 1), (1, 512), (3, 16), (16, 16), (256, 512), (256, 2048), (300, 300)]
)
def test_every_step_has_a_segment(max_rows, max_tokens):
    buckets = Buckets.up_to(max_rows, max_tokens, DECODE_ROWS)
    segments, sampled = set(buckets.segments()), set(buckets.sample_rows())
    for rows in range(1, max_rows + 1):
        for tokens in {rows, rows + 1, rows + 15, 2 * rows, max_tokens}:
            if rows <= tokens <= max_tokens:
                chosen = buckets.choose(tokens, rows)
                assert chosen in segments
                assert chosen[0] >= tokens
                assert chosen[1] >= rows
                assert chosen[1] in sampled


def test_padding_is_bounded():
    buckets = Buckets.up_to(256, 2048, DECODE_ROWS)
    for rows in range(8, 257):
        assert buckets.choose(rows, rows)[0] - rows < (16 if rows <= 128 else 32)
    for tokens in range(256, 2049):
        assert buckets.choose(tokens, 1)[0] <= 1.25 * tokens
    assert buckets.choose(1024 + 64, 65)[0] == 1152
