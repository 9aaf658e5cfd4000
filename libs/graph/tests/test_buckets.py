"""Buckets: every step that can happen has a recorded segment that holds it, with bounded padding."""

import pytest

from openinfer.graph import Buckets, UnknownStep

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


@pytest.mark.parametrize(
    ("max_rows", "max_tokens"), [(1, 1), (1, 8), (3, 16), (16, 16), (256, 512), (300, 1200)]
)
@pytest.mark.parametrize("most", [1, 3, 8])
def test_every_step_with_drafts_has_a_segment(max_rows, max_tokens, most):
    buckets = Buckets.up_to(max_rows, max_tokens, DECODE_ROWS, most)
    segments, sampled = set(buckets.segments()), set(buckets.sample_rows())
    for rows in range(1, max_rows + 1):
        for tokens in {rows + 1, rows + most, rows * (1 + most), max_tokens}:
            for chunks in (False, True):
                if rows < tokens <= max_tokens and (chunks or tokens <= rows * (1 + most)):
                    drafts = min(most, tokens - rows)
                    chosen = buckets.choose(tokens, rows, drafts=drafts, chunks=chunks)
                    assert chosen in segments
                    assert chosen.drafts in (0, *buckets.draft_levels)
                    assert drafts <= chosen.drafts
                    assert chosen.tokens >= tokens
                    assert chosen.longest >= (tokens if chunks else min(tokens, 1 + drafts))
                    assert chosen.rows >= rows
                    assert chosen.rows in sampled
        assert buckets.choose(rows, rows).drafts == 0


def test_a_decode_step_with_drafts_has_a_shape_of_its_own():
    buckets = Buckets.up_to(256, 2048, DECODE_ROWS, 3)
    shape = buckets.choose(9, 3, drafts=3, chunks=False)
    assert shape == (16, 4, 4, 3)
    assert buckets.choose(5, 3, drafts=1, chunks=False) == (8, 4, 2, 1)
    assert Buckets.up_to(4, 64, (1,), 8).draft_levels == (1, 2, 4, 8)
    assert Buckets.up_to(4, 64, (1,), 5).draft_levels == (1, 2, 4, 5)
    assert str(shape) == "decode, 4 rows, 3 drafts"
    assert str(buckets.choose(9, 3, drafts=1)) == "16 tokens, 8 rows, 3 drafts"


@pytest.mark.parametrize("most", [0, 3])
def test_a_lone_row_has_a_larger_shape(most):
    buckets = Buckets.up_to(256, 2048, DECODE_ROWS, most, (4096,))
    segments = set(buckets.segments())
    assert len(segments) == len(set(Buckets.up_to(256, 2048, DECODE_ROWS, most).segments())) + 1 + (most > 0)
    for drafts in {0, most}:
        assert buckets.choose(4096, 1, drafts=drafts) == buckets.choose(3000, 1, drafts=drafts) in segments
        assert buckets.choose(2048, 1, drafts=drafts) == (2048, 1, 2048, drafts)
    with pytest.raises(UnknownStep):
        buckets.choose(4097, 1)
    with pytest.raises(UnknownStep):
        buckets.choose(4096, 2)


def test_a_prompt_alone_is_cut_as_the_policies_cut_it():
    buckets = Buckets.up_to(8, 2048, (1,), 0, (4096,))
    assert list(buckets.chunks(10000)) == [(0, 4096), (4096, 4096), (8192, 1808)]
    assert list(buckets.chunks(4095)) == [(0, 2048), (2048, 2047)]
    two = Buckets.up_to(8, 2048, (1,), 0, (4096, 8192))
    assert list(two.chunks(13000)) == [(0, 8192), (8192, 4096), (12288, 712)]
    assert two.choose(8192, 1).tokens == 8192
    assert two.choose(4096, 1).tokens == 4096
    assert list(Buckets.up_to(8, 2048, (1,)).chunks(4096)) == [(0, 2048), (2048, 2048)]
