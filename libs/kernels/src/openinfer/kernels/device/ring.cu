// One token: out[N] = x[K] @ weight[N, K]^T in bf16, float32 sums, on the CUDA cores.
//
// One program an SM. A copying warp keeps a ring of STAGES x ROWS rows of the weight filled by bulk copies. It starts
// before the kernel ahead has ended, because no kernel of a step writes weights. The other warps wait for that kernel.
// Each of them then holds its part of x in registers, multiplies that part of every row, and leaves a sum for each row
// in shared memory. At the end the sums of a row are added in the order of the warps. So the bits are the same in every
// run.
//
// K = WARPS * CHUNKS * 256. NORM: x is normalised: gain multiplies x before the product, and 1 / rms multiplies the sum.
// ADD: out += the product. GATED: weight is [2 N, K], and out = silu(gate) * up; a stage has ROWS / 2 rows of each.
// FLOAT: out is float32. TURNS: stages of the program with the most rows.

#include "ring.cuh"

constexpr int K = WARPS * CHUNKS * 256, STAGE = ROWS * K * 2, STRIDE = WARPS | 1;

// 1 / rms of x, from the sums of squares that the warps have left.
__device__ __forceinline__ float norm_scale(const float* squares, float eps) {
  float square = 0;
  for (int w = 0; w < WARPS; w++) square += squares[w];
  return rsqrtf(square / K + eps);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
gemv_ring(void* out, const bf16* x, const void* gain, const bf16* weight, int N, float eps) {
  extern __shared__ __align__(128) unsigned char ring[];
  // [TURNS * ROWS, STRIDE], then sums of squares [WARPS].
  float* partial = (float*)(ring + STAGES * STAGE);
  u64* full = (u64*)(partial + (TURNS * ROWS * STRIDE + WARPS + 3) / 4 * 4);
  u64* empty = full + STAGES;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  start_ring(full, empty);
  int first = (int)((long long)blockIdx.x * N / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * N / gridDim.x);
  int turns = (last - first + SETS - 1) / SETS;
  if (warp == WARPS) {
    if (lane == 0) {
      u64 policy = evict_first();
      for (int turn = 0; turn < turns; turn++) {
        int stage = turn % STAGES, row = first + turn * SETS;
        wait_for_landing<STAGES>(full, turn - UNDER_WAY);
        barrier_wait(&empty[stage], (turn / STAGES & 1) ^ 1);
        u32 bytes = min(SETS, last - row) * K * 2;
        barrier_expect(&full[stage], HALVES * bytes);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          copy_rows(ring + stage * STAGE + half * SETS * K * 2, weight + (size_t)(row + half * N) * K, bytes,
                    &full[stage], policy);
      }
      // All loads are under way, so a ring of the next kernel takes no bandwidth from them.
      asm volatile("griddepcontrol.launch_dependents;");
    }
    return;
  }
  int column = warp * CHUNKS * 256 + lane * 8;
  float2 gains[CHUNKS][4];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
    if (NORM) load_gains(gains[c], gain, column + c * 256);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float own[CHUNKS][8], square = 0;
  float* squares = partial + TURNS * ROWS * STRIDE;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    uint4 v = fresh(x + column + c * 256);
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float a = low(pairs[i]), b = high(pairs[i]);
      if (NORM) square += a * a + b * b, a *= gains[c][i].x, b *= gains[c][i].y;
      own[c][2 * i] = a, own[c][2 * i + 1] = b;
    }
  }
  if (NORM) {
    float one[1] = {square};
    square = sums(one, lane);
    if (lane == 0) squares[warp] = square;
  }
  for (int turn = 0; turn < turns; turn++) {
    int stage = turn % STAGES;
    barrier_wait(&full[stage], turn / STAGES & 1);
    const unsigned char* rows = ring + stage * STAGE + column * 2;
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      sum[r] = 0;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        uint4 v = *(const uint4*)(rows + r * K * 2 + c * 512);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) sum[r] += low(pairs[i]) * own[c][2 * i] + high(pairs[i]) * own[c][2 * i + 1];
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[stage]);
    float total = sums(sum, lane);
    if (lane % (32 / ROWS) == 0) partial[(turn * ROWS + lane / (32 / ROWS)) * STRIDE + warp] = total;
  }
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32));
  float scale = NORM ? norm_scale(squares, eps) : 1;
  for (int row = threadIdx.x; row < last - first; row += WARPS * 32) {
    const float* mine = partial + (row / SETS * ROWS + row % SETS) * STRIDE;
    float value = 0, up = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      value += mine[w];
      if (GATED) up += mine[SETS * STRIDE + w];
    }
    finish(out, first + row, value * scale, up * scale);
  }
}
