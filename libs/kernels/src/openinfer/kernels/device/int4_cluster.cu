// out [M, N] = x [M, K] @ W^T, W in INT4 (openinfer.kernels.formats.int4) with groups of 128 columns, or in FP4.
//
// Blocks, clusters, copies, ADD and GATED are as in cluster_product.cu. A cluster has ROWS rows of W, or as many of the
// gate and of up. A stage has 256 columns of K. The weight is the left operand, in registers, so each thread has the
// zero points and scales of its own rows. A tile is 64 rows. Warpgroups share a block's tiles (SIDES), and a stage's
// groups (PARTS).
//
// A thread reads two bytes at a time. Their low halves are two neighbours of the operand, and so are their high halves,
// 16 columns further. A group's sum is scaled in float32. With more than 64 tokens there are no registers for a sum of a
// group, so weights are scaled in bf16 (FOLDED). Rows of a tile that do not exist are never stored.
//
// FP4 (openinfer.kernels.formats.fp4): a group has eight bytes, each the scale of 16 columns. So its weights are always
// scaled in bf16, which is exact, and sums get the row's factor last.
//
// Blocks with another blockIdx.y have the next TOKENS tokens.

#include "gpu.cuh"
#include "tensor_cores.cuh"

#ifdef FP4
typedef uint2 Words;  // of a group and row
#else
#define FP4 0
typedef u32 Words;
#endif
constexpr int DEPTH = 256, HALVES = GATED ? 2 : 1, USED = HALVES * ROWS, TILES = (USED + 63) / 64;
constexpr int X_TILE = TOKENS * 128, CODES = USED * DEPTH / 2;  // x: tiles of 64 columns
constexpr int STAGE = CODES + DEPTH / 64 * X_TILE, HELD = TILES * 64 * WORDS * sizeof(Words);
// Steps whose x has a barrier of its own: of few tokens, because their codes wait for what is on its way.
constexpr int ROUND = TOKENS <= MOST_SENT ? STAGES : 0;
constexpr int PITCH = USED + (20 - USED % 16) % 16;  // sums that a warp stores at once have different banks
constexpr int SUMS = PARTS * TOKENS * PITCH * 4, ROOM = STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS;
constexpr int EACH = (TILES + SIDES - 1) / SIDES, LAST = TILES - (SIDES - 1) * EACH;  // tiles of a warpgroup
constexpr int QUADS = ROWS / 4, THREADS = SIDES * PARTS * 128;
constexpr bool FOLDED = FP4 || TOKENS > 64, SENDS = SPLIT > 1 && TOKENS <= MOST_SENT;
// Up to 8 tokens are multiplied by mma.sync: a warp has OWN_TILES of 16 rows, and one of SHARES groups of K.
constexpr bool FEW = TOKENS == 8;
constexpr int WARPS = THREADS / 32, ROW_TILES = (USED + 15) / 16, SHARES = WARPS % 8 == 0 && ROW_TILES <= WARPS / 2 ? 8 : 4;
constexpr int OWN_TILES = (ROW_TILES * SHARES + WARPS - 1) / WARPS, SUMMED = !FEW ? PARTS : SENDS ? 1 : SHARES;
static_assert(!FEW || SHARES * TOKENS * PITCH * 4 <= STAGES * STAGE, "sums lie where the ring was");
// Sums that are sent to the block that adds them up: [SPLIT, SUMMED, OWNED, USED].
constexpr int OWNED = (TOKENS + SPLIT - 1) / SPLIT, PART = (SENDS ? OWNED * USED : TOKENS * PITCH) * 4;
constexpr int INBOX = SENDS ? SPLIT * SUMMED * PART : 0;
// Of a thread. An SM has 65,536, and one block.
constexpr int REGISTERS = THREADS == 256 ? 232 : THREADS == 384 ? 152 : 104, PRODUCER_REGISTERS = 40;
static_assert(ROWS % 8 == 0 && LAST > 0, "rows are swizzled by 8, and each warpgroup has a tile");
static_assert((TILES * 64 - USED) * 128 <= DEPTH / 64 * X_TILE + HELD, "all rows of a tile lie in shared memory");

#define NUMBERS_4 "%0, %1, %2, %3"
#define NUMBERS_8 NUMBERS_4 ", %4, %5, %6, %7"
#define NUMBERS_16 NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_8 PLACES_4(0), PLACES_4(4)
#define PLACES_16 PLACES_8, PLACES_4(8), PLACES_4(12)
// multiply of tensor_cores.cuh, with a in registers, of the numbers A0 to A3.
#define PRODUCT_OF_REGISTERS(N, A0, A1, A2, A3, B, ADDS, PLACES, NUMBERS)                                  \
  __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NUMBERS "}, "                \
                 "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}"                       \
                 : PLACES : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                 \
  }
PRODUCT_OF_REGISTERS(16, 8, 9, 10, 11, 12, 13, PLACES_8, NUMBERS_8)
PRODUCT_OF_REGISTERS(32, 16, 17, 18, 19, 20, 21, PLACES_16, NUMBERS_16)
PRODUCT_OF_REGISTERS(64, 32, 33, 34, 35, 36, 37, PLACES_32, NUMBERS_32)
PRODUCT_OF_REGISTERS(128, 64, 65, 66, 67, 68, 69, PLACES_64, NUMBERS_64)

__device__ __forceinline__ u32 difference(u32 a, u32 b) {
  u32 pair;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

#if FP4
// A lane's part of the i-th 32 columns of a group as two operands, from its bytes of the first row.
__device__ __forceinline__ void unpack(u32 (&low)[4], u32 (&high)[4], const unsigned char* from,
                                       const uint2 (&words)[2], int run) {
#pragma unroll
  for (int i = 0; i < 4; i++) {  // rows 8 apart, then bytes 8 apart
    u32 four = *(const unsigned short*)(from + i % 2 * 1024 + i / 2 * 8);
    u32 scales = (run < 2 ? words[i % 2].x : words[i % 2].y) >> run % 2 * 16;
    low[i] = multiplied((four & 0x83c7u) * 0x10040u & 0x81c081c0u, scale_pair(scales & 255));
    high[i] = multiplied((four >> 10 & 0x1bu) * 0x10840000u + four * 8 & 0x81c081c0u, scale_pair(scales >> 8 & 255));
  }
}
#else
// The same of INT4. A code is 128 + code at first, and so is a zero point.
__device__ __forceinline__ void unpack(u32 (&low)[4], u32 (&high)[4], const unsigned char* from, const u32 (&words)[2],
                                       int run) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 two = __byte_perm(*(const unsigned short*)(from + i % 2 * 1024 + i / 2 * 8), 0, 0x4140), word = words[i % 2];
    u32 zero = __byte_perm(word & 15 | 0x4300, 0, 0x1010);
    low[i] = difference(raised(two), zero);
    high[i] = difference(raised(two >> 4), zero);
    u32 scale = bf16_pair(__uint_as_float(word & ~15u), __uint_as_float(word & ~15u));
    if (FOLDED) low[i] = multiplied(low[i], scale), high[i] = multiplied(high[i], scale);
  }
}
#endif

// Multiply few tokens. Sums are left in the ring, or sent.
__device__ __forceinline__ void consume_few(unsigned char* ring, const Words* words, const float* factors, u64* full, u64* empty,
                                            int steps, int M, float* inbox, u64* x_there, u64* sums_there, int rank) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = own_row_of(lane);
  int share = (warp + warp / SHARES) % SHARES, tile = warp / SHARES * OWN_TILES;
  float sum[OWN_TILES][4] = {};
  barrier_wait(x_there, 0);
  for (int step = 0; step < steps; step++) {
    int stage = step % STAGES, second = (share + SHARES - step * 2 % SHARES) % SHARES;
    barrier_wait(&full[stage], step / STAGES & 1);
    if (second < 2) {
      const unsigned char *codes = ring + stage * STAGE, *of_token = codes + CODES + (second * 2 + t / 2) * X_TILE + g * 128;
      u32 held[16];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // 8 columns, of which an operand has every other one
        uint4 v = *(const uint4*)(of_token + (t % 2 * 4 + i ^ g) * 16);
        u32* to = held + i % 2 * 8 + i / 2;
        to[0] = __byte_perm(v.x, v.y, 0x5410), to[2] = __byte_perm(v.x, v.y, 0x7632);
        to[4] = __byte_perm(v.z, v.w, 0x5410), to[6] = __byte_perm(v.z, v.w, 0x7632);
      }
      float sums[4] = {};
#pragma unroll
      for (int s = 0; !FP4 && s < 8; s++)
        multiply_bf16(sums, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, held[2 * s], held[2 * s + 1]);
#pragma unroll
      for (int i = 0; i < OWN_TILES; i++) {
        if (ROW_TILES % OWN_TILES && tile + i >= ROW_TILES) continue;
        u32 word[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const Words* of_row = words + ((tile + i) * 16 + row + r * 8) * WORDS + step * 2 + second;
          word[r] = FP4 ? ((const unsigned short*)of_row)[t] : *(const u32*)of_row;
        }
        add_four_bits<FP4>(sum[i], codes + (tile + i) * 2048, second, word, held, make_float2(sums[0], sums[1]), lane);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[stage]);
  }
  together<THREADS>();  // nobody reads the ring any more
  float* mine = (float*)ring + (share * TOKENS + 2 * t) * PITCH;
#pragma unroll
  for (int i = 0; i < OWN_TILES; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int of = (tile + i) * 16 + row + r / 2 * 8;
      if (of < USED) mine[r % 2 * PITCH + of] = FP4 ? sum[i][r] * factors[of] : sum[i][r];
    }
  if (!SENDS) return;
  together<THREADS>();
  for (int item = threadIdx.x; item < M * USED; item += THREADS) {
    int token = item / USED, of = item % USED, to = token % SPLIT;
    float value = 0;
#pragma unroll
    for (int i = 0; i < SHARES; i++) value += ((const float*)ring)[(i * TOKENS + token) * PITCH + of];
    send(address_in(shared_address(inbox + (rank * OWNED + token / SPLIT) * USED + of), to), value,
         address_in(shared_address(sums_there), to));
  }
  wait_for_cluster(sums_there);
}

#if TOKENS > 8
// Multiply `COUNT` tiles from `tile` on, and leave the sums in the ring, or send them.
template <int COUNT>
__device__ __forceinline__ void consume(unsigned char* ring, const Words* words, const float* factors, u64* full, u64* empty, int tile,
                                        int part, int steps, int M, float* inbox, u64* x_there, u64* sums_there, int rank) {
  int lane = threadIdx.x % 32, row = tile * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const Words* of_row = words + row * WORDS + part;
  int at[4];  // of a group's runs of 32 columns
#pragma unroll
  for (int i = 0; i < 4; i++) at[i] = row * 128 + (part * 4 + i ^ lane / 4) * 16 + lane % 4 * 2;
  float sum[COUNT][TOKENS / 2], product[TOKENS / 2], scale[2] = {0, 0};
#pragma unroll
  for (int t = 0; t < COUNT; t++)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sum[t][i] = product[i] = 0;
  barrier_wait(x_there, 0);
  for (int step = 0; step < steps; step++) {
    int stage = step % STAGES;
    barrier_wait(&full[stage], step / STAGES & 1);
    const unsigned char* codes = ring + stage * STAGE;
    u32 tokens = shared_address(codes) + CODES + part * 2 * X_TILE;
#pragma unroll
    for (int unit = 0; unit < 2 / PARTS * COUNT; unit++) {
      int g = unit / COUNT, t = unit % COUNT, before = (t + COUNT - 1) % COUNT;
      Words word[2];
      u32 low[4][4], high[4][4];
#pragma unroll
      for (int r = 0; r < 2; r++) word[r] = of_row[(t * 64 + r * 8) * WORDS + step * 2 + g];
#pragma unroll
      for (int i = 0; i < 2; i++) unpack(low[i], high[i], codes + t * 8192 + (at[i] ^ g * 64), word, i);
      products_wait<0>();  // of the group before, whose codes were read long ago
      if (unit == 0 && step && lane == 0) barrier_arrive(&empty[(step - 1) % STAGES]);
#if !FP4
      if (!FOLDED) {
        results(product);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sum[before][i] += product[i] * scale[i / 2 % 2];
#pragma unroll
        for (int r = 0; r < 2; r++) scale[r] = __uint_as_float(word[r] & ~15u);
      }
#endif
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 of_x = tokens + (g * 2 + i / 2) * X_TILE + i % 2 * 64;
        if (i == 2)
#pragma unroll
          for (int j = 2; j < 4; j++) unpack(low[j], high[j], codes + t * 8192 + (at[j] ^ g * 64), word, j);
        if (i % 2 == 0) products_begin();
        multiply(FOLDED ? sum[t] : product, low[i], operand(of_x), FOLDED || i != 0);
        multiply(FOLDED ? sum[t] : product, high[i], operand(of_x + 32), 1);
        if (i % 2) products_commit();
      }
    }
  }
  products_wait<0>();
  if (FOLDED) {
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
      results(sum[t]);
#pragma unroll
      for (int i = 0; FP4 && i < TOKENS / 2; i++) sum[t][i] *= factors[row + t * 64 + i / 2 % 2 * 8];
    }
  } else {
    results(product);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sum[COUNT - 1][i] += product[i] * scale[i / 2 % 2];
  }
  if (SENDS) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      int token = i / 4 * 8 + i % 2 + lane % 4 * 2, to = token % SPLIT;
      if (i / 2 % 2 || token >= M) continue;
      float* place = inbox + ((rank * PARTS + part) * OWNED + token / SPLIT) * USED + row;
      u32 there = address_in(shared_address(place), to), told = address_in(shared_address(sums_there), to);
#pragma unroll
      for (int t = 0; t < COUNT; t++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (row + t * 64 + r * 8 < USED) send(there + (t * 64 + r * 8) * 4, sum[t][i + 2 * r], told);
    }
    wait_for_cluster(sums_there);
    return;
  }
  together<THREADS>();  // nobody reads the ring any more
  float* mine = (float*)ring + (part * TOKENS + lane % 4 * 2) * PITCH + row;
#pragma unroll
  for (int t = 0; t < COUNT; t++)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      int token = i / 4 * 8 + i % 2, below = t * 64 + i / 2 % 2 * 8;
      if (row + below < USED && token + lane % 4 * 2 < M) mine[token * PITCH + below] = sum[t][i];
    }
}
#endif

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS + 128, 1)
int4_cluster(bf16* out, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
             const Words* words, int M, int N, int K) {
  extern __shared__ __align__(1024) unsigned char ring[];
  int before = blockIdx.y * TOKENS;
  M = min(M - before, TOKENS), out += (size_t)before * N;
  Words* held = (Words*)(ring + ROOM);  // of the block's rows and part of K
  float *factors = (float*)(held + TILES * 64 * WORDS), *inbox = factors + FP4 * TILES * 64;
  u64 *full = (u64*)(inbox + INBOX / 4), *empty = full + STAGES, *sums_there = empty + STAGES, *x_there = sums_there + 1;
  int group = threadIdx.x / 128, self = threadIdx.x % 128, row = blockIdx.x / SPLIT * ROWS;
  int rank = blockIdx.x % SPLIT, steps = K / DEPTH, first = steps * rank / SPLIT;
  steps = steps * (rank + 1) / SPLIT - first;
  u64 policy = evict_first();
  auto copy_codes = [&](int step) {
    int stage = step % STAGES;
    barrier_expect(&full[stage], step < ROUND ? CODES : STAGE);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      copy_tile(ring + stage * STAGE + h * ROWS * 128, &weight, &full[stage], row + h * N, (first + step) * DEPTH / 2,
                policy);
  };
  if (threadIdx.x == THREADS) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], THREADS / 32);
    barrier_init(sums_there, SENDS ? 1 : SPLIT), barrier_init(x_there, 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
    if (SENDS) barrier_expect(sums_there, SPLIT * SUMMED * ((M - rank + SPLIT - 1) / SPLIT) * USED * 4);
    for (int step = 0; step < min(UNDER_WAY, steps); step++) copy_codes(step);
  }
  if (SPLIT > 1) cluster_meet();  // no block is told of sums before its barrier is there
  else __syncthreads();
  if (group == THREADS / 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (self == 0) {
      for (int step = UNDER_WAY; step < steps; step++) {
        wait_for_landing<STAGES>(full, step - UNDER_WAY);
        barrier_wait(&empty[step % STAGES], (step / STAGES & 1) ^ 1);
        copy_codes(step);
      }
      // All loads are under way, so those of the next kernel take no bandwidth from them.
      asm volatile("griddepcontrol.launch_dependents;");
    } else if (self == 32) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      barrier_expect(x_there, min(ROUND, steps) * (STAGE - CODES));
      for (int step = 0; step < steps; step++) {
        int stage = step % STAGES;
        barrier_wait(&empty[stage], (step / STAGES & 1) ^ 1);
        for (int i = 0; i < DEPTH / 64; i++)
          copy_tile(ring + stage * STAGE + CODES + i * X_TILE, &x, step < ROUND ? x_there : &full[stage], before, (first + step) * DEPTH + i * 64);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    int side = group / PARTS, part = group % PARTS;
    // No bulk copy: a block's first word may lie at any 8 bytes. READS are under way at once, because each takes long.
    constexpr int READS = 9;
    int count = steps * 2, last = USED * count - 1;
    for (int begin = threadIdx.x; begin <= last; begin += THREADS * READS) {
      Words found[READS];
      int place[READS];
#pragma unroll
      for (int j = 0; j < READS; j++) {
        int i = min(begin + THREADS * j, last), r = i / count, at = min(row + r % ROWS, N - 1) + r / ROWS * N;
        found[j] = __ldg(words + (size_t)at * (K / 128 + 2 * FP4) + first * 2 + i - r * count), place[j] = r * WORDS + i - r * count;
      }
#pragma unroll
      for (int j = 0; j < READS; j++) held[place[j]] = found[j];  // several threads may write the last one
    }
    for (int r = threadIdx.x; FP4 && r < USED; r += THREADS) {
      const Words* behind = words + (size_t)(min(row + r % ROWS, N - 1) + r / ROWS * N) * (K / 128 + 2) + K / 128;
      factors[r] = __ldg((const float*)behind);
    }
    together<THREADS>();
#if TOKENS == 8
    consume_few(ring, held, factors, full, empty, steps, M, inbox, x_there, sums_there, rank);
#else
    if (side < SIDES - 1 || LAST == EACH) consume<EACH>(ring, held, factors, full, empty, side * EACH, part, steps, M, inbox, x_there, sums_there, rank);
    else consume<LAST>(ring, held, factors, full, empty, side * EACH, part, steps, M, inbox, x_there, sums_there, rank);
#endif
    if (!SENDS) share_sums<SPLIT, THREADS>(sums_there);
  }
  if (group < THREADS / 128) {
    asm volatile("griddepcontrol.wait;" ::: "memory");  // before what the kernel ahead wrote is read
    int count = (M - rank + SPLIT - 1) / SPLIT * QUADS;
    for (int item = threadIdx.x; item < count; item += THREADS) {
      int token = rank + item / QUADS * SPLIT, quad = item % QUADS * 4;
      if (row + quad >= N) continue;
      bf16* to = out + (size_t)token * N + row + quad;
      u32 at = shared_address(SENDS ? inbox + item / QUADS * USED + quad : (float*)ring + token * PITCH + quad);
      uint2 old = make_uint2(0, 0);
      if (ADD) old = fresh_pair(to);
      float4 value = total<SENDS, SPLIT, SUMMED, PART>(at);
      if (GATED) {
        float4 up = total<SENDS, SPLIT, SUMMED, PART>(at + ROWS * 4);
        value = make_float4(gated(value.x, up.x), gated(value.y, up.y), gated(value.z, up.z), gated(value.w, up.w));
      }
      if (ADD) value.x += low(old.x), value.y += high(old.x), value.z += low(old.y), value.w += high(old.y);
      *(uint2*)to = make_uint2(bf16_pair(value.x, value.y), bf16_pair(value.z, value.w));
    }
  }
  if (SPLIT > 1 && !SENDS) cluster_meet();  // another block may still read this one's sums
}
