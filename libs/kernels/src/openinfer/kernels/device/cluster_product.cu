// out [M, N] = x [M, K] @ weight [N, K]^T for at most TOKENS tokens, float32 sums; out is bf16.
//
// A cluster of SPLIT blocks has COLUMNS rows of the weight, and each of its blocks a part of K. So the blocks are one wave
// with equal parts of the weight, and a block reads a part of x alone. A warp copies the weight into a ring and another one
// x. The first does not wait for the kernel ahead. Two warpgroups multiply: of 128 tokens each has 64, and of 64 tokens
// each has a half of every stage's depth. Their sums lie in shared memory, and each block adds up those of its tokens, in
// the order of K. Of few tokens they are sent to the block that adds them up (SENDS). ADD: out += the product. GATED: weight
// is [2 N, K], gate and then up; out = silu(gate) * up.
//
// CODES: 0: x and weight are bf16. Else they are codes of e4m3 with scales. 1: x_scales [K / 128, M] and scales
// [ceil(N / 128), K / 128], twice that if GATED. 2: x_scales [M] and scales [N], or [2 N]. The tensor cores add up codes with
// some 14 bits, so every stage of 128 columns has a sum of its own, which is added in float32.
//
// PROJECTIONS: if not 0, out gets what adapters add, too (adapters.cuh). Two warps of a block that copy nothing make
// x @ A^T. The sums get its products with B before the last step: the steps before hide the wait for x @ A^T.

#include "gpu.cuh"
#include "tensor_cores.cuh"
#if PROJECTIONS
#include "adapters.cuh"
constexpr int REGISTERS = 184, PRODUCER_REGISTERS = 136;
#else
constexpr int REGISTERS = 232, PRODUCER_REGISTERS = 40;
#endif

constexpr int DEPTH = CODES ? 128 : 64, HALVES = GATED ? 2 : 1, PARTS = TOKENS == 64 ? 2 : 1;
// ROWS: of x that are copied. Of few tokens the products read on into the weight, and what they make of it is never stored.
constexpr int X_BYTES = ROWS * 128, WEIGHT_BYTES = COLUMNS * 128, STAGE = X_BYTES + HALVES * WEIGHT_BYTES;
constexpr int PITCH = HALVES * COLUMNS + (40 - HALVES * COLUMNS % 32) % 32;  // rows that follow each other have other banks
constexpr int SUMS = PARTS * TOKENS * PITCH * 4, ROOM = STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS;
constexpr int QUADS = COLUMNS / 4, PRODUCTS = 4 / PARTS;  // of a warpgroup and stage
static_assert(TOKENS == 64 || TOKENS == 128, "a warpgroup multiplies 64 tokens");
// Sums that are sent lie beside the ring, where others may still copy: [SPLIT, PARTS, OWNED, HALVES, COLUMNS].
constexpr bool SENDS = SPLIT > 1 && ROWS <= MOST_SENT;
constexpr int OWNED = (ROWS + SPLIT - 1) / SPLIT, SENT = HALVES * COLUMNS, PART = (SENDS ? OWNED * SENT : TOKENS * PITCH) * 4;
constexpr int INBOX = SENDS ? SPLIT * PARTS * PART : 0;
constexpr int HELD = CODES == 1 ? (HALVES * 2 + ROWS) * STEPS * 4 : 0;  // scales of a block's stages, at most STEPS
static_assert(STAGE >= TOKENS * 128, "products read no further than their stage");
static_assert(CODES != 1 || COLUMNS <= 128, "a block's rows have the scales of two blocks of 128");

// Another SM may have written it while this kernel was already resident.
__device__ __forceinline__ float fresh_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ float4 scaled(float4 v, float of_token, const float* of_rows) {
  float4 s = *(const float4*)of_rows;
  return make_float4(v.x * (of_token * s.x), v.y * (of_token * s.y), v.z * (of_token * s.z), v.w * (of_token * s.w));
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(384, 1)
cluster_product(bf16* out, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
#if CODES
                const float* x_scales, const float* scales,
#endif
#if PROJECTIONS
                const bf16* hidden, const bf16* a, const bf16* b, const int* adapters, const int* token_slots, float* low_sums,
                int* state, int a_stride, int b_stride, int places, int workers, int end0, int end1, int end2, int columns,
#endif
                int M, int N, int K) {
  extern __shared__ __align__(1024) unsigned char ring[];
  float* inbox = (float*)(ring + ROOM);
  u64 *full = (u64*)(ring + ROOM + INBOX), *empty = full + STAGES, *sums_there = empty + STAGES, *x_there = sums_there + 1;
#if CODES == 1
  float *of_weight = (float*)(sums_there + 2), *of_x = of_weight + HALVES * 2 * STEPS;  // [HALVES, 2, STEPS], [STEPS, ROWS]
#endif
  int group = threadIdx.x / 128, self = threadIdx.x % 128, column = blockIdx.x / SPLIT * COLUMNS;
  int rank = blockIdx.x % SPLIT, steps = K / DEPTH, first = steps * rank / SPLIT;
  steps = steps * (rank + 1) / SPLIT - first;
  u64 policy = evict_first();
  // Steps whose stages are free at first. Of few tokens, whose weight waits for what is on its way, their x has a barrier.
  int ahead = min(STAGES, steps - (PROJECTIONS ? 1 : 0)), round = ROWS <= MOST_SENT ? ahead : 0;
#if PROJECTIONS
  Lora lora = {a, b, adapters, token_slots, low_sums, state, a_stride, b_stride, places, workers, {end0, end1, end2}, columns};
  using Columns = Block<HALVES, COLUMNS>;
  Columns own_columns(lora, column, N);
  constexpr int PER = STAGE / (Columns::FACTORS * 2);  // adapters of a stage
  static_assert(PER > 0, "an adapter's rows of B fit a stage");
  bf16* lows = (bf16*)(sums_there + 2);  // [ROWS, 2, RANK]
  Adapted& adapted = *(Adapted*)(lows + ROWS * 2 * RANK);
  unsigned char* lists = (unsigned char*)(&adapted + 1);  // [2, TOKENS]
  u64* ready = (u64*)(lists + 2 * TOKENS);                // who waits for it may read `adapted`
#endif
  auto copy_weight = [&](int step, int place) {
    int stage = place % STAGES;
    barrier_expect(&full[stage], step < round ? STAGE - X_BYTES : STAGE);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      copy_tile(ring + stage * STAGE + X_BYTES + h * WEIGHT_BYTES, &weight, &full[stage], column + h * N, (first + step) * DEPTH,
                policy);
  };
  if (threadIdx.x == 256) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 2);
    barrier_init(sums_there, SENDS ? 1 : SPLIT), barrier_init(x_there, 1);
#if PROJECTIONS
    barrier_init(ready, 1);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;");
    if (SENDS) barrier_expect(sums_there, SPLIT * PARTS * ((M - rank + SPLIT - 1) / SPLIT) * SENT * 4);
    for (int step = 0; step < min(UNDER_WAY, ahead); step++) copy_weight(step, step);
  }
  if (SPLIT > 1) cluster_meet();  // no block is told of sums before its barrier is there
  else __syncthreads();
#if PROJECTIONS
  // Before the last step of the weight come `more` steps of B.
  int last = steps - 1, more = 0;
  u32 used;
  auto learn = [&] {
    barrier_wait(ready, 0);
    used = adapted.used, more = (__popc(used) + PER - 1) / PER;
  };
  auto place_of = [&](int step) { return step < last ? step : step + more; };
#else
  auto place_of = [&](int step) { return step; };
#endif
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (self == 0) {
      for (int step = min(UNDER_WAY, ahead); step < steps; step++) {
#if PROJECTIONS
        if (step == last) {
          learn();
          for (int i = 0; used; i++, used &= used - 1) {
            int place = last + i / PER, stage = place % STAGES;
            if (i % PER == 0) {
              wait_for_landing<STAGES>(full, place - UNDER_WAY);
              barrier_wait(&empty[stage], (place / STAGES & 1) ^ 1);
              barrier_expect(&full[stage], own_columns.bytes(min(PER, __popc(used))));
            }
            own_columns.copy((bf16*)(ring + stage * STAGE) + i % PER * Columns::FACTORS, lora, __ffs(used) - 1, N,
                             &full[stage], policy);
          }
        }
#endif
        int place = place_of(step);
        wait_for_landing<STAGES>(full, place - UNDER_WAY);
        barrier_wait(&empty[place % STAGES], (place / STAGES & 1) ^ 1);
        copy_weight(step, place);
      }
      // All loads are under way, so those of the next kernel take no bandwidth from them.
      asm volatile("griddepcontrol.launch_dependents;");
    } else if (self == 32) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      barrier_expect(x_there, round * X_BYTES);
      for (int step = 0; step < steps; step++) {
#if PROJECTIONS
        if (step == last) learn();
#endif
        int place = place_of(step), stage = place % STAGES;
        barrier_wait(&empty[stage], (place / STAGES & 1) ^ 1);
        copy_tile(ring + stage * STAGE, &x, step < round ? x_there : &full[stage], 0, (first + step) * DEPTH);
      }
    }
#if PROJECTIONS
    if (self >= 64) {
      int worker = blockIdx.x * 2 + self / 32 - 2, own[TOKENS / 32];
      adapters_of_lane(lora, M, own);
      if (self < 96) {
        list_tokens(adapted, own, own_columns.adapters<SPLIT>(rank));
        if (self == 64) barrier_arrive(ready);
      }
      if (worker < workers) shrink(lora, hidden, own, K, worker, lists + (self / 32 - 2) * TOKENS);
    }
    __syncwarp();
    if (self >= 32) {
      asm volatile("bar.sync 4, 352;" ::: "memory");
      leave(lora, M, self / 32 - 1);
    }
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    float sum[HALVES][COLUMNS / 2] = {};
    int lane = self % 32, row = (PARTS == 1 ? group * 64 : 0) + self / 32 * 16 + lane / 4, at = PARTS == 2 ? group * PRODUCTS : 0;
#if CODES
    float part[COLUMNS / 2] = {};
#endif
#if CODES == 1
    // A sum must not wait for a scale from memory, so all of a block's come first.
    int blocks = (N + 127) / 128, block = column / 128, edge = 128 - column % 128;  // from column `edge` on the next block
    for (int i = threadIdx.x; i < HALVES * 2 * steps; i += 256) {
      int of = i / steps, at = of / 2 * blocks + min(block + of % 2, blocks - 1);
      of_weight[of * STEPS + i % steps] = scales[(size_t)at * (K / 128) + first + i % steps];
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    constexpr int READS = 5;  // under way at once, because each takes long
    for (int begin = threadIdx.x; begin < steps * M; begin += 256 * READS) {
      float found[READS];
#pragma unroll
      for (int j = 0; j < READS; j++)
        found[j] = fresh_float(x_scales + (size_t)first * M + min(begin + 256 * j, steps * M - 1));
#pragma unroll
      for (int j = 0; j < READS; j++) {
        int i = min(begin + 256 * j, steps * M - 1);
        of_x[i / M * ROWS + i % M] = found[j];
      }
    }
    asm volatile("bar.sync 1, 256;" ::: "memory");
#endif
    barrier_wait(x_there, 0);
    auto multiply_steps = [&](int from, int to) {
      for (int step = from; step < to; step++) {
        int place = place_of(step), stage = place % STAGES;
        barrier_wait(&full[stage], place / STAGES & 1);
        u32 tokens = shared_address(ring + stage * STAGE), weights = tokens + X_BYTES + at * 32;
        tokens += (PARTS == 1 ? group * 64 * 128 : 0) + at * 32;
#if CODES == 1
        float of_token[2], of_rows[HALVES][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          of_token[i] = of_x[step * ROWS + min(row + 8 * i, ROWS - 1)];
#pragma unroll
          for (int h = 0; h < HALVES; h++) of_rows[h][i] = of_weight[(h * 2 + i) * STEPS + step];
        }
#endif
#if CODES
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
          products_begin();
#pragma unroll
          for (int i = 0; i < PRODUCTS; i++)
            multiply_codes(part, operand(tokens + i * 32), operand(weights + h * WEIGHT_BYTES + i * 32), i != 0);
          products_commit();
          products_wait<0>();
          results(part);
          if (h == HALVES - 1 && self == 0) barrier_arrive(&empty[stage]);
#pragma unroll
          for (int j = 0; j < COLUMNS / 2; j++)
#if CODES == 1
            sum[h][j] += part[j] * (of_token[j / 2 % 2] * (j / 4 * 8 < edge ? of_rows[h][0] : of_rows[h][1]));
#else
            sum[h][j] += part[j];
#endif
        }
#else
        products_begin();
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++)
#pragma unroll
          for (int h = 0; h < HALVES; h++)
            multiply(sum[h], operand(tokens + i * 32), operand(weights + h * WEIGHT_BYTES + i * 32), (step | i) != 0);
        products_commit();
        products_wait<1>();  // so the stage before is free
        if (step > from && self == 0) barrier_arrive(&empty[(place - 1) % STAGES]);
#endif
      }
      products_wait<0>();
    };
#if PROJECTIONS
    multiply_steps(0, last);
    if (self == 0) barrier_arrive(&empty[(last - 1) % STAGES]);
    learn();
    if (used) {
      own_columns.gather(lora, lows, adapted);
      asm volatile("bar.sync 1, 256;" ::: "memory");
    }
    asm volatile("bar.arrive 4, 352;" ::: "memory");  // the block has read `low`
    if (used) {
#pragma unroll
      for (int h = 0; h < HALVES; h++) results(sum[h]);
      int own = adapted.adapters[row], below = adapted.adapters[row + 8];
      const bf16 *of_row = lows + min(row, ROWS - 1) * 2 * RANK, *of_below = lows + min(row + 8, ROWS - 1) * 2 * RANK;
#pragma unroll 1
      for (int i = 0; used; i++, used &= used - 1) {
        int place = last + i / PER, stage = place % STAGES, id = __ffs(used);
        if (i % PER == 0) barrier_wait(&full[stage], place / STAGES & 1);
        bool mine = own == id, other = below == id;
        if ((PARTS == 1 || i % 2 == group) && __any_sync(~0u, mine || other)) {
          const bf16* of = (const bf16*)(ring + stage * STAGE) + i % PER * Columns::FACTORS;
#pragma unroll 1  // else sums spill
          for (int c = 0; c < RANK; c += 16) own_columns.expand(sum, of + c, mine, other, of_row + c, of_below + c);
        }
        if (i % PER == PER - 1 || used == (used & -used)) {
          asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
          if (self == 0) barrier_arrive(&empty[stage]);
        }
      }
    }
    multiply_steps(last, steps);
#else
    multiply_steps(0, steps);
#endif
    if (SENDS) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int token = row + 8 * r, to = token % SPLIT;
        if (token >= M) continue;
        float* place = inbox + ((rank * PARTS + (PARTS == 2 ? group : 0)) * OWNED + token / SPLIT) * SENT + lane % 4 * 2;
        u32 there = address_in(shared_address(place), to), told = address_in(shared_address(sums_there), to);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
          for (int j = 0; j < COLUMNS / 8; j++)
            send(there + (h * COLUMNS + j * 8) * 4, sum[h][4 * j + 2 * r], sum[h][4 * j + 2 * r + 1], told);
      }
      wait_for_cluster(sums_there);
    } else {
      asm volatile("bar.sync 1, 256;" ::: "memory");  // nobody reads the ring any more
      float* mine = (float*)ring + ((PARTS == 2 ? group * TOKENS : 0) + row) * PITCH + lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (row + 8 * r < M)
              *(float2*)(mine + 8 * r * PITCH + h * COLUMNS + j * 8) = make_float2(sum[h][4 * j + 2 * r], sum[h][4 * j + 2 * r + 1]);
      share_sums<SPLIT, 256>(sums_there);
    }
  }
  if (group < 2) {
    asm volatile("griddepcontrol.wait;" ::: "memory");  // before what the kernel ahead wrote is read
    int count = (M - rank + SPLIT - 1) / SPLIT * QUADS;
    for (int item = threadIdx.x; item < count; item += 256) {
      int token = rank + item / QUADS * SPLIT, quad = item % QUADS * 4;
      if (column + quad >= N) continue;
      bf16* to = out + (size_t)token * N + column + quad;
      u32 at = shared_address(SENDS ? inbox + item / QUADS * SENT + quad : (float*)ring + token * PITCH + quad);
      uint2 old = make_uint2(0, 0);
      if (ADD) old = fresh_pair(to);
      float4 value = total<SENDS, SPLIT, PARTS, PART>(at);
#if CODES == 2
      float of_token = fresh_float(x_scales + token);
      value = scaled(value, of_token, scales + column + quad);
#endif
      if (GATED) {
        float4 up = total<SENDS, SPLIT, PARTS, PART>(at + COLUMNS * 4);
#if CODES == 2
        up = scaled(up, of_token, scales + N + column + quad);
#endif
        value = make_float4(gated(value.x, up.x), gated(value.y, up.y), gated(value.z, up.z), gated(value.w, up.w));
      }
      if (ADD) value.x += low(old.x), value.y += high(old.x), value.z += low(old.y), value.w += high(old.y);
      *(uint2*)to = make_uint2(bf16_pair(value.x, value.y), bf16_pair(value.z, value.w));
    }
  }
  if (SPLIT > 1 && !SENDS) cluster_meet();  // another block may still read this one's sums
}
