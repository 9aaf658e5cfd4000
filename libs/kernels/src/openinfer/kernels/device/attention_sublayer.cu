// x += heads @ output^T, where heads are the attention of a decode step's tokens, at most TOKENS, over the norm of x. One
// launch does it all: the norm, the projection to queries, keys and values, norms of heads, rotation, the write into the
// cache, attention, the output projection and the residual. Sums are float32, and numbers are bf16. CODED: weights are, if 1,
// codes of e4m3 with a scale for each 128 x 128, and what they are multiplied with becomes codes with a scale for each 128. The
// tensor cores add up codes with some 14 bits, so every 128 columns have a sum of their own, which is added in float32. 2: INT4
// with a word for 128 columns of a row, 3: FP4 (openinfer.kernels.formats); GROUP is 4. CODED_KV: the cache has codes of e4m3,
// and E8M0 bytes for the key and the value of a head [K heads | V heads, PAGE] at kv_scales + page * page_stride.
//
// A cluster of 8 blocks has a key head: its rows of the projection, its keys and values, its columns of the output
// projection. All blocks must run at once, because clusters wait for each other's sums. They do: a GPU has more SMs than
// HEADS * 8, and no kernel behind this one starts before all of its blocks have. One ring of stages runs through all of a
// block's work. Weights, lengths, tables and cached keys do not come from the kernel ahead, so copies do not wait for it.
//
// 1. Each block has 1 / 8 of the head's rows of the projection, and sends the sums to all blocks of the cluster.
// 2. The cached keys of all tokens are one line of units of KEYS, of which each block has an equal run. A block's parts of
//    each token go to all blocks, which merge them in the order of blocks. Part (block, token) has place block + token:
//    the runs are in order, so no two parts share a place. A part's channels are in the order of channel_of, in which no
//    two lanes of a warp write to the same bank.
// 3. Each block has 1 / 8 of the rows of the output projection, for the columns of this head. Block r of cluster h adds up
//    the h-th part of the rows of all blocks r, in the order of heads. Sums travel as words that say themselves that they
//    are there: 0 has not arrived, and -0 is sent for +0. Who reads a word clears it for the next call.
//
// A page of the cache is [K heads | V heads, PAGE, D] at kv + page * page_stride; rows_of_kv maps [K | V, halves of rows,
// rows of D, D / 2], of codes whole rows. `words` [HEADS * 8, HEADS, TOKENS, HIDDEN / 64] is zero before and after. `scale` holds log2(e).

#include "gpu.cuh"
#include "tensor_cores.cuh"

constexpr int D = 128, BLOCKS = 8, WARPS = 8, THREADS = WARPS * 32, DEPTH = 512, CHUNKS = HIDDEN / DEPTH;
// A stage is of the projection: 16 rows of 1,024 bytes in bf16, ROWS of 128 of codes; or two units of KEYS keys and their
// values; or of the output projection: 64 rows of 256 bytes. Boxes are of 4 KB and more, because smaller ones take longer than
// their bytes. Those with rows of 128 bytes are swizzled.
constexpr int STAGE = 16384, UNIT = STAGE / 2, HALF = UNIT / 4, BOX = 256, PITCH = BOX * 2;
constexpr bool FOUR = CODED > 1, FP4 = CODED == 3;
constexpr int OF_BOX = FOUR ? 256 : CODED ? 128 : 64, GROUPS = HIDDEN / 128;  // columns of 128 bytes; groups of x
constexpr int WIDTH = GROUP * D, OF_HEAD = WIDTH + 2 * D, ROWS = OF_HEAD / BLOCKS, ROW_TILES = (ROWS + 63) / 64;
constexpr int OUT_ROWS = HIDDEN / BLOCKS, OUT_TILES = OUT_ROWS / 64, OWNED = OUT_ROWS / HEADS, OUT_BLOCKS = (OUT_ROWS + 191) / 128;
constexpr int PLACES = BLOCKS + TOKENS - 1, PART = WIDTH + 2 * GROUP, STEPS = WIDTH / (2 * OF_BOX), LAST_STAGES = OUT_TILES * STEPS;
constexpr int FIRST_STAGES = CODED ? HIDDEN / OF_BOX : ROWS / 16 * CHUNKS, PIECES = FOUR ? 4 : CODED ? 2 : WARPS;  // of the projection's sums
constexpr int PARTS = PLACES * PART > PIECES * ROWS * TOKENS ? PLACES * PART : PIECES * ROWS * TOKENS;
constexpr int KV_BOXES = CODED_KV ? 2 : 1, KEYS = KV_BOXES * 16, KV_BOX = UNIT / KV_BOXES;  // of a unit: boxes of 16 keys
constexpr float LOW = -1e30f, OUT_SCALE = CODED_KV ? LOWERED * 256 : 1;
static_assert(CHUNKS * DEPTH == HIDDEN && OUT_TILES * 64 == OUT_ROWS && OWNED * HEADS == OUT_ROWS && ROWS % 32 == 0);
static_assert(GROUP % 2 == 0 && GROUP <= 8 && TOKENS <= 8 && STEPS * 2 * OF_BOX == WIDTH);
constexpr int OF_GROUP = FOUR ? 2048 : 1024;  // bytes of a group of x
constexpr int CODES = CODED ? GROUPS * OF_GROUP : 0, WORK = CODES > WARPS * PART * 4 ? CODES : WARPS * PART * 4;  // bytes
// Words of a row with codes of four bits, and those of a row of the output projection for this head, behind which FP4 has factors.
constexpr int OF_ROW = GROUPS * (FP4 ? 2 : 1) + (FP4 ? 4 : 0), OF_OUTPUT = GROUP * (FP4 ? 2 : 1), WORDS = FOUR ? ROWS * OF_ROW : 0;
constexpr int OF_TILE = FOUR ? 64 * (OF_OUTPUT + (FP4 ? 4 : 0)) : 0, OUTPUT_WORDS = OUT_TILES * OF_TILE;
// Of several tokens each block makes one's codes, and sends them to all blocks of the cluster.
constexpr bool SHARED = CODED == 1 && TOKENS > 2;
constexpr int PIECES_OF_X = HIDDEN / 16 * (SHARED ? 1 : TOKENS), OWN_PIECES = (PIECES_OF_X + THREADS - 1) / THREADS;
static_assert(CODED || WARPS * 8 + HIDDEN / 2 <= PARTS, "squares and gains lie where parts come later");
static_assert(CODED || TOKENS * D <= WARPS * PART, "angles lie where warps leave sums later");
static_assert(CODES / GROUPS * GROUP + OUT_TILES * 2048 * (FOUR ? 4 : 1) <= WORK + WORDS * 4 + PARTS * 4, "sums of the output lie behind codes of heads");
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

// The first of the channels, APART, of a pair of a part.
constexpr int APART = CODED_KV ? 1 : 8;
__device__ __forceinline__ int channel_of(int pair) {
  int tile = pair / 8 % 8 ^ pair / 128, nth = pair % 8;
  return 16 * tile + (CODED_KV ? 2 : 1) * nth;
}

struct Token {  // cached keys, units with the token's own, and the blocks that have them; none of a row that is dead
  int slot, before, units, first, last;
};

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS + 32, 1)
attention_sublayer(bf16* x, const bf16* gain, const __grid_constant__ TensorMap weight,
                   const __grid_constant__ TensorMap output, const __grid_constant__ TensorMap rows_of_kv,
#if CODED_KV
                   unsigned char* kv, unsigned char* kv_scales,
#else
                   bf16* kv,
#endif
#if CODED == 1
                   const float* weight_scales, const float* output_scales,
#elif CODED
                   const u32* weight_scales, const __grid_constant__ TensorMap output_scales,
#if CODED == 3
                   const __grid_constant__ TensorMap output_factors,
#endif
#endif
#if NORMED
                   const bf16* q_norm, const bf16* k_norm,
#endif
                   const float* cos_sin, const int* slots, const int* q_starts, const int* seq_lens, const int* alive,
                   const int* block_tables, float* words, int table_width, int page_stride, float scale, float eps, int rows,
                   int tokens) {
  extern __shared__ __align__(1024) unsigned char ring[];
  u32* words_of_output = (u32*)(ring + STAGES * STAGE);      // [OUT_ROWS, OF_OUTPUT], then factors [OUT_ROWS, 4]
  unsigned char* codes = (unsigned char*)(words_of_output + OUTPUT_WORDS);  // [GROUPS, OF_GROUP]: x, then heads; see `put`
  float* work = (float*)codes;                               // [WARPS, PART]: sums, maxima, totals by warp
  u32* words_of_rows = (u32*)(codes + WORK);                 // [ROWS, OF_ROW]
  float* parts = (float*)(words_of_rows + WORDS);            // [PLACES, PART]: as `work` by block; first sums of rows
  float* angles = CODED ? parts + PARTS : work;              // [TOKENS, 2, D / 2]: cosines and sines
  bf16* inbox = (bf16*)(parts + PARTS + (CODED ? TOKENS * D : 0));  // [TOKENS, OF_HEAD]; then heads
  unsigned char* of_units = (unsigned char*)(inbox + TOKENS * OF_HEAD);  // [STAGES * 2, 2, KEYS]: scales of keys and of values
  u64 *full = (u64*)(of_units + CODED_KV * STAGES * 4 * KEYS), *empty = full + STAGES, *rows_there = empty + STAGES, *parts_there = rows_there + 1;
  u64* x_there = parts_there + 1;
  long long* own_pages = (long long*)(x_there + 1);          // [8]: of the key that each token has itself, and its row there
  int* own_rows = (int*)(own_pages + 8);                     // [8]
  float* own_scores = (float*)(own_rows + 8);                // [8, GROUP]
  Token* of_tokens = (Token*)(own_scores + 8 * GROUP);       // [8]
  int* starts = (int*)(of_tokens + 8);                       // [9]: units before each token
  float *of_rows = (float*)(starts + 10), *of_output = of_rows + 2 * GROUPS;  // scales [2, GROUPS], [OUT_BLOCKS, GROUP]
  float *of_heads = of_output + OUT_BLOCKS * GROUP, *of_x = of_heads + GROUP * 8;  // [GROUP, 8], [GROUPS, 8]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int head = blockIdx.x / BLOCKS, rank = blockIdx.x % BLOCKS, wg = warp / 4;
  int own_row = FOUR ? own_row_of(lane) : g;  // of a tile
  auto row_of_head = [&](int row) {  // in the projection's weight
    return row + (row < WIDTH ? head * WIDTH : (HEADS - 1) * WIDTH + head * D + (row < WIDTH + D ? 0 : (HEADS - 1) * D));
  };
  // Ahead of the weights, behind which they would wait.
#if CODED
  uint4 gains[OWN_PIECES][2];
#pragma unroll
  for (int k = 0; k < OWN_PIECES; k++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      gains[k][i] = *((const uint4*)gain + (threadIdx.x + k * THREADS) % (HIDDEN / 16) * 2 + i);
#endif
#if CODED == 1
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
#elif !CODED
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
      barrier_init(rows_there, 1), barrier_init(parts_there, 1), barrier_init(x_there, 1);
      if (SHARED) barrier_expect(x_there, tokens * (HIDDEN + GROUPS * 4));
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncwarp();
  }
  __syncthreads();
  if (SHARED) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");  // no block is told of x before its barrier is there
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
        bool with_words = FOUR && from == 0;
        int stage = claim((CODED ? ROWS * 128 : STAGE) + (with_words ? ROWS * OF_ROW * 4 : 0));
#if CODED > 1
        if (with_words && lane < BOXES)
          copy_rows(words_of_rows + lane * 32 * OF_ROW, weight_scales + (size_t)row_of_head(row) * OF_ROW, 32 * OF_ROW * 4, &full[stage], policy);
#endif
        if (lane < BOXES)
          copy_tile(ring + stage * STAGE + lane * (CODED ? 32 * 128 : STAGE / 2), &weight, &full[stage], row_of_head(row),
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
      if (alive[slot]) before = seq_lens[slot], units = before / KEYS + 1;
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
    if (SHARED) asm volatile("barrier.cluster.wait;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    if (lane < tokens) {
      int page = block_tables[(size_t)of_tokens[lane].slot * table_width + of_tokens[lane].before / PAGE];
      own_pages[lane] = (long long)page * page_stride, own_rows[lane] = head * PAGE + of_tokens[lane].before % PAGE;
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
      if (i < tokens) ((float4*)(angles + i * D))[lane] = ((const float4*)(cos_sin + (size_t)of_tokens[i].before * D))[lane];
    int begin = min(rank, shares) * line / max(shares, 1), end = min(rank + 1, shares) * line / max(shares, 1);
    struct Place {  // of a unit: rows of D of its boxes, and the scales of its keys and values
      int row[KV_BOXES];
#if CODED_KV
      uint4 scales[2][KV_BOXES];
#endif
    };
    auto place_of = [&](int unit) {
      Place place = {};
      if (unit >= end) return place;
      int i = 0;
      while (starts[i + 1] <= unit) i++;
#pragma unroll
      for (int b = 0; b < KV_BOXES; b++) {
        int key = (unit - starts[i]) * KEYS + b * 16, before = of_tokens[i].before;
        if (key > before) key -= b * 16;  // no key is there, so it may be any box
        int row = head * PAGE + key % PAGE, page = block_tables[(size_t)of_tokens[i].slot * table_width + key / PAGE];
        place.row[b] = page * (page_stride / D) + row;
#if CODED_KV
#pragma unroll
        for (int k = 0; k < 2; k++)
          place.scales[k][b] = *(const uint4*)(kv_scales + (size_t)page * page_stride + k * HEADS * PAGE + row);
#endif
      }
      return place;
    };
    Place place = place_of(begin + lane), next = place_of(begin + 32 + lane);  // they take long, so they come ahead
    asm volatile("bar.arrive 2, %0;" ::"n"(THREADS + 32) : "memory");  // the tokens are there
    copy_projection(AHEAD, FIRST_STAGES);
#pragma unroll 1
    for (int unit = begin, of = 0; unit < end; unit += 2, of += 2) {
      if (of == 32) place = next, next = place_of(unit + 32 + lane), of = 0;
      int count = min(2, end - unit), stage = turn % STAGES, row = 0;
#pragma unroll
      for (int b = 0; b < KV_BOXES; b++) {
        int found = __shfl_sync(~0u, place.row[b], of + lane / KV_BOXES % 2);
        if (lane % KV_BOXES == b) row = found;
      }
#if CODED_KV
      barrier_wait(&empty[stage], (turn / STAGES & 1) ^ 1);
      if (lane / 2 == of / 2)
#pragma unroll
        for (int k = 0; k < 4; k++) ((uint4*)of_units)[(stage * 2 + lane % 2) * 4 + k] = place.scales[k / 2][k % 2];
      __syncwarp();
#endif
      claim(count * UNIT);
      if (lane < count * KV_BOXES) copy_tiles(ring + stage * STAGE + lane * KV_BOX, &rows_of_kv, &full[stage], row, policy);
    }
#pragma unroll 1
    for (int i = 0; i < LAST_STAGES; i++) {
      // The kernel behind fills its ring on the other SMs, with little of the bandwidth that these still need.
      if (i == LAST_STAGES * 2 / 5) asm volatile("griddepcontrol.launch_dependents;");
      int stage = claim(STAGE + OF_TILE * 4);
#if CODED > 1
      if (lane == 2)
        copy_tile(words_of_output + i * 64 * OF_OUTPUT, &output_scales, &full[stage], rank * OUT_ROWS + i * 64, head * OF_OUTPUT, policy);
#if CODED == 3
      if (lane == 3)
        copy_tile(words_of_output + OUT_ROWS * OF_OUTPUT + i * 256, &output_factors, &full[stage], rank * OUT_ROWS + i * 64, HEADS * OF_OUTPUT, policy);
#endif
#endif
      if (lane < 2)
        copy_tile(ring + stage * STAGE + lane * UNIT, &output, &full[stage], rank * OUT_ROWS + i / STEPS * 64,
                  (head * WIDTH + (i % STEPS * 2 + lane) * OF_BOX) / (FOUR ? 2 : 1), policy);
    }
    asm volatile("barrier.cluster.wait;" ::: "memory");
    return;
  }
  if (SHARED) asm volatile("barrier.cluster.wait;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#if CODED == 1
  if (threadIdx.x < 2 * GROUPS) of_rows[threadIdx.x] = own_scale;
  if (nth_scale >= 0 && nth_scale < OUT_BLOCKS * GROUP) of_output[nth_scale] = own_scale;
#elif !CODED
  uint4* held_gains = (uint4*)(parts + WARPS * 8);
#pragma unroll
  for (int i = 0; i < sizeof gains / 16; i++)
    if (threadIdx.x + i * THREADS < HIDDEN / 8) held_gains[threadIdx.x + i * THREADS] = gains[i];
#endif
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if CODED
  auto token_of = [&](int piece) { return SHARED ? rank : piece / (HIDDEN / 16); };
  int first_piece = SHARED ? rank * (HIDDEN / 16) : 0;
  uint4 loaded[OWN_PIECES][2];
#pragma unroll
  for (int k = 0; k < OWN_PIECES; k++) {
    int piece = threadIdx.x + k * THREADS;
#pragma unroll
    for (int i = 0; i < 2; i++)
      loaded[k][i] = piece < PIECES_OF_X && token_of(piece) < tokens ? fresh((const uint4*)x + (piece + first_piece) * 2 + i) : make_uint4(0, 0, 0, 0);
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
  // Put 16 neighbours of a token's columns where products find them; eight threads have a group side by side, whose scale
  // or sum goes to of_groups.
  auto put = [&](const u32 (&pairs)[8], int piece, int token, float* of_groups, bool everywhere) {
    int nth = piece / 8;
    float number;
#if CODED == 1
    float top = largest<3>(pairs), factor = __fdiv_rn(448.0f, top);
    uint4 *to = (uint4*)(codes + nth * OF_GROUP + token * 128 + (piece % 8 ^ token) * 16),
          v = make_uint4(code(pairs[0], pairs[1], factor), code(pairs[2], pairs[3], factor),
                         code(pairs[4], pairs[5], factor), code(pairs[6], pairs[7], factor));
    number = __fdiv_rn(top, 448.0f);
    if (everywhere) {
      u32 there = shared_address(to), told = shared_address(x_there), number_there = shared_address(of_groups + nth * 8 + token);
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        int block = (b + rank) % BLOCKS;
        send(address_in(there, block), v, address_in(told, block));
        if (piece % 8 == 0) send(address_in(number_there, block), number, address_in(told, block));
      }
      return;
    }
    *to = v;
#else
    // As lanes of a warp have operands: of a token and four columns of every 16. See unpack_four_bits.
#pragma unroll
    for (int s = 0; s < 8; s++)
      *(u32*)(codes + nth * OF_GROUP + s / 2 * 512 + (token * 4 + piece % 8 / 2) * 16 + (s % 2 * 2 + piece % 2) * 4) =
          __byte_perm(pairs[s / 2 * 2], pairs[s / 2 * 2 + 1], s % 2 ? 0x7632 : 0x5410);
    number = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) number += low(pairs[i]) + high(pairs[i]);
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) number += __shfl_xor_sync(~0u, number, bit);
#endif
    if (piece % 8 == 0) of_groups[nth * 8 + token] = number;
  };
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
    int piece = threadIdx.x + k * THREADS, token = token_of(piece);
    if (piece >= PIECES_OF_X || SHARED && token >= tokens) break;
    float square = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) square += parts[(SHARED ? 0 : token * CHUNKS) + c];
    float unit_of = rsqrtf(square / HIDDEN + eps);
    u32 by[8] = {gains[k][0].x, gains[k][0].y, gains[k][0].z, gains[k][0].w, gains[k][1].x, gains[k][1].y, gains[k][1].z, gains[k][1].w};
#pragma unroll
    for (int i = 0; i < 8; i++) own[k][i] = multiplied(bf16_pair(low(own[k][i]) * unit_of, high(own[k][i]) * unit_of), by[i]);
    put(own[k], piece % (HIDDEN / 16), token, of_x, SHARED);
  }
  if (SHARED) wait_for_cluster(x_there);
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
#if CODED > 1
  u32 held[16];  // this lane's part of a group of x, and for INT4 the sums of its tokens
  float2 of_held = make_float2(0, 0);
  auto hold = [&](int nth, const float* of_groups) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 v = ((const uint4*)(codes + nth * OF_GROUP))[i * 32 + lane];
      held[4 * i] = v.x, held[4 * i + 1] = v.y, held[4 * i + 2] = v.z, held[4 * i + 3] = v.w;
    }
    if (!FP4) of_held = *(const float2*)(of_groups + nth * 8 + 2 * t);
  };
  // Add 16 rows of codes times that group: the first or second one of the rows, whose words are `pitch` apart.
  auto add_group = [&](float (&sum)[4], const unsigned char* rows, int second, const u32* words_of, int pitch) {
    u32 word[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32* of_row = words_of + (own_row + r * 8) * pitch;
      word[r] = FP4 ? ((const unsigned short*)of_row)[t] : *of_row;
    }
    add_four_bits<FP4>(sum, rows, second, word, held, of_held, lane);
  };
  // Of every other stage a warp has three tiles and one group.
  constexpr int TILES = ROWS / 32;
  float sum[TILES][4] = {};
  for (; turn < FIRST_STAGES; turn++) {
    const unsigned char* rows = ring + filled() * STAGE;
    if (turn % 2 == wg) {
      int nth = turn * 2 + warp % 2, tile = warp / 2 % 2 * TILES;
      hold(nth, of_x);
#pragma unroll
      for (int i = 0; i < TILES; i++)
        add_group(sum[i], rows + (tile + i) * 2048, warp % 2, words_of_rows + (tile + i) * 16 * OF_ROW + nth * (FP4 ? 2 : 1), OF_ROW);
    }
    free(turn);
  }
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int row = (warp / 2 % 2 * TILES + i) * 16 + own_row + r / 2 * 8, nth = 2 * t + r % 2;
      float factor = FP4 ? __uint_as_float(words_of_rows[row * OF_ROW + GROUPS * 2]) : 1;
      if (nth < TOKENS) parts[((wg * 2 + warp % 2) * TOKENS + nth) * ROWS + row] = sum[i][r] * factor;
    }
#elif CODED
  // The two warpgroups have alternate groups of columns.
  float sum[ROW_TILES][4] = {};
  for (; turn < FIRST_STAGES; turn++) {
    u32 rows = shared_address(ring + filled() * STAGE), of_group = shared_address(codes + turn * 1024);
    if (turn % 2 == wg) {
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
      if (nth < TOKENS && row < ROWS) parts[(wg * TOKENS + nth) * ROWS + row] = sum[i][r];
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
  // Norms and rotation of the tokens of this block's run. The block with a token's last unit has its key and value, too.
  for (int item = warp; begin < end; item += WARPS) {
    int of = token + item / (GROUP + 2), nth = item % (GROUP + 2), kind = nth - GROUP;
    if (of >= tokens || starts[of] >= end) break;
    bool kept = kind >= 0 && starts[of + 1] > starts[of] && starts[of + 1] <= end;
    if (kind >= 0 && !kept) continue;
    u32* vector = (u32*)(inbox + of * OF_HEAD + nth * D) + lane;
    u32 a = vector[0], b = vector[32];
    float value[4] = {low(a), high(a), low(b), high(b)};
    if (kind < 1) {
#if NORMED
    float all = value[0] * value[0] + value[1] * value[1] + value[2] * value[2] + value[3] * value[3];
    for (int bit = 16; bit; bit /= 2) all += __shfl_xor_sync(~0u, all, bit);
    float by = rsqrtf(all / D + eps);
    a = multiplied(bf16_pair(value[0] * by, value[1] * by), nth < GROUP ? of_query[0] : of_key[0]);
    b = multiplied(bf16_pair(value[2] * by, value[3] * by), nth < GROUP ? of_query[1] : of_key[1]);
    value[0] = low(a), value[1] = high(a), value[2] = low(b), value[3] = high(b);
#endif
    float2 c = ((const float2*)(angles + of * D))[lane], s = ((const float2*)(angles + of * D))[32 + lane];
      a = bf16_pair(value[0] * c.x - value[2] * s.x, value[1] * c.y - value[3] * s.y);
      b = bf16_pair(value[2] * c.x + value[0] * s.x, value[3] * c.y + value[1] * s.y);
    }
    if (kept) {
      long long at = own_pages[of] + (own_rows[of] + kind * HEADS * PAGE) * D + 2 * lane;
#if CODED_KV
      float top = fmaxf(fmaxf(fabsf(low(a)), fabsf(high(a))), fmaxf(fabsf(low(b)), fabsf(high(b))));
      for (int bit = 16; bit; bit /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
      u32 exponent = exponent_of(top);
      float shrink = __uint_as_float(254 - exponent << 23), grow = __uint_as_float(exponent << 23);
      unsigned short first = codes_of(low(a) * shrink, high(a) * shrink), second = codes_of(low(b) * shrink, high(b) * shrink);
      *(unsigned short*)(kv + at) = first, *(unsigned short*)(kv + at + D / 2) = second;
      if (lane == 0) kv_scales[own_pages[of] + own_rows[of] + kind * HEADS * PAGE] = exponent;
      float2 v = numbers_of(first), w = numbers_of(second);  // as they will be read from the cache
      a = bf16_pair(v.x * grow, v.y * grow), b = bf16_pair(w.x * grow, w.y * grow);
#else
      *(u32*)(kv + at) = a, *(u32*)(kv + at + D / 2) = b;
#endif
    }
    vector[0] = a, vector[32] = b;
  }
  together<THREADS>();

  // 2. Attention. The scores of each token's own key, where its last unit is.
  for (int of = token; begin < end && of < tokens && starts[of] < end; of++) {
    if (starts[of + 1] == starts[of] || starts[of + 1] > end) continue;
    const uint2* key = (const uint2*)(inbox + of * OF_HEAD + WIDTH) + lane;
    for (int nth = warp; nth < GROUP; nth += WARPS) {
      uint2 q = *((const uint2*)(inbox + of * OF_HEAD + nth * D) + lane), k = *key;
      float score = low(q.x) * low(k.x) + high(q.x) * high(k.x) + low(q.y) * low(k.y) + high(q.y) * high(k.y);
      for (int bit = 16; bit; bit /= 2) score += __shfl_xor_sync(~0u, score, bit);
      if (lane == 0) own_scores[of * GROUP + nth] = score * scale;
    }
  }
  u32 query[D / 16][2];
  float top[2], total[2], out[D / 16][4];  // of query heads 2 t and 2 t + 1; see channel_of
  auto start_token = [&] {
    const bf16* of = inbox + token * OF_HEAD + g * D;
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 pair = g < GROUP ? *(const u32*)(of + (CODED_KV ? (j / 4 * 4 + t) * 16 + j % 4 * 4 + i * 2 : j * 16 + i * 8 + 2 * t)) : 0;
        query[j][i] = CODED_KV ? f16_pair(low(pair), high(pair)) : pair;
      }
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
      for (int j = 0; j < D / 16; j++)
        *(float2*)(mine + of * D + 16 * (j ^ t) + 2 * g) = make_float2(out[j][i] * OUT_SCALE, out[j][i + 2] * OUT_SCALE);
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
        value = make_float2(all * low(own[0]), all * low(own[APART]));
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
#if CODED_KV
  // As in attend_codes.cu: a key's weight is 2^(score + e), where 2^e is the scale of its value.
  auto add_unit = [&](unsigned char* unit, const unsigned char* scales, int key, int before) {
    float plain[8], weight[8];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const unsigned char* keys = unit + b * KV_BOX + g * 128;
      float score[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 va = *(const uint4*)(keys + (4 * i + t ^ g) * 16), vb = *(const uint4*)(keys + 1024 + (4 * i + t ^ g) * 16);
        u32 a[4] = {va.x, va.y, va.z, va.w}, c[4] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          u32 near[2], far[2];
          halves_of(near[0], far[0], a[j]), halves_of(near[1], far[1], c[j]);
          multiply(i ? other : score, near[0], near[1], far[0], far[1], query[4 * i + j][0], query[4 * i + j][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int nth = b * 16 + g + i / 2 * 8;
        bool seen = key + nth < before;
        plain[4 * b + i] = seen ? (score[i] + other[i]) * (power(byte_of(scales + nth)) * scale) : -__uint_as_float(0x7f800000);
        weight[4 * b + i] = plain[4 * b + i] + ((int)byte_of(scales + KEYS + nth) - 127);
      }
    }
    float most[2] = {fmaxf(fmaxf(weight[0], weight[2]), fmaxf(weight[4], weight[6])),
                     fmaxf(fmaxf(weight[1], weight[3]), fmaxf(weight[5], weight[7]))};
    largest_of_rows(most);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float now = fmaxf(top[i], most[i]), decay = power_of(top[i] - now);
      top[i] = now, total[i] *= decay;
#pragma unroll
      for (int j = i; j < 8; j += 2) total[i] += power_of(plain[j] - now), weight[j] = power_of(weight[j] - now + RAISED);
#pragma unroll
      for (int j = 0; j < D / 16; j++) out[j][i] *= decay, out[j][i + 2] *= decay;
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
      u32 p0 = transposed(f16_pair(weight[4 * b], weight[4 * b + 1])), p1 = transposed(f16_pair(weight[4 * b + 2], weight[4 * b + 3]));
      // Converters take long, and the keys keep them busy. So codes of values are moved into f16, whose exponents are 8 less.
      const unsigned char* values = unit + b * KV_BOX + KV_BOX / 2 + lane % 16 * 128;
      int left = before - key - b * 16 - 2 * t;  // of keys from this lane's first one on
      u32 kept[2] = {left > 1 ? ~0u : left > 0 ? 0xffffu : 0, left > 9 ? ~0u : left > 8 ? 0xffffu : 0};  // others may be NaN
#pragma unroll
      for (int j = 0; j < D / 16; j += 2) {
        uint4 v = matrices_transposed(shared_address(values) + (j + lane / 16 ^ lane % 8) * 16);  // two keys' two neighbours each
        u32 codes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (key + KEYS > before) codes[i] &= kept[i % 2];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          u32 c = codes[i], d = codes[i + 1];
          multiply(out[j + i / 2], c << 8 & 0x80008000u | c << 7 & 0x3f803f80u, c & 0x80008000u | c >> 1 & 0x3f803f80u,
                   d << 8 & 0x80008000u | d << 7 & 0x3f803f80u, d & 0x80008000u | d >> 1 & 0x3f803f80u, p0, p1);
        }
      }
    }
  };
#else
  int nth_row = lane % 16, of_keys = lane / 16, nth_value = lane % 8 + lane / 16 * 8, of_values = lane / 8 % 2;
  auto add_unit = [&](unsigned char* unit, const unsigned char*, int key, int before) {
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
#endif
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
      add_unit(ring + place * UNIT, of_units + place * 2 * KEYS, (unit - first) * KEYS, before);
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
        to[0] = to_bf16(value[i].x * by), to[APART] = to_bf16(value[i].y * by);
      }
  }
  together<THREADS>();

  // 3. The output projection. With 8 and 16 bits warp w and warp w + 4, which gives it its sums, have the same rows, and each half
  // of the columns.
  float4* given = (float4*)(codes + CODES / GROUPS * GROUP);  // [.., OUT_ROWS / 16, 32]: a lane's sums of 16 rows
  auto give = [&](int tile, const float (&value)[4]) { given[tile * 32 + lane] = make_float4(value[0], value[1], value[2], value[3]); };
  // Add up a tile's sums and those of `count` that were given.
  auto add_up = [&](int tile, float (&value)[4], int count) {
#pragma unroll
    for (int i = 0; i < count; i++) {
      float4 more = given[(i * OUT_ROWS / 16 + tile) * 32 + lane];
      value[0] += more.x, value[1] += more.y, value[2] += more.z, value[3] += more.w;
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int row = tile * 16 + own_row + r / 2 * 8, nth = 2 * t + r % 2;
      if (nth < tokens)  // block `rank` of cluster row / OWNED adds it up
        store_word(words + ((size_t)((row / OWNED * BLOCKS + rank) * HEADS + head) * TOKENS + nth) * OWNED + row % OWNED, value[r]);
    }
  };
#if CODED
  // Whole warps take part, and may have pieces behind the last token's, with which nothing is done.
  for (int item = threadIdx.x; item < (TOKENS * WIDTH / 16 + 31) / 32 * 32; item += THREADS) {
    int token = item / (WIDTH / 16), piece = item % (WIDTH / 16);
    const uint4* from = (const uint4*)(heads + token * OF_HEAD + piece * 16);
    u32 pairs[8] = {from[0].x, from[0].y, from[0].z, from[0].w, from[1].x, from[1].y, from[1].z, from[1].w};
    put(pairs, piece, token, of_heads, false);
  }
  for_products();
  together<THREADS>();
#if CODED > 1
  // A warp has one group, and two of the four tiles of every stage.
  hold(warp % 4, of_heads);
#pragma unroll 1
  for (int n = 0; n < LAST_STAGES; n++, turn++) {
    const unsigned char* rows = ring + filled() * STAGE + warp % 4 / 2 * UNIT;
    float value[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int tile = wg * 2 + i, first = n * 64 + tile * 16;
      add_group(value[i], rows + tile * 2048, warp % 2, words_of_output + first * OF_OUTPUT + warp % 4 * (FP4 ? 2 : 1), OF_OUTPUT);
#pragma unroll
      for (int r = 0; FP4 && r < 4; r++)
        value[i][r] *= __uint_as_float(words_of_output[OUT_ROWS * OF_OUTPUT + (first + own_row + r / 2 * 8) * 4]);
      give(warp % 4 * OUT_ROWS / 16 + n * 4 + tile, value[i]);
    }
    free(turn);
  }
  together<THREADS>();
  for (int tile = warp; tile < OUT_ROWS / 16; tile += WARPS) {
    float value[4] = {};
    add_up(tile, value, 4);
  }
#else
  float value[OUT_TILES][4] = {};
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
    if (wg) give(i * 4 + warp % 4, value[i]);
  asm volatile("bar.sync %0, 64;" ::"r"(3 + warp % 4) : "memory");
#pragma unroll
  for (int i = 0; i < OUT_TILES; i++)
    if (!wg) add_up(i * 4 + warp, value[i], 1);
#endif
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
    if (wg) give(i * 4 + warp % 4, value);
    asm volatile("bar.sync %0, 64;" ::"r"(3 + warp % 4) : "memory");
    if (!wg) add_up(i * 4 + warp, value, 1);
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
