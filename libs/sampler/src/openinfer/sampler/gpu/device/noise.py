"""The Gumbel noise of openinfer.sampler.noise on a device: the same bits, the same fp32 formula."""

# mypy: ignore-errors
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
def uniform(bits):
    return tl.minimum(
        (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355
    )  # 2^-32, 1 - 2^-24


@triton.jit
def gumbel(bits):
    v = uniform(bits)
    series = v * (1.0 + v * (0.5 + v * (0.3333333432674408 + v * 0.25)))
    return -tl.log(tl.where(v < 0.00390625, series, -tl.log(1.0 - v)))


@triton.jit
def hashed(token, seeds, position):
    """The bits of tokens; `seeds` points at the two words of the row."""
    seed_lo = tl.load(seeds).to(tl.uint32, bitcast=True)
    seed_hi = tl.load(seeds + 1).to(tl.uint32, bitcast=True)
    return hash_u32(seed_lo, seed_hi, position.to(tl.uint32), token.to(tl.uint32))


@triton.jit
def perturbed(logits, token, temperature, seeds, position):
    """logits / temperature + gumbel(hash(seed, position, token))."""
    return tl.div_rn(logits, temperature) + gumbel(hashed(token, seeds, position))


@triton.jit
def first_maximum(values, ids):
    """The largest value and the lowest id that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, 2147483647), 0)


@triton.jit
def likelihood(x, token, top, temperature, seeds, position):
    """exp(x / temperature) / v in units of `top`'s: never below the exponential of the perturbed logit, since
    -log(1 - v) is above its series, and close to it where v is small. It takes no logarithm, so it is found sooner."""
    v = uniform(hashed(token, seeds, position))
    return tl.exp2((x - top) * (LOG2_E / temperature)) / (v * (1.0 + v * (0.5 + v * 0.3333333)))


@triton.jit
def least_likelihood(best, top, temperature):
    """The bound of likelihoods: a token below it has no perturbed logit as large as `best`, however it is rounded."""
    scaled = tl.div_rn(top, temperature)
    return tl.exp2((best - scaled - (1e-3 + 1e-6 * tl.abs(scaled))) * LOG2_E)


@triton.jit
def likely_best(x, token, top, temperature, seeds, position):
    """The largest perturbed logit and its id, or perhaps another's: (value, id, whether it is sure). top: max(x),
    finite, and so is its quotient by the temperature."""
    likely = likelihood(x, token, top, temperature, seeds, position)
    _, best_id = first_maximum(likely, token)
    best = perturbed(
        tl.max(tl.where(token == best_id, x, float("-inf")), 0), best_id, temperature, seeds, position
    )
    rivals = tl.sum((likely >= least_likelihood(best, top, temperature)).to(tl.int32), 0)
    return best, best_id, rivals == 1
