"""The Gumbel noise of openinfer.sampler.noise on a device: the same bits, the same fp32 formula."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hash_u32(seed_lo, seed_hi, position, token):
    """uint32, all of them."""
    a = mix(seed_lo + 0x9E3779B9)
    b = mix(seed_hi ^ a)
    return mix(mix(token + mix(a + position)) ^ mix(b ^ position))


@triton.jit
def gumbel(bits):
    v = tl.minimum(
        (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355
    )  # 2^-32, 1 - 2^-24
    series = v * (1.0 + v * (0.5 + v * (0.3333333432674408 + v * 0.25)))
    return -tl.log(tl.where(v < 0.00390625, series, -tl.log(1.0 - v)))


@triton.jit
def perturbed(logits, token, temperature, seeds, position):
    """logits / temperature + gumbel(hash(seed, position, token)); `seeds` points at the two words of the row."""
    seed_lo = tl.load(seeds).to(tl.uint32, bitcast=True)
    seed_hi = tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    bits = hash_u32(seed_lo, seed_hi, position.to(tl.uint32), token.to(tl.uint32))
    return tl.div_rn(logits, temperature) + gumbel(bits)


@triton.jit
def first_maximum(values, ids):
    """The largest value and the lowest id that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, 2147483647), 0)
