"""From router logits, or token ids, to the experts of a token and their weights. EARLY: as for norm.wait_ahead in
`route`, as for norm.start_next in route_topk."""

# mypy: ignore-errors
import triton
import triton.language as tl

from openinfer.kernels.device.norm import start_next, wait_ahead
from openinfer.kernels.device.rounding import ordered


@triton.jit
def _score(logit, SIGMOID: tl.constexpr):
    """sqrt(softplus(logit)), also where the exponential is far below 1; or sigmoid(logit)."""
    small = tl.exp(-tl.abs(logit))
    if SIGMOID:
        return tl.where(logit < 0, small, 1.0) / (1.0 + small)
    more = 1.0 + small
    lost = more == 1.0
    log1p = tl.where(lost, small, tl.log(more) * (small / tl.where(lost, 1.0, more - 1.0)))
    return tl.sqrt(tl.maximum(logit, 0.0) + log1p)


@triton.jit
def _of_best_groups(left, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """left [BLOCK], -inf but for the TOP_GROUPS groups whose two largest have the largest sum."""
    SIZE: tl.constexpr = BLOCK // GROUPS
    low = -float("inf")
    grouped, place = tl.reshape(left, (GROUPS, SIZE)), tl.arange(0, SIZE)[None, :]
    first = tl.max(grouped, 1)
    at = tl.min(tl.where(grouped == first[:, None], place, SIZE), 1)
    sums = first + tl.max(tl.where(place == at[:, None], low, grouped), 1)
    group = tl.arange(0, GROUPS)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        rest = tl.where(kept, low, sums)
        best = tl.min(tl.where((rest == tl.max(rest, 0)) & ~kept, group, GROUPS), 0)
        kept |= group == best
    return tl.reshape(tl.where(kept[:, None], grouped, low), (BLOCK,))


@triton.jit
def _largest(left, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """The K largest of left [BLOCK] and their places, in their order and of equals the lowest place first; -inf and 0
    behind. A warp has an instruction for the largest of its int32."""
    order, place, choice = ordered(left), tl.arange(0, BLOCK), tl.arange(0, K_BLOCK)
    bits, places = tl.full((K_BLOCK,), 0, tl.int32), tl.full((K_BLOCK,), 0, tl.int32)
    for k in tl.static_range(K):
        top = tl.max(order, 0)
        at = tl.min(tl.where(order == top, place, BLOCK - 1), 0)
        bits, places = tl.where(choice == k, top, bits), tl.where(choice == k, at, places)
        order = tl.where(place == at, -0x80000000, order)
    best = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(choice < K, best, -float("inf")), places


@triton.jit
def route(
    expert_ids, expert_weights, logits, bias, table, token_ids, token_slots, logits_stride, experts, scaling,
    first_expert, num_experts, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, LEARNED: tl.constexpr,
    SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """LEARNED: the K largest of a token's scores + bias, in their order and of equals the lowest index first; else its
    id's row of the table. BLOCK >= experts and K_BLOCK >= K are powers of two. Grid (T,). All but the logits is read
    before the wait."""
    token = tl.program_id(0).to(tl.int64)
    live = tl.load(token_slots + token, cache_modifier=".cg") != 0
    choice = tl.arange(0, K_BLOCK)
    of_token = logits + token * logits_stride
    if LEARNED:
        expert = tl.arange(0, BLOCK)
        inside = expert < experts
        added = tl.load(bias + expert, mask=inside, other=0.0)
        wait_ahead(EARLY)
        low = -float("inf")
        score = _score(tl.load(of_token + expert, mask=inside, other=0.0), SIGMOID)
        left = tl.where(inside, score + added, low)
        if GROUPS > 1:
            left = _of_best_groups(left, BLOCK, GROUPS, TOP_GROUPS)
        _, ids = _largest(left, K, K_BLOCK, BLOCK)
    else:
        row = table + tl.load(token_ids + token, mask=live, other=0, cache_modifier=".cg").to(tl.int64) * K
        ids = tl.load(row + choice, mask=live & (choice < K), other=0)  # a table may not be loaded yet
        wait_ahead(EARLY)
    best = tl.where(choice < K, _score(tl.load(of_token + ids, mask=choice < K, other=0.0), SIGMOID), 0.0)
    weight = best / tl.sum(best, 0) * scaling
    mine = ids - first_expert
    mine = tl.where(live & (mine >= 0) & (mine < num_experts), mine, -1)
    to = token * K + choice
    tl.store(expert_ids + to, mine, mask=choice < K)
    weight = tl.where(live, weight, 0.0)
    tl.store(expert_weights + to, weight.to(expert_weights.dtype.element_ty), mask=choice < K)


@triton.jit
def _gate_columns(shared, gate, width, block, BLOCK: tl.constexpr):
    """A block of columns of a row of `shared`, times sigmoid(gate)."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = shared.dtype.element_ty
    opened = tl.load(gate, cache_modifier=".cg").to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-opened))).to(dtype)
    value = tl.load(shared + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value *= factor.to(tl.float32)
    tl.store(shared + column, value.to(dtype), mask=inside)


@triton.jit
def route_topk(
    expert_ids, expert_weights, logits, token_slots, shared, gate, logits_stride, gate_stride, width, experts,
    first_expert, num_experts,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The K largest of a token's logits, in their order and of equals the lowest index first, and their softmax.
    BLOCK >= experts and K_BLOCK >= K are powers of two. Programs after a token's first multiply COLUMNS each of its row
    of `shared` by sigmoid(gate). Grid (T, 1 + cdiv(width, COLUMNS)), or (T, 1)."""
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) > 0:
        row, of_gate = shared + token * width, gate + token * gate_stride
        _gate_columns(row, of_gate, width, tl.program_id(1) - 1, COLUMNS)
        return
    live = tl.load(token_slots + token) != 0
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, K_BLOCK)
    inside = expert < experts
    low = -float("inf")
    of_token = logits + token * logits_stride + expert
    left = tl.load(of_token, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    best, ids = _largest(tl.where(inside, left, low), K, K_BLOCK, BLOCK)
    share = tl.exp(best - tl.max(best, 0))
    weight = tl.where(live, share / tl.sum(share, 0), 0.0)
    to = token * K + choice
    mine = ids - first_expert
    mine = tl.where(live & (mine >= 0) & (mine < num_experts), mine, -1)
    tl.store(expert_ids + to, mine, mask=choice < K)
    tl.store(expert_weights + to, weight.to(expert_weights.dtype.element_ty), mask=choice < K)
