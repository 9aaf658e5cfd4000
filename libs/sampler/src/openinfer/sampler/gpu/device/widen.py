"""widen: the logits of a draft vocabulary as logits of the whole vocabulary."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def widen(out, logits, sources, vocabulary, width, BLOCK: tl.constexpr):
    """Grid (rows, cdiv(vocabulary, BLOCK))."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    source = tl.load(sources + token, mask=inside, other=-1)
    value = tl.load(logits + row * width + source, mask=source >= 0, other=-float("inf"))
    tl.store(out + row * vocabulary + token, value, mask=inside)
