// x += heads @ output^T, where heads are the attention of a decode step's tokens, at most TOKENS, over the norm of x. One
// launch does it all: the norm, the projection to queries, keys and values, norms of heads, rotation, the write into the
// cache, attention, the output projection and the residual. Sums are float32, and numbers are bf16. CODED: weights are codes
// of e4m3 with a scale for each 128 x 128, and what they are multiplied with becomes codes with a scale for each 128. The
// tensor cores add up codes with some 14 bits, so every 128 columns have a sum of their own, which is added in float32.
//
// A cluster of 8 blocks has a key head: its rows of the projection, its keys and values, its columns of the output
// projection. All blocks must run at once, because clusters wait for each other's sums. They do: a GPU has more SMs than
// HEADS * 8, and no kernel behind this one starts before all of its blocks have. One ring of stages runs through all of a
// block's work. Weights, lengths, tables and cached keys do not come from the kernel ahead, so copies do not wait for it.
//
// 1. Each block has 1 / 8 of the head's rows of the projection, and sends the sums to all blocks of the cluster.
// 2. The cached keys of all tokens are one line of units of 16, of which each block has an equal run. A block's parts of
//    each token go to all blocks, which merge them in the order of blocks. Part (block, token) has place block + token:
//    the runs are in order, so no two parts share a place. A part's channels are in the order of channel_of, in which no
//    two lanes of a warp write to the same bank.
// 3. Each block has 1 / 8 of the rows of the output projection, for the columns of this head. Block r of cluster h adds up
//    the h-th part of the rows of all blocks r, in the order of heads. Sums travel as words that say themselves that they
//    are there: 0 has not arrived, and -0 is sent for +0. Who reads a word clears it for the next call.
//
// A page of the cache is [K heads | V heads, PAGE, D] at kv + page * page_stride; rows_of_kv maps [K | V, halves of rows,
// rows of D, D / 2]. `words` [HEADS * 8, HEADS, TOKENS, HIDDEN / 64] is zero before and after. `scale` holds log2(e).

#include "gpu.cuh"
#include "tensor_cores.cuh"

constexpr int D = 128, BLOCKS = 8, WARPS = 8, THREADS = WARPS * 32, DEPTH = 512, CHUNKS = HIDDEN / DEPTH;
// A stage is of the projection: 16 rows of 1,024 bytes in bf16, ROWS of 128 of codes; or two units of 16 keys and their
// values; or of the output projection: 64 rows of 256 bytes. Boxes are of 4 KB and more, because smaller ones take longer than
// their bytes. Those with rows of 128 bytes are swizzled.
constexpr int STAGE = 16384, UNIT = STAGE / 2, HALF = UNIT / 4, BOX = 256, PITCH = BOX * 2;
constexpr int OF_BOX = CODED ? 128 : 64, GROUPS = HIDDEN / 128;  // columns of 128 bytes; groups of x
constexpr int WIDTH = GROUP * D, OF_HEAD = WIDTH + 2 * D, ROWS = OF_HEAD / BLOCKS, ROW_TILES = (ROWS + 63) / 64;
constexpr int OUT_ROWS = HIDDEN / BLOCKS, OUT_TILES = OUT_ROWS / 64, OWNED = OUT_ROWS / HEADS, OUT_BLOCKS = (OUT_ROWS + 191) / 128;
constexpr int PLACES = BLOCKS + TOKENS - 1, PART = WIDTH + 2 * GROUP, STEPS = WIDTH / (2 * OF_BOX), LAST_STAGES = OUT_TILES * STEPS;
constexpr int FIRST_STAGES = CODED ? GROUPS : ROWS / 16 * CHUNKS, PIECES = CODED ? 2 : WARPS;  // of the projection's sums
constexpr int PARTS = PLACES * PART > PIECES * ROWS * TOKENS ? PLACES * PART : PIECES * ROWS * TOKENS;
constexpr float LOW = -1e30f;
static_assert(CHUNKS * DEPTH == HIDDEN && OUT_TILES * 64 == OUT_ROWS && OWNED * HEADS == OUT_ROWS && ROWS % 32 == 0);
static_assert(GROUP % 2 == 0 && GROUP <= 8 && TOKENS <= 8 && STEPS * 2 * OF_BOX == WIDTH);
constexpr int CODES = CODED ? GROUPS * 1024 : 0, WORK = CODES > WARPS * PART * 4 ? CODES : WARPS * PART * 4;  // bytes
constexpr int PIECES_OF_X = HIDDEN / 16 * TOKENS, OWN_PIECES = (PIECES_OF_X + THREADS - 1) / THREADS;
static_assert(CODED || WARPS * 8 + HIDDEN / 2 <= PARTS, "squares and gains lie where parts come later");
static_assert(CODED || TOKENS * D <= WARPS * PART, "angles lie where warps leave sums later");
static_assert(CODED * GROUP * 1024 + OUT_TILES * 2048 <= WORK + PARTS * 4, "sums of the output lie behind codes of heads");
static_assert(!CODED || 2 * GROUPS <= 128, "threads have the scales of the weights");

// Four 8 x 8 matrices, of whose rows each lane has one's address.
__device__ __forceinline__ uint4 matrices(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint4 matrices_transposed(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_word(float* to, float value) {
  u32 bits = __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits ? bits : 0x80000000u) : "memory");
}

__device__ __forceinline__ u32 load_word(const float* from) {
  u32 bits;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}

// Two neighbours of 64 bytes in rows that begin at the same bank, read so that no lanes of a quarter share one.
__device__ __forceinline__ void both(uint4& first, uint4& second, const unsigned char* at, bool odd) {
  uint4 a = *(const uint4*)(at + (odd ? 64 : 0)), b = *(const uint4*)(at + (odd ? 0 : 64));
  first = odd ? b : a, second = odd ? a : b;
}

// sums of 16 rows of a box, for 64 columns at `at` of which this lane has 16, and x's.
__device__ __forceinline__ void add_columns(float (&sum)[4], const unsigned char* at, const u32 (&x)[8], int lane) {
  uint4 a[2], b[2];
  at += lane / 4 * PITCH + lane % 4 * 16;
  both(a[0], a[1], at, lane & 4);
  both(b[0], b[1], at + 8 * PITCH, lane & 4);
#pragma unroll
  for (int s = 0; s < 2; s++) {
    multiply_bf16(sum, a[s].x, b[s].x, a[s].y, b[s].y, x[4 * s], x[4 * s + 1]);
    multiply_bf16(sum, a[s].z, b[s].z, a[s].w, b[s].w, x[4 * s + 2], x[4 * s + 3]);
  }
}

// sums of 16 rows and 16 columns of a swizzled box, of which `at` is this lane's row, from 16 bytes `chunk` of it on.
__device__ __forceinline__ void add_chunks(float (&sum)[4], u32 at, int chunk, const u32* x, int lane) {
  uint4 a = matrices(at + ((chunk + lane / 16) ^ lane % 8) * 16);
  multiply_bf16(sum, a.x, a.y, a.z, a.w, x[0], x[1]);
}

// This lane's 16 of 64 columns, from x or from shared memory.
template <bool SHARED>
__device__ __forceinline__ void load_columns(u32 (&to)[8], const bf16* from, int t) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const bf16* at = from + t * 8 + i * 32;
    uint4 v = SHARED ? *(const uint4*)at : fresh(at);
    to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
  }
}

// The largest of this lane's numbers and of those of the lanes that differ from it in the lowest BITS bits.
template <int BITS, int COUNT>
__device__ __forceinline__ float largest(const u32 (&pairs)[COUNT]) {
  float top = 1e-10f;
#pragma unroll
  for (int i = 0; i < COUNT; i++) top = fmaxf(top, fmaxf(fabsf(low(pairs[i])), fabsf(high(pairs[i]))));
#pragma unroll
  for (int bit = 1; bit < 1 << BITS; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
  return top;
}

// Two pairs of bf16 as four codes.
__device__ __forceinline__ u32 code(u32 a, u32 b, float factor) {
  return codes_of(low(a) * factor, high(a) * factor) | (u32)codes_of(low(b) * factor, high(b) * factor) << 16;
}

// What threads wrote to shared memory is there for products after they have met.
__device__ __forceinline__ void for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The first of the channels, 8 apart, of a pair of a part.
__device__ __forceinline__ int channel_of(int pair) { return 16 * (pair / 8 % 8 ^ pair / 128) + pair % 8; }

struct Token {  // cached keys, units with the token's own, and the blocks that have them; none of a row that is dead
  int slot, before, units, first, last;
};

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS + 32, 1)
attention_sublayer(bf16* x, const bf16* gain, const __grid_constant__ TensorMap weight,
                   const __grid_constant__ TensorMap output, const __grid_constant__ TensorMap rows_of_kv, bf16* kv,
#if CODED
                   const float* weight_scales, const float* output_scales,
#endif
#if NORMED
                   const bf16* q_norm, const bf16* k_norm,
#endif
                   const float* cos_sin, const int* slots, const int* q_starts, const int* seq_lens, const int* alive,
                   const int* block_tables, float* words, int table_width, int page_stride, float scale, float eps, int rows,
                   int tokens) {
  extern __shared__ __align__(1024) unsigned char ring[];
  unsigned char* codes = ring + STAGES * STAGE;              // [GROUPS, 8, 128], swizzled: of x, then of heads
  float* work = (float*)codes;                               // [WARPS, PART]: sums, maxima, totals by warp
  float* parts = (float*)(codes + WORK);                     // [PLACES, PART]: the same by block; first sums of rows
  float* angles = CODED ? parts + PARTS : work;              // [TOKENS, 2, D / 2]: cosines and sines
  bf16* inbox = (bf16*)(parts + PARTS + CODED * TOKENS * D);  // [TOKENS, OF_HEAD]; then heads
  u64 *full = (u64*)(inbox + TOKENS * OF_HEAD), *empty = full + STAGES, *rows_there = empty + STAGES, *parts_there = rows_there + 1;
  long long* own_places = (long long*)(parts_there + 1);     // [8]: of the key that each token has itself
  float* own_scores = (float*)(own_places + 8);              // [8, GROUP]
  Token* of_tokens = (Token*)(own_scores + 8 * GROUP);       // [8]
  int* starts = (int*)(of_tokens + 8);                       // [9]: units before each token
  float *of_rows = (float*)(starts + 10), *of_output = of_rows + 2 * GROUPS;  // scales [2, GROUPS], [OUT_BLOCKS, GROUP]
  float *of_heads = of_output + OUT_BLOCKS * GROUP, *of_x = of_heads + GROUP * 8;  // [GROUP, 8], [GROUPS, 8]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int head = blockIdx.x / BLOCKS, rank = blockIdx.x % BLOCKS;
  // Ahead of the weights, behind which they would wait.
#if CODED
  uint4 gains[OWN_PIECES][2];
#pragma unroll
  for (int k = 0; k < OWN_PIECES; k++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      gains[k][i] = *((const uint4*)gain + (threadIdx.x + k * THREADS) % (HIDDEN / 16) * 2 + i);
  float own_scale = 0;
  if (threadIdx.x < 2 * GROUPS) {
    int block = rank * ROWS / 128 + threadIdx.x / GROUPS;
    block += block < GROUP ? head * GROUP : (HEADS - 1) * GROUP + head + (block < GROUP + 1 ? 0 : HEADS - 1);
    own_scale = __ldg(weight_scales + (size_t)min(block, HEADS * (GROUP + 2) - 1) * GROUPS + threadIdx.x % GROUPS);
  }
  int nth_scale = threadIdx.x - 128;
  if (nth_scale >= 0 && nth_scale < OUT_BLOCKS * GROUP) {
    int block = min(rank * OUT_ROWS / 128 + nth_scale / GROUP, (HIDDEN - 1) / 128);
    own_scale = __ldg(output_scales + (size_t)block * (HEADS * GROUP) + head * GROUP + nth_scale % GROUP);
  }
#else
  uint4 gains[(HIDDEN / 8 + THREADS - 1) / THREADS];
#pragma unroll
  for (int i = 0; i < sizeof gains / 16; i++)
    gains[i] = *((const uint4*)gain + min((int)threadIdx.x + i * THREADS, HIDDEN / 8 - 1));
#endif
#if NORMED
  u32 of_query[2], of_key[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    of_query[i] = *(const u32*)(q_norm + i * 64 + lane * 2), of_key[i] = *(const u32*)(k_norm + i * 64 + lane * 2);
#endif
  if (warp == WARPS) {
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], WARPS);
      barrier_init(rows_there, 1), barrier_init(parts_there, 1);
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncwarp();
  }
  __syncthreads();
  if (warp == WARPS) {
    int turn = 0;
    u64 policy = evict_first();
    auto claim = [&](u32 bytes) {
      int stage = turn % STAGES;
      barrier_wait(&empty[stage], (turn / STAGES & 1) ^ 1);
      if (lane == 0) barrier_expect(&full[stage], bytes);
      __syncwarp();
      turn++;
      return stage;
    };
    auto copy_projection = [&](int from, int to) {
#pragma unroll 1
      for (; from < to; from++) {
        constexpr int BOXES = CODED ? ROWS / 32 : 2;
        int row = rank * ROWS + (CODED ? lane % BOXES * 32 : from / CHUNKS * 16);  // of this head's
        row += row < WIDTH ? head * WIDTH : (HEADS - 1) * WIDTH + head * D + (row < WIDTH + D ? 0 : (HEADS - 1) * D);
        int stage = claim(CODED ? ROWS * 128 : STAGE);
        if (lane < BOXES)
          copy_tile(ring + stage * STAGE + lane * (CODED ? 32 * 128 : STAGE / 2), &weight, &full[stage], row,
                    CODED ? from * 128 : from % CHUNKS * DEPTH + lane * BOX, policy);
      }
    };
    constexpr int AHEAD = STAGES < FIRST_STAGES ? STAGES : FIRST_STAGES;
    copy_projection(0, AHEAD);
    // The tokens of rows, by lane.
    int token = -1, slot = 0, before = 0, units = 0;
    if (lane < 8) of_tokens[lane] = {0, 0, 0, 0, -1};
    if (lane < rows) {
      int next = q_starts[lane + 1];
      token = q_starts[lane], slot = slots[lane];
      if (next == token) token = -1;
      if (alive[slot]) before = seq_lens[slot], units = before / 16 + 1;
      if (token < 0) units = 0;
    }
    int sum = units;  // rows and tokens have the same order
    for (int by = 1; by < 8; by *= 2) {
      int other = __shfl_up_sync(~0u, sum, by);
      if (lane >= by) sum += other;
    }
    int line = __shfl_sync(~0u, sum, 7), shares = min(line, BLOCKS), first = 0, last = -1;
    if (units) first = ((sum - units + 1) * shares - 1) / line, last = (sum * shares - 1) / line;
    __syncwarp();
    if (token >= 0) of_tokens[token] = {slot, units ? before : 0, units, first, last};
    int count = units ? last - first + 1 : 0;
    for (int by = 16; by; by /= 2) count += __shfl_xor_sync(~0u, count, by);
    __syncwarp();
    if (lane == 0) {
      starts[0] = 0;
      for (int i = 0; i < 8; i++) starts[i + 1] = starts[i] + of_tokens[i].units;
      barrier_expect(rows_there, tokens * OF_HEAD * 2), barrier_expect(parts_there, count * PART * 4);
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    if (lane < tokens) {
      int page = block_tables[(size_t)of_tokens[lane].slot * table_width + of_tokens[lane].before / PAGE];
      own_places[lane] = (long long)page * page_stride + (head * PAGE + of_tokens[lane].before % PAGE) * D;
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
      if (i < tokens) ((float4*)(angles + i * D))[lane] = ((const float4*)(cos_sin + (size_t)of_tokens[i].before * D))[lane];
    int begin = min(rank, shares) * line / max(shares, 1), end = min(rank + 1, shares) * line / max(shares, 1);
    auto row_of = [&](int unit) {
      if (unit >= end) return 0;
      int i = 0;
      while (starts[i + 1] <= unit) i++;
      int key = (unit - starts[i]) * 16;
      int page = block_tables[(size_t)of_tokens[i].slot * table_width + key / PAGE];
      return page * (page_stride / D) + head * PAGE + key % PAGE;
    };
    int place = row_of(begin + lane), next = row_of(begin + 32 + lane);  // a table's numbers take long, so they come ahead
    asm volatile("bar.arrive 2, %0;" ::"n"(THREADS + 32) : "memory");  // the tokens are there
    copy_projection(AHEAD, FIRST_STAGES);
#pragma unroll 1
    for (int unit = begin, of = 0; unit < end; unit += 2, of += 2) {
      if (of == 32) place = next, next = row_of(unit + 32 + lane), of = 0;
      int count = min(2, end - unit), stage = claim(count * UNIT);
      int row = __shfl_sync(~0u, place, of + lane % 2);
      if (lane < count) copy_tiles(ring + stage * STAGE + lane * UNIT, &rows_of_kv, &full[stage], row, policy);
    }
#pragma unroll 1
    for (int i = 0; i < LAST_STAGES; i++) {
      // The kernel behind fills its ring on the other SMs, with little of the bandwidth that these still need.
      if (i == LAST_STAGES * 2 / 5) asm volatile("griddepcontrol.launch_dependents;");
      int stage = claim(STAGE);
      if (lane < 2)
        copy_tile(ring + stage * STAGE + lane * UNIT, &output, &full[stage], rank * OUT_ROWS + i / STEPS * 64,
                  head * WIDTH + (i % STEPS * 2 + lane) * OF_BOX, policy);
    }
    asm volatile("barrier.cluster.wait;" ::: "memory");
    return;
  }
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#if CODED
  if (threadIdx.x < 2 * GROUPS) of_rows[threadIdx.x] = own_scale;
  if (nth_scale >= 0 && nth_scale < OUT_BLOCKS * GROUP) of_output[nth_scale] = own_scale;
#else
  uint4* held_gains = (uint4*)(parts + WARPS * 8);
#pragma unroll
  for (int i = 0; i < sizeof gains / 16; i++)
    if (threadIdx.x + i * THREADS < HIDDEN / 8) held_gains[threadIdx.x + i * THREADS] = gains[i];
#endif
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if CODED
  uint4 loaded[OWN_PIECES][2];
#pragma unroll
  for (int k = 0; k < OWN_PIECES; k++) {
    int piece = threadIdx.x + k * THREADS;
#pragma unroll
    for (int i = 0; i < 2; i++)
      loaded[k][i] = piece < tokens * (HIDDEN / 16) ? fresh((const uint4*)x + piece * 2 + i) : make_uint4(0, 0, 0, 0);
  }
#else
  u32 own[CHUNKS][8];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int i = 0; i < 8; i++) own[c][i] = 0;
    if (g < tokens) load_columns<false>(own[c], x + (size_t)g * HIDDEN + c * DEPTH + warp * 64, t);
  }
#endif
  // What this thread adds up at the end: rows of tokens.
  constexpr int ITEMS = (OWNED * TOKENS + THREADS - 1) / THREADS;
  float old[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    int item = threadIdx.x + i * THREADS;
    unsigned short bits = 0;
    if (item < OWNED * tokens)
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits)
                   : "l"(x + (size_t)(item / OWNED) * HIDDEN + rank * OUT_ROWS + head * OWNED + item % OWNED));
    old[i] = low(bits);
  }
#if CODED
  // A thread has pieces of 16 columns, and eight neighbours have a group.
  u32 own[OWN_PIECES][8];
#pragma unroll
  for (int k = 0; k < OWN_PIECES; k++) {
    u32 pairs[8] = {loaded[k][0].x, loaded[k][0].y, loaded[k][0].z, loaded[k][0].w,
                    loaded[k][1].x, loaded[k][1].y, loaded[k][1].z, loaded[k][1].w};
    float square = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) own[k][i] = pairs[i], square += low(pairs[i]) * low(pairs[i]) + high(pairs[i]) * high(pairs[i]);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) square += __shfl_xor_sync(~0u, square, bit);
    if (lane == 0) parts[warp + k * WARPS] = square;  // of the row's 512 columns
  }
  together<THREADS>();
#pragma unroll
  for (int k = 0; k < OWN_PIECES; k++) {
    int piece = threadIdx.x + k * THREADS, token = piece / (HIDDEN / 16);
    if (piece >= PIECES_OF_X) break;
    float square = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) square += parts[token * CHUNKS + c];
    float unit_of = rsqrtf(square / HIDDEN + eps);
    u32 by[8] = {gains[k][0].x, gains[k][0].y, gains[k][0].z, gains[k][0].w, gains[k][1].x, gains[k][1].y, gains[k][1].z, gains[k][1].w};
#pragma unroll
    for (int i = 0; i < 8; i++) own[k][i] = multiplied(bf16_pair(low(own[k][i]) * unit_of, high(own[k][i]) * unit_of), by[i]);
    float top = largest<3>(own[k]), factor = __fdiv_rn(448.0f, top);
    int nth = piece % (HIDDEN / 16);
    *(uint4*)(codes + nth / 8 * 1024 + token * 128 + (nth % 8 ^ token) * 16) =
        make_uint4(code(own[k][0], own[k][1], factor), code(own[k][2], own[k][3], factor),
                   code(own[k][4], own[k][5], factor), code(own[k][6], own[k][7], factor));
    if (nth % 8 == 0) of_x[nth / 8 * 8 + token] = __fdiv_rn(top, 448.0f);
  }
  for_products();
#else
  float square = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < 8; i++) square += low(own[c][i]) * low(own[c][i]) + high(own[c][i]) * high(own[c][i]);
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  if (t == 0) parts[warp * 8 + g] = square;
  together<THREADS>();
  square = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) square += parts[w * 8 + g];
  float unit_of = rsqrtf(square / HIDDEN + eps);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 by[8];
    load_columns<true>(by, (const bf16*)held_gains + c * DEPTH + warp * 64, t);
#pragma unroll
    for (int i = 0; i < 8; i++) own[c][i] = multiplied(bf16_pair(low(own[c][i]) * unit_of, high(own[c][i]) * unit_of), by[i]);
  }
#endif
  together<THREADS>();  // what lies in `parts` has been read

  // 1. Queries, keys and values.
  int turn = 0;
  auto filled = [&] {
    int stage = turn % STAGES;
    barrier_wait(&full[stage], turn / STAGES & 1);
    return stage;
  };
  auto free = [&](int turn) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[turn % STAGES]);
  };
#if CODED
  // The two warpgroups have alternate groups of columns.
  float sum[ROW_TILES][4] = {};
  for (; turn < FIRST_STAGES; turn++) {
    u32 rows = shared_address(ring + filled() * STAGE), of_group = shared_address(codes + turn * 1024);
    if (turn % 2 == warp / 4) {
      float part[ROW_TILES][4];
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) multiply_codes(part[i], operand(rows + i * 8192 + k * 32), operand(of_group + k * 32), k != 0);
      products_commit();
      products_wait<0>();
      float2 by = *(const float2*)(of_x + turn * 8 + 2 * t);
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++) {
        results(part[i]);
        float of = of_rows[min((rank * ROWS % 128 + i * 64 + warp % 4 * 16) / 128, 1) * GROUPS + turn];
#pragma unroll
        for (int r = 0; r < 4; r++) sum[i][r] += part[i][r] * (of * (r % 2 ? by.y : by.x));
      }
    }
    free(turn);
  }
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int row = i * 64 + warp % 4 * 16 + g + r / 2 * 8, nth = 2 * t + r % 2;
      if (nth < TOKENS && row < ROWS) parts[(warp / 4 * TOKENS + nth) * ROWS + row] = sum[i][r];
    }
#else
#pragma unroll 1
  for (int i = 0; i < ROWS / 16; i++) {
    float sum[4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++, turn++) {
      add_columns(sum, ring + filled() * STAGE + warp / 4 * 16 * PITCH + warp % 4 * 128, own[c], lane);
      free(turn);
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
      if (2 * t + r % 2 < TOKENS) parts[(warp * TOKENS + 2 * t + r % 2) * ROWS + i * 16 + g + r / 2 * 8] = sum[r];
  }
#endif
  asm volatile("bar.sync 2, %0;" ::"n"(THREADS + 32) : "memory");
  asm volatile("barrier.cluster.wait;" ::: "memory");  // no block sends before the other's barrier is there
#pragma unroll
  for (int from = 0; from < TOKENS * ROWS; from += THREADS) {
    int item = from + threadIdx.x;
    bool real = item < tokens * ROWS;
    float value = 0;
#pragma unroll
    for (int w = 0; w < PIECES; w++) value += real ? parts[w * TOKENS * ROWS + item] : 0;
    float other = __shfl_xor_sync(~0u, value, 1);
    u32 pair = lane % 2 ? bf16_pair(other, value) : bf16_pair(value, other);
    u32 to = shared_address(inbox + item / ROWS * OF_HEAD + rank * ROWS + item % ROWS / 2 * 2), told = shared_address(rows_there);
    if (real)
#pragma unroll
      for (int b = 0; b < BLOCKS / 2; b++) {
        int block = (b * 2 + lane % 2 + rank) % BLOCKS;
        send(address_in(to, block), __uint_as_float(pair), address_in(told, block));
      }
  }
  int line = starts[8], shares = min(line, BLOCKS), token = 0;
  int begin = min(rank, shares) * line / max(shares, 1), end = min(rank + 1, shares) * line / max(shares, 1);
  while (begin < end && starts[token + 1] <= begin) token++;
  wait_for_cluster(rows_there);
  // Norms and rotation of the tokens of this block's run.
  for (int item = warp; begin < end; item += WARPS) {
    int of = token + item / (GROUP + 1), nth = item % (GROUP + 1);
    if (of >= tokens || starts[of] >= end) break;
    u32* vector = (u32*)(inbox + of * OF_HEAD + nth * D) + lane;
    u32 a = vector[0], b = vector[32];
    float value[4] = {low(a), high(a), low(b), high(b)};
#if NORMED
    float all = value[0] * value[0] + value[1] * value[1] + value[2] * value[2] + value[3] * value[3];
    for (int bit = 16; bit; bit /= 2) all += __shfl_xor_sync(~0u, all, bit);
    float by = rsqrtf(all / D + eps);
    a = multiplied(bf16_pair(value[0] * by, value[1] * by), nth < GROUP ? of_query[0] : of_key[0]);
    b = multiplied(bf16_pair(value[2] * by, value[3] * by), nth < GROUP ? of_query[1] : of_key[1]);
    value[0] = low(a), value[1] = high(a), value[2] = low(b), value[3] = high(b);
#endif
    float2 c = ((const float2*)(angles + of * D))[lane], s = ((const float2*)(angles + of * D))[32 + lane];
    vector[0] = bf16_pair(value[0] * c.x - value[2] * s.x, value[1] * c.y - value[3] * s.y);
    vector[32] = bf16_pair(value[2] * c.x + value[0] * s.x, value[3] * c.y + value[1] * s.y);
  }
  together<THREADS>();

  // 2. Attention. The scores of each token's own key, where its last unit is, and that key and value for the cache.
  for (int of = token; begin < end && of < tokens && starts[of] < end; of++) {
    if (starts[of + 1] == starts[of] || starts[of + 1] > end) continue;
    const uint2* key = (const uint2*)(inbox + of * OF_HEAD + WIDTH) + lane;
    for (int nth = warp; nth < GROUP + 2; nth += WARPS) {
      if (nth < GROUP) {
        uint2 q = *((const uint2*)(inbox + of * OF_HEAD + nth * D) + lane), k = *key;
        float score = low(q.x) * low(k.x) + high(q.x) * high(k.x) + low(q.y) * low(k.y) + high(q.y) * high(k.y);
        for (int bit = 16; bit; bit /= 2) score += __shfl_xor_sync(~0u, score, bit);
        if (lane == 0) own_scores[of * GROUP + nth] = score * scale;
      } else {
        ((uint2*)(kv + own_places[of] + (nth - GROUP) * HEADS * PAGE * D))[lane] = key[(nth - GROUP) * 32];
      }
    }
  }
  u32 query[D / 16][2];
  float top[2], total[2], out[D / 16][4];  // of query heads 2 t and 2 t + 1; channels 16 j + g and 8 further
  auto start_token = [&] {
    const bf16* of = inbox + token * OF_HEAD + g * D + 2 * t;
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      query[j][0] = g < GROUP ? *(const u32*)(of + j * 16) : 0, query[j][1] = g < GROUP ? *(const u32*)(of + j * 16 + 8) : 0;
      out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0;
    }
    top[0] = top[1] = LOW, total[0] = total[1] = 0;
  };
  auto end_token = [&] {
    sum_rows(total);
    float* mine = work + warp * PART;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int of = 2 * t + i;
      if (of >= GROUP) continue;
      if (g == 0) mine[WIDTH + of] = top[i], mine[WIDTH + GROUP + of] = total[i];
#pragma unroll
      for (int j = 0; j < D / 16; j++) *(float2*)(mine + of * D + 16 * (j ^ t) + 2 * g) = make_float2(out[j][i], out[j][i + 2]);
    }
    together<THREADS>();
#pragma unroll
    for (int item = threadIdx.x; item < WIDTH / 2; item += THREADS) {
      int of = item * 2 / D;
      float most = LOW, all = 0, share[WARPS];
      float2 value = make_float2(0, 0);
#pragma unroll
      for (int w = 0; w < WARPS; w++) most = fmaxf(most, share[w] = work[w * PART + WIDTH + of]);
      bool with_own = starts[token + 1] <= end;
      if (with_own) {
        float score = own_scores[token * GROUP + of];
        most = fmaxf(most, score), all = power_of(score - most);
        const bf16* own = inbox + token * OF_HEAD + WIDTH + D + channel_of(item);
        value = make_float2(all * low(own[0]), all * low(own[8]));
      }
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        share[w] = power_of(share[w] - most);
        float2 add = *(const float2*)(work + w * PART + 2 * item);
        value.x += share[w] * add.x, value.y += share[w] * add.y, all += share[w] * work[w * PART + WIDTH + GROUP + of];
      }
      float* place = parts + (rank + token) * PART;
      u32 to = shared_address(place + 2 * item), told = shared_address(parts_there), numbers = shared_address(place + WIDTH + of);
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        int block = (b + rank) % BLOCKS;
        send(address_in(to, block), value.x, value.y, address_in(told, block));
        if (item % (D / 2) == 0) {
          send(address_in(numbers, block), most, address_in(told, block));
          send(address_in(numbers + GROUP * 4, block), all, address_in(told, block));
        }
      }
    }
  };
  // Rows of a half are swizzled: 16 bytes c of row r lie at c ^ r % 8. This lane's row of four matrices, and its bytes.
  int nth_row = lane % 16, of_keys = lane / 16, nth_value = lane % 8 + lane / 16 * 8, of_values = lane / 8 % 2;
  auto add_unit = [&](unsigned char* unit, int key, int before) {
    u32 keys = shared_address(unit) + nth_row * 128, values = shared_address(unit) + 2 * HALF + nth_value * 128;
    float score[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      uint4 a = matrices(keys + j / 4 * HALF + ((j % 4 * 2 + of_keys) ^ nth_row % 8) * 16);
      multiply_bf16(j % 2 ? other : score, a.x, a.y, a.z, a.w, query[j][0], query[j][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      score[i] = key + g + i / 2 * 8 < before ? (score[i] + other[i]) * scale : -__uint_as_float(0x7f800000);
    float most[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
    largest_of_rows(most);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float now = fmaxf(top[i], most[i]), decay = power_of(top[i] - now);
      top[i] = now;
      score[i] = power_of(score[i] - now), score[i + 2] = power_of(score[i + 2] - now);
      total[i] = total[i] * decay + score[i] + score[i + 2];
#pragma unroll
      for (int j = 0; j < D / 16; j++) out[j][i] *= decay, out[j][i + 2] *= decay;
    }
    u32 kept[2];  // of values that no token has, which may be NaN
#pragma unroll
    for (int i = 0; i < 2; i++)
      kept[i] = (key + 2 * t + 8 * i < before ? 0xffff : 0) | (key + 2 * t + 8 * i + 1 < before ? 0xffff0000 : 0);
    u32 p0 = transposed(bf16_pair(score[0], score[1])), p1 = transposed(bf16_pair(score[2], score[3]));
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      uint4 a = matrices_transposed(values + j / 4 * HALF + ((j % 4 * 2 + of_values) ^ nth_value % 8) * 16);
      if (key + 16 > before) a.x &= kept[0], a.y &= kept[0], a.z &= kept[1], a.w &= kept[1];
      multiply_bf16(out[j], a.x, a.y, a.z, a.w, p0, p1);
    }
  };
  // Half a stage is always the same warp's, which so has seen the last copy to it, and waits for no other.
  int place = warp, round = turn / STAGES, unit = begin - turn % STAGES * 2 + place;
  auto next = [&] {
    int by = place + WARPS < 2 * STAGES ? WARPS : 2 * STAGES - place + warp;
    unit += by, place += by;
    if (place >= 2 * STAGES) place -= 2 * STAGES, round++;
  };
  while (unit < begin) next();
  turn += (end - begin + 1) / 2;
  for (int at = begin; at < end; at = starts[token + 1]) {
    if (at > begin) {
      end_token();
      together<THREADS>();  // all have read `work`
    }
    while (starts[token + 1] <= at) token++;
    start_token();
    int first = starts[token], stop = min(end, starts[token + 1]), before = of_tokens[token].before;
    for (; unit < stop; next()) {
      barrier_wait(&full[place / 2], round & 1);
      add_unit(ring + place * UNIT, (unit - first) * 16, before);
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[place / 2], place % 2 == 0 && unit + 1 == end ? WARPS : WARPS / 2);
    }
  }
  if (begin < end) end_token();
  wait_for_cluster(parts_there);
  bf16* heads = inbox;  // all of this block have read what they need of it
  constexpr int PER = THREADS / TOKENS, EACH = (WIDTH / 2 + PER - 1) / PER;  // threads of a token, and pairs of a thread
  constexpr int AT_A_TIME = EACH < 8 ? EACH : 8, RUN = EACH > 4 ? 1 : EACH > 2 ? 2 : BLOCKS;  // pairs; parts
  int merged = threadIdx.x / PER;
  Token own_runs = of_tokens[merged];
#pragma unroll 1
  for (int from = 0; from < EACH; from += AT_A_TIME) {
    float most[AT_A_TIME], all[AT_A_TIME] = {};
    float2 value[AT_A_TIME] = {};
    int pairs[AT_A_TIME];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; i++) most[i] = LOW, pairs[i] = min((int)threadIdx.x % PER + (from + i) * PER, WIDTH / 2 - 1);
    for (int base = own_runs.first; base <= own_runs.last; base += RUN)
#pragma unroll
      for (int i = 0; i < AT_A_TIME; i++) {
        const float *part = parts + (base + merged) * PART + pairs[i] * 2, *numbers = part - pairs[i] * 2 + WIDTH + pairs[i] * 2 / D;
        float top_of[RUN], now = most[i];
#pragma unroll
        for (int b = 0; b < RUN; b++) now = fmaxf(now, top_of[b] = base + b <= own_runs.last ? numbers[b * PART] : LOW);
        float decay = power_of(most[i] - now);
        most[i] = now, all[i] *= decay, value[i].x *= decay, value[i].y *= decay;
#pragma unroll
        for (int b = 0; b < RUN; b++) {
          if (base + b > own_runs.last) continue;
          float share = power_of(top_of[b] - now);
          float2 add = *(const float2*)(part + b * PART);
          value[i].x += share * add.x, value[i].y += share * add.y, all[i] += share * numbers[b * PART + GROUP];
        }
      }
    if (merged < tokens)
#pragma unroll
      for (int i = 0; i < AT_A_TIME; i++) {
        float by = own_runs.units ? 1 / all[i] : 0;
        bf16* to = heads + merged * OF_HEAD + pairs[i] * 2 / D * D + channel_of(pairs[i]);
        to[0] = to_bf16(value[i].x * by), to[8] = to_bf16(value[i].y * by);
      }
  }
  together<THREADS>();

  // 3. The output projection. Warp w and warp w + 4, which gives it its sums, have the same rows, and each half of the columns.
  int wg = warp / 4;
  float4* given = (float4*)(codes + (CODED ? GROUP * 1024 : 0)) + warp % 4 * 32 + lane;
  auto add_up = [&](int i, float (&value)[4]) {
    float4 others = given[i * 128];
    value[0] += others.x, value[1] += others.y, value[2] += others.z, value[3] += others.w;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int row = i * 64 + warp * 16 + g + r / 2 * 8, nth = 2 * t + r % 2;
      if (nth < tokens)  // block `rank` of cluster row / OWNED adds it up
        store_word(words + ((size_t)((row / OWNED * BLOCKS + rank) * HEADS + head) * TOKENS + nth) * OWNED + row % OWNED, value[r]);
    }
  };
#if CODED
  for (int item = threadIdx.x / 16; item < TOKENS * GROUP; item += THREADS / 16) {
    int token = item / GROUP, nth = item % GROUP, lane = threadIdx.x % 16;
    uint4 v = *((const uint4*)(heads + token * OF_HEAD + nth * 128) + lane);
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
    float top = largest<4>(pairs), factor = __fdiv_rn(448.0f, top);
    *(uint2*)(codes + nth * 1024 + token * 128 + (lane / 2 ^ token) * 16 + lane % 2 * 8) =
        make_uint2(code(v.x, v.y, factor), code(v.z, v.w, factor));
    if (lane == 0) of_heads[nth * 8 + token] = __fdiv_rn(top, 448.0f);
  }
  for_products();
  together<THREADS>();
  float part[LAST_STAGES][4];
#pragma unroll
  for (int n = 0; n < LAST_STAGES; n++, turn++) {
    u32 rows = shared_address(ring + filled() * STAGE) + wg * UNIT, of_group = shared_address(codes) + (n % STEPS * 2 + wg) * 1024;
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_codes(part[n], operand(rows + k * 32), operand(of_group + k * 32), k != 0);
    products_commit();
    products_wait<1>();
    if (n > 0) free(turn - 1);
  }
  products_wait<0>();
  float value[OUT_TILES][4] = {};
#pragma unroll
  for (int n = 0; n < LAST_STAGES; n++) {
    results(part[n]);
    int i = n / STEPS, nth = n % STEPS * 2 + wg;
    float of = of_output[(rank * OUT_ROWS % 128 + i * 64 + warp % 4 * 16) / 128 * GROUP + nth];
    float2 by = *(const float2*)(of_heads + nth * 8 + 2 * t);
#pragma unroll
    for (int r = 0; r < 4; r++) value[i][r] += part[n][r] * (of * (r % 2 ? by.y : by.x));
  }
#pragma unroll
  for (int i = 0; i < OUT_TILES; i++)
    if (wg) given[i * 128] = make_float4(value[i][0], value[i][1], value[i][2], value[i][3]);
  asm volatile("bar.sync %0, 64;" ::"r"(3 + warp % 4) : "memory");
#pragma unroll
  for (int i = 0; i < OUT_TILES; i++)
    if (!wg) add_up(i, value[i]);
#else
  u32 mine[STEPS][8];
#pragma unroll
  for (int c = 0; c < STEPS; c++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int column = (c * 2 + wg) * OF_BOX + i / 2 * 16 + 2 * t + i % 2 * 8;
      mine[c][i] = g < tokens ? *(const u32*)(heads + g * OF_HEAD + column) : 0;
    }
#pragma unroll 1
  for (int i = 0; i < OUT_TILES; i++) {
    float value[4] = {};
#pragma unroll
    for (int c = 0; c < STEPS; c++, turn++) {
      u32 at = shared_address(ring + filled() * STAGE + warp * HALF) + lane % 16 * 128;
      float of[2][4] = {};
#pragma unroll
      for (int k = 0; k < 4; k++) add_chunks(of[k % 2], at, k * 2, mine[c] + k * 2, lane);
      free(turn);
#pragma unroll
      for (int r = 0; r < 4; r++) value[r] += of[0][r] + of[1][r];
    }
    if (wg) given[i * 128] = make_float4(value[0], value[1], value[2], value[3]);
    asm volatile("bar.sync %0, 64;" ::"r"(3 + warp % 4) : "memory");
    if (!wg) add_up(i, value);
  }
#endif
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    int item = threadIdx.x + i * THREADS;
    if (item >= OWNED * tokens) continue;
    float* from = words + (size_t)blockIdx.x * HEADS * TOKENS * OWNED + item;
    u32 found[HEADS];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int h = 0; h < HEADS; h++) found[h] = load_word(from + h * TOKENS * OWNED);
#pragma unroll
      for (int h = 0; h < HEADS; h++) there = there && found[h];
    } while (!there);
    float value = 0;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      value += __uint_as_float(found[h]);
      from[h * TOKENS * OWNED] = 0;
    }
    x[(size_t)(item / OWNED) * HIDDEN + rank * OUT_ROWS + head * OWNED + item % OWNED] = to_bf16(old[i] + value);
  }
}
