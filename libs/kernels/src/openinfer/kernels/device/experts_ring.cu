// experts_product_float8 of experts.py for pairs that are sorted, where experts have few: out is bf16, sums are float32.
//
// A chunk is at most TOKENS pairs of an expert, and a tile is SETS rows of out for a chunk. A program an SM has an equal
// run of all tiles. As in ring.cu a copying warp keeps a ring of STAGES tiles' weights filled, also while the others change
// to the next expert. A stage is ROWS rows: SETS of them, or as many of the gate and of the up projection if GATED, which
// lie 8 by 8 in an operand of 16. Each of the other warps has COLUMNS = K / PARTS columns. It holds x of these for all
// tokens of the chunk in registers, and multiplies every second, third .. operand where there are more warps than PARTS.
// The parts are added in their order. So the bits are the same in every run.
//
// GATED: from tokens to places, and out = silu(gate) * up; else from places to pairs, of which a token has CHOSEN. weight
// e4m3 [EXPERTS, N, K], or 2 N rows; scales float32 of 128 x 128 numbers.

#include "gpu.cuh"

constexpr int HALVES = GATED ? 2 : 1, SETS = ROWS / HALVES, OPERANDS = ROWS / 16, TEAMS = WARPS / PARTS, OWN = OPERANDS / TEAMS;
constexpr int TOKENS = 8, COLUMNS = K / PARTS, GROUPS = COLUMNS / 128, HELD = COLUMNS / 8, STAGE = ROWS * K;
static_assert(TEAMS * PARTS == WARPS && OWN * TEAMS == OPERANDS && GROUPS * 128 == COLUMNS, "warps share a stage evenly");
static_assert(128 % SETS == 0, "a tile's rows have one scale");

#include "pairs.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
experts_ring(bf16* out, const bf16* x, const unsigned char* weight, const float* scales, const int* order, const int* starts,
             int N) {
  extern __shared__ __align__(128) unsigned char ring[];
  float* sums = (float*)(ring + STAGES * STAGE);  // [2, PARTS, ROWS, TOKENS]
  u64 *full = (u64*)(sums + 2 * PARTS * ROWS * TOKENS), *empty = full + STAGES;
  int *own_starts = (int*)(empty + STAGES), *head = own_starts + EXPERTS + 2;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = threadIdx.x; i < EXPERTS + 2; i += WARPS * 32 + 32) own_starts[i] = starts[min(i, EXPERTS)] + (i > EXPERTS);
  __syncthreads();
  if (warp == 0) find_tiles(own_starts, head, N);
  __syncthreads();
  Tile tile;
  int count = own_tile(tile, own_starts, head);
  if (count == 0) return;
  if (warp == WARPS) {
    if (lane == 0) {
      u64 policy = evict_first();
      for (int i = 0; i < count; i++) {
        int stage = i % STAGES;
        barrier_wait(&empty[stage], (i / STAGES & 1) ^ 1);
        barrier_expect(&full[stage], STAGE);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          copy_rows(ring + stage * STAGE + half * SETS * K, weight + (((size_t)tile.expert * HALVES + half) * N + tile.row) * K,
                    SETS * K, &full[stage], policy);
        tile.next(own_starts, N);
      }
      asm volatile("griddepcontrol.launch_dependents;");  // all loads are under way
    }
    return;
  }
  int part = warp % PARTS, team = warp / PARTS, column = part * COLUMNS + lane % 4 * 16, blocks = (N + 127) / 128;
  float near[HALVES][GROUPS], next[HALVES][GROUPS];  // scales of this tile and the next one
  auto read_scales = [&](float (&to)[HALVES][GROUPS], const Tile& t) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
        to[half][g] = scales[((size_t)(t.expert * HALVES + half) * blocks + t.row / 128) * (K / 128) + part * GROUPS + g];
  };
  read_scales(near, tile);
  u32 held[HELD];
  int held_of = -1;  // the first place of the chunk that is held
  for (int i = 0; i < count; i++) {
    Tile then = tile;
    if (i + 1 < count) then.next(own_starts, N);
    read_scales(next, then);
    int tokens = min(TOKENS, tile.end - tile.begin);
    if (held_of != tile.begin) {
      held_of = tile.begin;
      int place = tile.begin + min(lane / 4, tokens - 1);
      const bf16* row = x + (size_t)(GATED ? order[place] / CHOSEN : place) * K + column;
#pragma unroll
      for (int p = 0; p < COLUMNS / 64; p++) {
        uint4 v = fresh(row + p * 64), w = fresh(row + p * 64 + 8);
        u32 of[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
#pragma unroll
        for (int j = 0; j < 8; j += 2) {  // in the order of `wide`
          held[p * 8 + j] = __byte_perm(of[j], of[j + 1], 0x5410);
          held[p * 8 + j + 1] = __byte_perm(of[j], of[j + 1], 0x7632);
        }
      }
    }
    int stage = i % STAGES;
    barrier_wait(&full[stage], i / STAGES & 1);
    float* mine = sums + ((i & 1) * PARTS + part) * ROWS * TOKENS;
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      int operand = team + o * TEAMS;
      const unsigned char* above = ring + stage * STAGE + (operand * (16 / HALVES) + lane / 4) * K + column;
      float total[4] = {0, 0, 0, 0};
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int p = 2 * g; p < 2 * g + 2; p++) {
          uint4 v = *(const uint4*)(above + p * 64), w = *(const uint4*)(above + (GATED ? SETS : 8) * K + p * 64);
          u32 a[4] = {v.x, v.y, v.z, v.w}, b[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int j = 0; j < 4; j++)
            multiply_bf16(sum, wide(a[j] << 8), wide(b[j] << 8), wide(a[j]), wide(b[j]), held[p * 8 + 2 * j],
                          held[p * 8 + 2 * j + 1]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] += sum[j] * near[j / 2 * (HALVES - 1)][g];
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
        *(float2*)(mine + (operand * 16 + lane / 4 + 8 * j) * TOKENS + lane % 4 * 2) = make_float2(total[2 * j], total[2 * j + 1]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[stage]);
    together<WARPS * 32>();  // the next tile's sums lie elsewhere
    const float* parts = sums + (i & 1) * PARTS * ROWS * TOKENS;
    for (int item = threadIdx.x; item < SETS * tokens; item += WARPS * 32) {
      int r = item % SETS, place = tile.begin + item / SETS;
      const float* at = parts + (GATED ? r / 8 * 16 + r % 8 : r) * TOKENS + item / SETS;
      float value = 0, up = 0;
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        value += at[p * ROWS * TOKENS];
        if (GATED) up += at[p * ROWS * TOKENS + 8 * TOKENS];
      }
      out[(size_t)(GATED ? place : order[place]) * N + tile.row + r] = to_bf16(GATED ? gated(value, up) : value);
    }
#pragma unroll
    for (int j = 0; j < HALVES * GROUPS; j++) near[j / GROUPS][j % GROUPS] = next[j / GROUPS][j % GROUPS];
    tile = then;
  }
}
