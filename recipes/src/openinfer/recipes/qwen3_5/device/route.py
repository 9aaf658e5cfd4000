"""From router logits to the experts of a token."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def route_topk(
    expert_ids, expert_weights, logits, token_slots, logits_stride, experts,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The K largest of a token's logits, in their order and of equals the lowest index first, and their softmax.
    BLOCK >= experts and K_BLOCK >= K are powers of two. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    live = tl.load(token_slots + token) != 0
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, K_BLOCK)
    inside = expert < experts
    low = -float("inf")
    left = tl.load(logits + token * logits_stride + expert, mask=inside, other=0.0).to(tl.float32)
    left = tl.where(inside, left, low)
    best = tl.full((K_BLOCK,), low, tl.float32)
    ids = tl.full((K_BLOCK,), -1, tl.int32)
    taken = ~inside
    for k in tl.static_range(K):
        top = tl.max(left, 0)
        first = tl.min(tl.where((left == top) & ~taken, expert, BLOCK), 0)
        best = tl.where(choice == k, top, best)
        ids = tl.where(choice == k, first, ids)
        taken |= expert == first
        left = tl.where(taken, low, left)
    share = tl.exp(best - tl.max(best, 0))
    weight = tl.where(live, share / tl.sum(share, 0), 0.0)
    to = token * K + choice
    tl.store(expert_ids + to, tl.where(live, ids, -1), mask=choice < K)
    tl.store(expert_weights + to, weight.to(expert_weights.dtype.element_ty), mask=choice < K)
