// What adapters (LoRA) add to a product of few tokens: (x @ A^T) @ B^T, with the A and B of each token's own adapter.
//
// Warps of the first WORKERS / 2 blocks make x @ A^T while others multiply with the weight. A task is 16 rows of one
// adapter's A, one of CHUNKS parts of K, and the tokens that have the adapter. So sums do not depend on other tokens.
// Blocks with lower numbers run first. So a block that waits for tasks never keeps them from running.
//
// A sum of a task is never 0, and its place is 0 before. So whoever reads it knows by itself whether it is there. The last
// block that has read all makes them 0 again.
//
// The rows of B come through the ring of the product, before the last stage of the weight. A stage has some adapters'.
//
// Columns of a product's operands may be taken in any order, if it is the same one: a lane has neighbours in memory.

struct Lora {
  const bf16 *a, *b;  // [places, WIDTH, K], [places, columns, RANK]
  const int *adapters, *token_slots;
  float* low;  // [CHUNKS, TOKENS, WIDTH]: x @ A^T, where a token has an adapter. Zero before and after
  int* state;  // [READERS]: blocks that have read `low`. Zero before and after
  int a_stride, b_stride, places, workers;
  int ends[3], columns;  // where the projections but the last end, and the last one
};

// What a block knows of a step's tokens.
struct Adapted {
  u32 used;   // adapters of the block that tokens have, a bit each
  int count;  // of the list
  unsigned char list[TOKENS], adapters[TOKENS];  // tokens that have one of those, and each token's adapter, 0 of none
};

constexpr int WIDTH = PROJECTIONS * RANK, UNITS = WIDTH / 16, READERS = 3;

__device__ __forceinline__ int fresh_int(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ void prefetch(const bf16* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The adapters of a lane's tokens, each 32nd. They are from before the kernels that may still run.
__device__ __forceinline__ void adapters_of_lane(const Lora& lora, int M, int (&own)[TOKENS / 32]) {
  int slots[TOKENS / 32], first = threadIdx.x % 32;  // all slots are read at once, and then all adapters
#pragma unroll
  for (int i = 0; i < TOKENS / 32; i++) slots[i] = first + 32 * i < M ? fresh_int(lora.token_slots + first + 32 * i) : 0;
#pragma unroll
  for (int i = 0; i < TOKENS / 32; i++) own[i] = first + 32 * i < M ? fresh_int(lora.adapters + slots[i]) : 0;
}

// Of a whole warp. mine: a bit for each adapter of the block.
__device__ __forceinline__ void list_tokens(Adapted& adapted, const int (&own)[TOKENS / 32], u32 mine) {
  int lane = threadIdx.x % 32, count = 0;
  u32 used = 0;
#pragma unroll
  for (int i = 0; i < TOKENS / 32; i++) {
    u32 bit = own[i] ? mine & 1u << own[i] - 1 : 0, all = __ballot_sync(~0u, bit);
    adapted.adapters[i * 32 + lane] = own[i];
    if (bit) adapted.list[count + __popc(all & (1u << lane) - 1)] = i * 32 + lane;
    count += __popc(all), used |= bit;
  }
  used = __reduce_or_sync(~0u, used);
  if (lane == 0) adapted.used = used, adapted.count = count;
  __syncwarp();
}

// sum [16, 8] of TILES times 8 tokens += the rows of A at `row` and `below` by those of x, over `width` columns.
template <int TILES>
__device__ __forceinline__ void shrink_tiles(const bf16* row, const bf16* below, const bf16* const (&x)[TILES], int width,
                                             float (&sum)[TILES][4]) {
  constexpr int DEEP = TILES == 1 ? 5 : TILES == 2 ? 3 : 2;  // reads under way
  for (int k = 0; k < width; k += 32 * DEEP) {
    uint4 up[DEEP], down[DEEP], right[DEEP][TILES];
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
      int at = min(k + 32 * i, width - 32);
      up[i] = __ldg((const uint4*)(row + at)), down[i] = __ldg((const uint4*)(below + at));
#pragma unroll
      for (int t = 0; t < TILES; t++) right[i][t] = fresh(x[t] + at);
    }
#pragma unroll
    for (int i = 0; i < DEEP; i++)
      if (k + 32 * i < width)
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          multiply_bf16(sum[t], up[i].x, down[i].x, up[i].y, down[i].y, right[i][t].x, right[i][t].y);
          multiply_bf16(sum[t], up[i].z, down[i].z, up[i].w, down[i].w, right[i][t].z, right[i][t].w);
        }
  }
}

__device__ __forceinline__ void give(float* to, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value == 0 ? -0.0f : value) : "memory");
}

// x @ A^T for TILES times 8 of the tokens in `list`, of which there are `count` in all, from `base` on.
template <int TILES>
__device__ __forceinline__ void shrink_tokens(const Lora& lora, const bf16* x, const bf16* row, int unit, int chunk,
                                              int first, int width, int K, const unsigned char* list, int base, int count) {
  int lane = threadIdx.x % 32;
  const bf16* of_x[TILES];
  float sum[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    of_x[t] = x + (size_t)list[min(base + t * 8 + lane / 4, count - 1)] * K + first + lane % 4 * 8;
    sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
  }
  shrink_tiles(row, row + 8 * K, of_x, width, sum);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = base + t * 8 + lane % 4 * 2 + i % 2;
      if (token < count)
        give(lora.low + ((size_t)chunk * TOKENS + list[token]) * WIDTH + unit * 16 + i / 2 * 8 + lane / 4, sum[t][i]);
    }
}

// The tasks of warp `worker`. own: the adapters of a lane's tokens. list: room for the numbers of TOKENS tokens.
__device__ __forceinline__ void shrink(const Lora& lora, const bf16* x, const int (&own)[TOKENS / 32], int K, int worker,
                                       unsigned char* list) {
  int lane = threadIdx.x % 32;
  int each = (K / 32 + CHUNKS - 1) / CHUNKS * 32, tasks = lora.places * UNITS * CHUNKS;
  for (int task = worker; task < tasks; task += lora.workers) {
    int first = min(task % CHUNKS * each, K), unit = task / CHUNKS % UNITS, place = task / CHUNKS / UNITS, used = 0;
#pragma unroll
    for (int i = 0; i < TOKENS / 32; i++) used |= own[i] == place + 1;
    if (__any_sync(~0u, used) && lane < 16 && first < K)
      prefetch(lora.a + (size_t)place * lora.a_stride + (size_t)(unit * 16 + lane) * K + first, min(each, K - first) * 2);
  }
  for (int task = worker; task < tasks; task += lora.workers) {
    int chunk = task % CHUNKS, unit = task / CHUNKS % UNITS, place = task / CHUNKS / UNITS, count = 0;
#pragma unroll
    for (int i = 0; i < TOKENS / 32; i++) {
      u32 same = __ballot_sync(~0u, own[i] == place + 1);
      if (own[i] == place + 1) list[count + __popc(same & (1u << lane) - 1)] = i * 32 + lane;
      count += __popc(same);
    }
    __syncwarp();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int first = min(chunk * each, K), width = min(each, K - first);
    const bf16* row = lora.a + (size_t)place * lora.a_stride + (size_t)(unit * 16 + lane / 4) * K + first + lane % 4 * 8;
    for (int base = 0; base < count; base += 32) {
      if (count - base <= 8) shrink_tokens<1>(lora, x, row, unit, chunk, first, width, K, list, base, count);
      else if (count - base <= 16) shrink_tokens<2>(lora, x, row, unit, chunk, first, width, K, list, base, count);
      else shrink_tokens<4>(lora, x, row, unit, chunk, first, width, K, list, base, count);
    }
    __syncwarp();  // the list is free
  }
}

__device__ __forceinline__ uint4 now(const float* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

// Four columns of x @ A^T of a token as pairs of bf16, from column `at` of `low` on, once they are there.
__device__ __forceinline__ uint2 low_of(const Lora& lora, int token, int at) {
  uint4 part[CHUNKS];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) part[i] = now(lora.low + ((size_t)i * TOKENS + token) * WIDTH + at);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) all &= part[i].x && part[i].y && part[i].z && part[i].w;
  } while (!all);
  float sum[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    sum[0] += __uint_as_float(part[i].x), sum[1] += __uint_as_float(part[i].y);
    sum[2] += __uint_as_float(part[i].z), sum[3] += __uint_as_float(part[i].w);
  }
  return make_uint2(bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]));
}

// Of a warp, after its block has read `low`: the last one of READERS-th `reader` makes that part of it 0 again.
__device__ __forceinline__ void leave(const Lora& lora, int M, int reader) {
  int before = 0;
  if (threadIdx.x % 32 == 0) before = atomicAdd(lora.state + reader, 1);
  if (__shfl_sync(~0u, before, 0) != gridDim.x - 1) return;
  for (int at = reader * 32 + threadIdx.x % 32; at < M * WIDTH / 4; at += READERS * 32)
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) *(uint4*)(lora.low + i * TOKENS * WIDTH + at * 4) = make_uint4(0, 0, 0, 0);
  if (threadIdx.x % 32 == 0) lora.state[reader] = 0;
}

// A block's columns, [SETS, WIDE] of them.
template <int SETS, int WIDE>
struct Block {
  int column, columns;   // the first one of a set, and how many of a set have adapters
  int projection, edge;  // of the first one, and the column of a set from which on it is the next projection

  // N: columns of the product, a set's
  __device__ __forceinline__ Block(const Lora& lora, int column, int N) : column(column), projection(0), edge(WIDE) {
    columns = max(0, min(WIDE, (SETS == 2 ? N : lora.columns) - column));
    if (SETS == 2 || PROJECTIONS == 1) return;
    projection = PROJECTIONS - 1;
#pragma unroll
    for (int i = PROJECTIONS - 2; i >= 0; i--)
      if (column < lora.ends[i]) projection = i, edge = lora.ends[i] - column;
  }

  static constexpr int FACTORS = SETS * WIDE * RANK;  // numbers of an adapter's B: [SETS, WIDE, RANK]

  // Every COUNT-th adapter from `rank` on, a bit each.
  template <int COUNT>
  __device__ __forceinline__ u32 adapters(int rank) const {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 32; i += COUNT) bits |= 1u << i;
    return columns ? bits << rank : 0;
  }

  __device__ __forceinline__ u32 bytes(int adapters) const { return adapters * SETS * columns * RANK * 2; }

  __device__ __forceinline__ void copy(bf16* to, const Lora& lora, int adapter, int N, u64* barrier, u64 policy) const {
#pragma unroll
    for (int h = 0; h < SETS; h++)
      copy_rows(to + h * WIDE * RANK, lora.b + (size_t)adapter * lora.b_stride + (size_t)(h * N + column) * RANK,
                columns * RANK * 2, barrier, policy);
  }

  // x @ A^T of the tokens in the list to `lows` [ROWS, 2, RANK]: of one projection or two. Of 256 threads.
  __device__ __forceinline__ void gather(const Lora& lora, bf16* lows, const Adapted& adapted) const {
    int quads = (SETS == 2 || edge < WIDE ? 2 : 1) * RANK / 4;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int item = threadIdx.x; item < adapted.count * quads; item += 256) {
      int token = adapted.list[item / quads], at = item % quads * 4;
      *(uint2*)(lows + token * 2 * RANK + at) = low_of(lora, token, projection * RANK + at);
    }
  }

  // The sums of two tokens += low @ B^T, with 16 columns of low, if the adapter is theirs (mine, other). b: of the adapter.
  // row, below: of low of the two tokens, of one projection and then of the other. All are in shared memory.
  __device__ __forceinline__ void expand(float (&sum)[SETS][WIDE / 2], const bf16* b, bool mine, bool other, const bf16* row,
                                         const bf16* below) const {
    int lane = threadIdx.x % 32;
    uint2 up[2], down[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      up[i] = down[i] = make_uint2(0, 0);
      if (mine) up[i] = *(const uint2*)(row + i * RANK + lane % 4 * 4);
      if (other) down[i] = *(const uint2*)(below + i * RANK + lane % 4 * 4);
    }
#pragma unroll
    for (int h = 0; h < SETS; h++)
#pragma unroll
      for (int j = 0; j < WIDE / 8; j++) {
        if (8 * j >= columns) continue;
        bool second = SETS == 2 ? h : 8 * j >= edge;
        uint2 right = *(const uint2*)(b + (h * WIDE + 8 * j + lane / 4) * RANK + lane % 4 * 4);
        uint2 top = second ? up[1] : up[0], bottom = second ? down[1] : down[0];
        multiply_bf16(*(float(*)[4])(&sum[h][4 * j]), top.x, bottom.x, top.y, bottom.y, right.x, right.y);
      }
  }
};
