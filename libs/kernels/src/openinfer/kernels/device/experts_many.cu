// experts_product_float8 of experts.py for pairs that are sorted, where experts have many: out is bf16, sums are float32.
//
// A chunk is an even part, of at most MOST, of an expert's pairs, and a tile 256 rows of its weights for a chunk: 128 of the
// gate and of the up projection if GATED. Programs stay and take every tile that is their number apart. In a stage of the
// ring lie 128 columns of a tile's weights, which come by bulk tensor copies, and of its x, whose rows a warpgroup copies from
// where they are. Two warpgroups multiply 128 rows each: the codes become bf16 in registers, as the left operand.
//
// Each 128 columns of 128 rows have a scale. So sums are kept in units of the last one, and go to the units of the next before
// its products.
//
// Place 64m + 16q + 8h + 2c + l of x has the column 64m + 16c + 4q + 2l + h, so a thread reads 16 neighbours of a weight's row at
// once; and so has out if GATED. A warp's 16 rows are such that those read at once are neighbours, whose banks differ, and that
// a thread has the gate and the up projection of a number.
//
// GATED: from tokens to places, and out = silu(gate) * up; else from places to pairs, of which a token has CHOSEN. weight
// e4m3 [EXPERTS, N, K], or 2 N rows; scales float32 of 128 x 128 numbers.

#include "gpu.cuh"
#include "tensor_cores.cuh"

constexpr int HALVES = GATED ? 2 : 1, ROWS = 256 / HALVES, STEPS = K / 128, GROUPS = 2, THREADS = GROUPS * 128;
constexpr int WEIGHTS = 256 * 128, X_HALF = MOST * 128, STAGE = WEIGHTS + 2 * X_HALF, RUN = (EXPERTS + 31) / 32;
static_assert(MOST == 160, "products have up to so many columns");
static_assert(STEPS > STAGES, "a tile's targets are read before those of the next but one take their place");

// d [64, N] (+)= a [64, 16] @ b [N, 16]^T of bf16, with a in registers. d has room for every N, so that all have the same registers.
#define HELD_PRODUCT(N, A0, A1, A2, A3, B, ADDS, NUMBERS, ...)                                                             \
  template <>                                                                                                             \
  __device__ __forceinline__ void multiply_held<N>(float (&d)[MOST / 2], const u32 (&a)[4], u64 b, int add) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                  \
                 "k16.f32.bf16.bf16 {" NUMBERS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}"      \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                           \
  }
template <int N>
__device__ __forceinline__ void multiply_held(float (&d)[MOST / 2], const u32 (&a)[4], u64 b, int add);
HELD_PRODUCT(64, 32, 33, 34, 35, 36, 37, NUMBERS_32, PLACES_32)
HELD_PRODUCT(80, 40, 41, 42, 43, 44, 45, NUMBERS_40, PLACES_40)
HELD_PRODUCT(96, 48, 49, 50, 51, 52, 53, NUMBERS_48, PLACES_48)
HELD_PRODUCT(112, 56, 57, 58, 59, 60, 61, NUMBERS_56, PLACES_56)
HELD_PRODUCT(128, 64, 65, 66, 67, 68, 69, NUMBERS_64, PLACES_64)
HELD_PRODUCT(144, 72, 73, 74, 75, 76, 77, NUMBERS_72, PLACES_72)
HELD_PRODUCT(160, 80, 81, 82, 83, 84, 85, NUMBERS_80, PLACES_80)

// Both halves of the rows times a chunk. Behind its pairs are others' rows of x, or none; what is made of them is not stored.
__device__ __forceinline__ void multiply(int pairs, float (&d)[2][MOST / 2], const u32 (&a)[2][4], u64 b, int add) {
#define MULTIPLY(N) products_begin(), multiply_held<N>(d[0], a[0], b, add), multiply_held<N>(d[1], a[1], b, add), products_commit()
  if (pairs > 112) {
    if (pairs > 144) MULTIPLY(160);
    else if (pairs > 128) MULTIPLY(144);
    else MULTIPLY(128);
  } else if (pairs > 80) {
    if (pairs > 96) MULTIPLY(112);
    else MULTIPLY(96);
  } else {
    if (pairs > 64) MULTIPLY(80);
    else MULTIPLY(64);
  }
}

struct Tile {
  int expert, begin, pairs, row;  // the first place, and rows from `row` on
};

// The t-th tile, by each expert's first place and first chunk. All chunks of some rows follow each other.
__device__ __forceinline__ Tile tile_at(int t, const int* starts, const int* chunks, int N) {
  int each = N / ROWS, low = 0, high = EXPERTS;
  while (low + 1 < high) {
    int middle = (low + high) / 2;
    if (chunks[middle] * each <= t) low = middle;
    else high = middle;
  }
  int rest = t - chunks[low] * each, count = chunks[low + 1] - chunks[low], begin = starts[low], end = starts[low + 1];
  int size = (end - begin + count - 1) / count;
  begin += rest % count * size;
  return {low, begin, min(size, end - begin), rest / count * ROWS};
}

// A scale that others can be divided by.
__device__ __forceinline__ float unit_of(float scale) { return fabsf(scale) < 0x1p-80f ? 0x1p-80f : scale; }

struct Ring {
  unsigned char* stages;
  u64 *full, *empty;
  int stage = 0, phase = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// A tile's products of a warpgroup, and what becomes of them. targets: the rows of out if not GATED.
__device__ __forceinline__ void multiply_tile(Ring& ring, const Tile& tile, bf16* out, const float* scales, const int* targets,
                                              int N) {
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, i = lane / 4, c = lane % 4;
  int row = GATED ? group * 64 + i / 2 * 16 + warp * 4 + i % 2 : group * 128 + warp * 32 + i / 2 * 8 + i % 2;
  constexpr int FURTHER = GATED ? 128 : 4;  // to the row of the second product, after which come those that are 2 further
  float sum[2][MOST / 2], unit[2], next[2];
  const float* of_rows = scales + ((size_t)tile.expert * HALVES * (N / 128) + (tile.row + (GATED ? 0 : group * 128)) / 128) * STEPS;
  auto read_scales = [&](int step) {
#pragma unroll
    for (int b = 0; b < HALVES; b++) next[b] = unit_of(of_rows[b * (N / 128) * STEPS + step]);
  };
  read_scales(0);
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    float to[HALVES];
#pragma unroll
    for (int b = 0; b < HALVES; b++) to[b] = __fdividef(unit[b], next[b]), unit[b] = next[b];
    if (step + 1 < STEPS) read_scales(step + 1);
    barrier_wait(&ring.full[ring.stage], ring.phase);
    const unsigned char* here = ring.stages + ring.stage * STAGE;
    u64 of_x = operand(shared_address(here) + WEIGHTS);
    here += row * 64 + c * 16;
    u32 a[2][2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4 codes[2][2];
#pragma unroll
      for (int b = 0; b < 2; b++)
#pragma unroll
        for (int j = 0; j < 2; j++) codes[b][j] = *(const uint4*)(here + h * (WEIGHTS / 2) + (b * FURTHER + j * 2) * 64);
      if (h == 0 && step) {
        products_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(&ring.empty[(ring.stage + STAGES - 1) % STAGES]);
#pragma unroll
        for (int b = 0; b < 2; b++) {
          results(sum[b]);
#pragma unroll
          for (int n = 0; n < MOST / 2; n++) sum[b][n] *= to[b % HALVES];
        }
      }
#pragma unroll
      for (int q = 0; q < 4; q++) {
        if (h || q > 1) products_wait<1>();  // what is multiplied now must not change
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            uint4 v = codes[b][j];
            u32 word = q == 0 ? v.x : q == 1 ? v.y : q == 2 ? v.z : v.w;
            a[q % 2][b][j] = wide(word << 8), a[q % 2][b][2 + j] = wide(word);
          }
        multiply(tile.pairs, sum, a[q % 2], of_x + (h * X_HALF + q * 32) / 16, step | h | q);
      }
    }
    ring.next();
  }
  products_wait<0>();
  if (threadIdx.x % 128 == 0) barrier_arrive(&ring.empty[(ring.stage + STAGES - 1) % STAGES]);
  results(sum[0]), results(sum[1]);
  out += tile.row + (GATED ? group * 64 + warp * 16 + c * 2 : group * 128 + warp * 32 + c * 8);
#pragma unroll
  for (int n = 0; n < MOST / 8; n++) {
    if (n * 8 >= tile.pairs) break;
    u32 of[2][2];  // two neighbours of out, if not GATED
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float *one = sum[0] + n * 4 + j * 2, *other = sum[1] + n * 4 + j * 2;
#pragma unroll
      for (int k = 0; k < 2; k++) one[k] *= unit[0], other[k] *= unit[HALVES - 1];
      of[0][j] = transposed(GATED ? gated_pair<true>(one[0], one[1], other[0], other[1]) : bf16_pair(one[0], one[1]));
      if (!GATED) of[1][j] = transposed(bf16_pair(other[0], other[1]));
    }
    int pair = n * 8 + i;
    if (pair >= tile.pairs) continue;
    bf16* to = out + (size_t)(GATED ? tile.begin + pair : targets[pair]) * N;
    if (GATED) *(u32*)to = __byte_perm(of[0][0], of[0][1], 0x5410), *(u32*)(to + 8) = __byte_perm(of[0][0], of[0][1], 0x7632);
    else *(uint4*)to = make_uint4(of[0][0], of[0][1], of[1][0], of[1][1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
experts_many(bf16* out, const bf16* x, const __grid_constant__ TensorMap weight, const float* scales, const int* order,
             const int* starts, int N) {
  extern __shared__ __align__(1024) unsigned char stages[];
  Ring ring = {stages, (u64*)(stages + STAGES * STAGE)};
  ring.empty = ring.full + STAGES;
  int *own_starts = (int*)(ring.empty + STAGES), *chunks = own_starts + EXPERTS + 1, *targets = chunks + EXPERTS + 1;
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&ring.full[i], 129), barrier_init(&ring.empty[i], GROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int e = threadIdx.x; e <= EXPERTS; e += THREADS + 128) own_starts[e] = starts[e];
  __syncthreads();
  if (warp == 0) {
    int sum = 0, begin = lane * RUN, end = min(begin + RUN, EXPERTS);
    auto chunks_of = [&](int e) { return (own_starts[e + 1] - own_starts[e] + MOST - 1) / MOST; };
    for (int e = begin; e < end; e++) sum += chunks_of(e);
    int after = sum_up_to(sum, lane), before = after - sum;
    for (int e = begin; e < end; e++) chunks[e] = before, before += chunks_of(e);
    if (lane == 31) chunks[EXPERTS] = after;
  }
  __syncthreads();
  int tiles = chunks[EXPERTS] * (N / ROWS), turn = 0;
  if (warp >= GROUPS * 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    int self = threadIdx.x - THREADS, row = self / 8, held = 0;
    u64 policy = evict_first();
    u32 to = row * 128 + (self % 8 ^ row % 8) * 16;  // of rows that are a multiple of 8 apart
    int waits = -1;  // the stage whose copies were begun last
    auto tell = [&] {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      barrier_arrive(&ring.full[waits]);
    };
    for (int t = blockIdx.x; t < tiles; t += gridDim.x, held ^= 1) {
      Tile tile = tile_at(t, own_starts, chunks, N);
      u32 from[MOST / 16];  // in units of 16 bytes
#pragma unroll
      for (int i = 0; i < MOST / 16; i++) {
        int pair = row + 16 * i, place = tile.begin + min(pair, tile.pairs - 1), of = order[place];
        if (!GATED && self % 8 == 0) targets[held * MOST + pair] = of;
        from[i] = (u32)(GATED ? of / CHOSEN : place) * (K / 8) + self % 8;
      }
#pragma unroll 1
      for (int step = 0; step < STEPS; step++) {
        unsigned char* stage = stages + ring.stage * STAGE;
        barrier_wait(&ring.empty[ring.stage], ring.phase ^ 1);
        if (self == 0) {
          int at = tile.expert * HALVES * N + tile.row;
          barrier_expect(&ring.full[ring.stage], WEIGHTS);
#pragma unroll
          for (int i = 0; i < 4; i++)
            copy_tile(stage + i * (WEIGHTS / 4), &weight, &ring.full[ring.stage], at + i % 2 * (GATED ? N : 128), step * 128 + i / 2 * 64,
                      policy);
        }
        u32 there = shared_address(stage) + WEIGHTS + to;
#pragma unroll
        for (int i = 0; i < MOST / 16; i++)
          if (16 * i < tile.pairs)
#pragma unroll
            for (int h = 0; h < 2; h++)
              asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                           ::"r"(there + i * 16 * 128 + h * X_HALF), "l"((const uint4*)x + from[i] + step * 16 + h * 8) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (waits >= 0) {
          asm volatile("cp.async.wait_group 1;" ::: "memory");
          tell();
        }
        waits = ring.stage;
        ring.next();
      }
    }
    if (waits >= 0) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      tell();
    }
    asm volatile("griddepcontrol.launch_dependents;");  // all loads are under way
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  for (int t = blockIdx.x; t < tiles; t += gridDim.x, turn ^= 1) {
    Tile tile = tile_at(t, own_starts, chunks, N);
    const int* own_targets = targets + turn * MOST;
    multiply_tile(ring, tile, out, scales, own_targets, N);
  }
}
