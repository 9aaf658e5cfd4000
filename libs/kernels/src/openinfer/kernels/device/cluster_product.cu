// out [M, N] = x [M, K] @ weight [N, K]^T in bf16 for at most TOKENS tokens, float32 sums.
//
// A cluster of SPLIT blocks has COLUMNS rows of the weight, and each of its blocks a part of K. So the blocks are one wave
// with equal parts of the weight, and a block reads a part of x alone. A warp copies the weight into a ring and another one
// x. The first does not wait for the kernel ahead. Two warpgroups multiply: of 128 tokens each has 64, and of 64 tokens
// each has a half of every stage's depth. Their sums lie in shared memory, and each block adds up those of its tokens, in
// the order of K. ADD: out += the product. GATED: weight is [2 N, K], gate and then up; out = silu(gate) * up.

#include "gpu.cuh"
#include "tensor_cores.cuh"

constexpr int DEPTH = 64, HALVES = GATED ? 2 : 1, PARTS = TOKENS == 64 ? 2 : 1;
constexpr int X_BYTES = TOKENS * DEPTH * 2, WEIGHT_BYTES = COLUMNS * DEPTH * 2, STAGE = X_BYTES + HALVES * WEIGHT_BYTES;
constexpr int COPIED = STAGE - (TOKENS - ROWS) * DEPTH * 2;  // ROWS: of x that are copied; what lies behind them is never stored
constexpr int PITCH = HALVES * COLUMNS + (40 - HALVES * COLUMNS % 32) % 32;  // rows that follow each other have other banks
constexpr int SUMS = PARTS * TOKENS * PITCH * 4, ROOM = STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS;
constexpr int QUADS = COLUMNS / 4, PRODUCTS = DEPTH / 16 / PARTS;  // of a warpgroup and stage
static_assert(TOKENS == 64 || TOKENS == 128, "a warpgroup multiplies 64 tokens");

__device__ __forceinline__ float4 of_block(u32 address, u32 rank) {
  float4 v;
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [r];\n}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
  return v;
}

// The sums over K of four neighbouring columns; `at`: their place in each block's first part.
__device__ __forceinline__ float4 total(u32 at) {
  float4 found[SPLIT * PARTS], sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < SPLIT * PARTS; i++) found[i] = of_block(at + i % PARTS * TOKENS * PITCH * 4, i / PARTS);
#pragma unroll
  for (int i = 0; i < SPLIT * PARTS; i++) sum.x += found[i].x, sum.y += found[i].y, sum.z += found[i].z, sum.w += found[i].w;
  return sum;
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(384, 1)
cluster_product(bf16* out, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, int M, int N, int K) {
  extern __shared__ __align__(1024) unsigned char ring[];
  u64 *full = (u64*)(ring + ROOM), *empty = full + STAGES;
  int group = threadIdx.x / 128, self = threadIdx.x % 128, column = blockIdx.x / SPLIT * COLUMNS;
  int rank = blockIdx.x % SPLIT, steps = K / DEPTH, first = steps * rank / SPLIT;
  steps = steps * (rank + 1) / SPLIT - first;
  u64 policy = evict_first();
  auto copy_weight = [&](int step) {
    int stage = step % STAGES;
    barrier_expect(&full[stage], COPIED);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      copy_tile(ring + stage * STAGE + X_BYTES + h * WEIGHT_BYTES, &weight, &full[stage], column + h * N, (first + step) * DEPTH,
                policy);
  };
  if (threadIdx.x == 256) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 2);
    asm volatile("fence.mbarrier_init.release.cluster;");
    for (int step = 0; step < min(STAGES, steps); step++) copy_weight(step);
  }
  __syncthreads();
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (self == 0) {
      for (int step = STAGES; step < steps; step++) {
        barrier_wait(&empty[step % STAGES], (step / STAGES & 1) ^ 1);
        copy_weight(step);
      }
      // All loads are under way, so those of the next kernel take no bandwidth from them.
      asm volatile("griddepcontrol.launch_dependents;");
    } else if (self == 32) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int step = 0; step < steps; step++) {
        int stage = step % STAGES;
        barrier_wait(&empty[stage], (step / STAGES & 1) ^ 1);
        copy_tile(ring + stage * STAGE, &x, &full[stage], 0, (first + step) * DEPTH);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sum[HALVES][COLUMNS / 2];
    int lane = self % 32, row = (PARTS == 1 ? group * 64 : 0) + self / 32 * 16 + lane / 4, at = PARTS == 2 ? group * PRODUCTS : 0;
    for (int step = 0; step < steps; step++) {
      int stage = step % STAGES;
      barrier_wait(&full[stage], step / STAGES & 1);
      u32 tokens = shared_address(ring + stage * STAGE), weights = tokens + X_BYTES + at * 32;
      tokens += (PARTS == 1 ? group * 64 * 128 : 0) + at * 32;
      products_begin();
#pragma unroll
      for (int i = 0; i < PRODUCTS; i++)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
          multiply(sum[h], operand(tokens + i * 32), operand(weights + h * WEIGHT_BYTES + i * 32), (step | i) != 0);
      products_commit();
      products_wait<1>();  // so the stage before is free
      if (step && self == 0) barrier_arrive(&empty[(step - 1) % STAGES]);
    }
    products_wait<0>();
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
  }
  cluster_sync();
  if (group < 2) {
    asm volatile("griddepcontrol.wait;" ::: "memory");  // before what the kernel ahead wrote is read
    int count = (M - rank + SPLIT - 1) / SPLIT * QUADS;
    for (int item = threadIdx.x; item < count; item += 256) {
      int token = rank + item / QUADS * SPLIT, quad = item % QUADS * 4;
      if (column + quad >= N) continue;
      bf16* to = out + (size_t)token * N + column + quad;
      u32 at = shared_address((float*)ring + token * PITCH + quad);
      uint2 old = make_uint2(0, 0);
      if (ADD) asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(old.x), "=r"(old.y) : "l"(to));
      float4 value = total(at);
      if (GATED) {
        float4 up = total(at + COLUMNS * 4);
        value = make_float4(gated(value.x, up.x), gated(value.y, up.y), gated(value.z, up.z), gated(value.w, up.w));
      }
      if (ADD) value.x += low(old.x), value.y += high(old.x), value.z += low(old.y), value.w += high(old.y);
      *(uint2*)to = make_uint2(bf16_pair(value.x, value.y), bf16_pair(value.z, value.w));
    }
  }
  cluster_sync();  // another block may still read this one's sums
}
