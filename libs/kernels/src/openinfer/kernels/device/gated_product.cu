// out [M, I] = silu(x @ gate^T) * (x @ up^T) in bf16 for many tokens; x is [M, K], and weight [2 I, K] is gate and then up.
//
// A block has 128 tokens and COLUMNS columns of gate and of up, so that both factors of a number are in one thread. Two
// warpgroups multiply 64 tokens each; a warp of the third copies. Two blocks are a cluster with the same columns: each
// copies one of the two weights for both. The grid stays; blocks go from tile to tile, eight pairs of blocks' tokens at a
// time, which stay in the second-level cache while the weights pass. COLUMNS is such that 9,728 columns are 64 tiles: 8
// turns of 66 clusters for 2,048 tokens, where 128 columns take 10 (docs/lessons/products.md).

#include "gpu.cuh"
#include "tensor_cores.cuh"

constexpr int COLUMNS = 152, TOKENS = 128, DEPTH = 64, PAIRS = 8;  // tokens and depth of a tile; pairs that go together
constexpr int X_BYTES = TOKENS * DEPTH * 2, WEIGHT_BYTES = COLUMNS * DEPTH * 2, STAGE = X_BYTES + 2 * WEIGHT_BYTES;
constexpr int HALF = 64 * COLUMNS * 2;  // bytes of a warpgroup's results

struct Tile {
  int token, column;
};

__device__ __forceinline__ Tile tile_at(int t, int pairs, int tiles, u32 rank) {
  int group = t / (PAIRS * tiles), rest = t - group * PAIRS * tiles, inside = min(PAIRS, pairs - group * PAIRS);
  return {((group * PAIRS + rest % inside) * 2 + (int)rank) * TOKENS, rest / inside * COLUMNS};
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
gated_product(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap x,
              const __grid_constant__ TensorMap weight, int M, int I, int K) {
  extern __shared__ __align__(1024) unsigned char ring[];
  unsigned char* results = ring + STAGES * STAGE;
  u64 *full = (u64*)(results + 2 * HALF), *empty = full + STAGES;
  int group = threadIdx.x / 128;
  u32 rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  cluster_meet();
  int pairs = (M + 2 * TOKENS - 1) / (2 * TOKENS), tiles = (I + COLUMNS - 1) / COLUMNS, steps = K / DEPTH, done = 0;
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256)
      for (int t = blockIdx.x / 2; t < pairs * tiles; t += gridDim.x / 2) {
        Tile tile = tile_at(t, pairs, tiles, rank);
        for (int step = 0; step < steps; step++, done++) {
          int stage = done % STAGES;
          unsigned char* at = ring + stage * STAGE;
          barrier_wait(&empty[stage], (done / STAGES & 1) ^ 1);
          barrier_expect(&full[stage], STAGE);
          copy_tile(at, &x, &full[stage], tile.token, step * DEPTH);
          copy_tile_to(3, at + X_BYTES + rank * WEIGHT_BYTES, &weight, &full[stage], tile.column + rank * I, step * DEPTH);
        }
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, self = threadIdx.x % 128;
    u32* rows = (u32*)(results + group * HALF);
    float gate[COLUMNS / 2], up[COLUMNS / 2];
    for (int t = blockIdx.x / 2; t < pairs * tiles; t += gridDim.x / 2) {
      Tile tile = tile_at(t, pairs, tiles, rank);
      for (int step = 0; step < steps; step++, done++) {
        int stage = done % STAGES;
        barrier_wait(&full[stage], done / STAGES & 1);
        u32 tokens = shared_address(ring + stage * STAGE), weights = tokens + X_BYTES;
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) {
          u64 a = operand(tokens + group * 64 * 128 + i * 32);
          multiply(gate, a, operand(weights + i * 32), (step | i) != 0);
          multiply(up, a, operand(weights + WEIGHT_BYTES + i * 32), (step | i) != 0);
        }
        products_commit();
        products_wait<1>();  // so the stage before is free, in both blocks
        if (step && self < 2) barrier_arrive_at(&empty[(done + STAGES - 1) % STAGES], self);
      }
      products_wait<0>();
      if (self < 2) barrier_arrive_at(&empty[(done + STAGES - 1) % STAGES], self);
      if (self == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int i = 4 * j + 2 * h;
          rows[(warp * 16 + lane / 4 + 8 * h) * (COLUMNS / 2) + 4 * j + lane % 4] = gated_pair<false>(gate[i], gate[i + 1], up[i], up[i + 1]);
        }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
      if (self == 0) store_tile(&out, rows, tile.token + group * 64, tile.column);
    }
    if (self == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  cluster_meet();  // the other block may still copy into this one's ring
}
