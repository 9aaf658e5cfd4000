// What the kernels with a ring of weights in shared memory have in common.

#include "gpu.cuh"

// Two neighbours of the gain, in bf16, or in float32 if WIDE.
__device__ __forceinline__ float2 gain_pair(const void* gain, int column) {
  if (WIDE) return *(const float2*)((const float*)gain + column);
  u32 pair = *(const u32*)((const bf16*)gain + column);
  return make_float2(low(pair), high(pair));
}

// Eight neighbours of the gain.
__device__ __forceinline__ void load_gains(float2 (&to)[4], const void* gain, int column) {
  if (WIDE) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float4 v = ((const float4*)gain)[column / 4 + i];
      to[2 * i] = make_float2(v.x, v.y), to[2 * i + 1] = make_float2(v.z, v.w);
    }
  } else {
    uint4 v = ((const uint4*)gain)[column / 8];
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = make_float2(low(pairs[i]), high(pairs[i]));
  }
}

// The value of an output before this kernel.
__device__ __forceinline__ float residual(const void* out, size_t at) {
  bf16 old;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(old) : "l"((const bf16*)out + at));
  return low(old);
}

__device__ __forceinline__ void store(void* out, size_t at, float value) {
  if (FLOAT) ((float*)out)[at] = value;
  else ((bf16*)out)[at] = to_bf16(value);
}

// Store an output, from its sum and the up projection's.
__device__ __forceinline__ void finish(void* out, size_t at, float value, float up) {
  if (GATED) value = gated(value, up);
  if (ADD) value += residual(out, at);
  store(out, at, value);
}

// The sums over the lanes of a warp of N values a lane. Lane 32 / N * i has the i-th.
template <int N, int BIT = 16>
__device__ __forceinline__ float sums(float (&value)[N], int lane) {
  if constexpr (N > 8) {  // the loop below would not be unrolled
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      float give = lane & BIT ? value[i] : value[i + N / 2], keep = lane & BIT ? value[i + N / 2] : value[i];
      half[i] = keep + __shfl_xor_sync(~0u, give, BIT);
    }
    return sums<N / 2, BIT / 2>(half, lane);
  }
#pragma unroll
  for (int count = N, bit = BIT; count > 1; count /= 2, bit /= 2)
#pragma unroll
    for (int i = 0; i < count / 2; i++) {
      float give = lane & bit ? value[i] : value[i + count / 2], keep = lane & bit ? value[i + count / 2] : value[i];
      value[i] = keep + __shfl_xor_sync(~0u, give, bit);
    }
#pragma unroll
  for (int bit = BIT / N; bit; bit /= 2) value[0] += __shfl_xor_sync(~0u, value[0], bit);
  return value[0];
}

// Rows of a stage: of the weight, and of a half of it.
constexpr int HALVES = GATED ? 2 : 1, SETS = ROWS / HALVES;

// The barriers of a ring, for all threads of a program.
__device__ __forceinline__ void start_ring(u64* full, u64* empty) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
}
