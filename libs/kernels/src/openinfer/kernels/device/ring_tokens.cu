// 2 to 4 tokens: out[TOKENS, N] = x[TOKENS, K] @ weight[N, K]^T in bf16, float32 sums, on the tensor cores.
//
// As in ring.cu a program an SM has a ring, which a copying warp fills, and sums are added in a fixed order. NORM, ADD,
// GATED, FLOAT and TURNS are those of ring.cu. K = COLUMNS. A stage has 8 rows of one of PARTS parts of the columns.
//
// A warp has PIECE columns of every part, and holds x of these in registers. An operand of 16 rows has 8 rows of the
// weight twice: alternating pairs of columns, 0 and 4, then 2 and 6 of 8 neighbours, which a lane reads at once. The other
// operand's 8 columns are 4 tokens at the first pairs, and 4 at the second. Of the result only the products of a half
// with itself are needed. x * gain is rounded to bf16, and what this cuts off is multiplied too.

#include "ring.cuh"

constexpr int K = COLUMNS, PART = K / PARTS, PIECE = PART / WARPS, BLOCKS = PIECE / 32, STRIDE = WARPS | 1;
constexpr int PITCH = PART * 2 + (PART % 64 ? 0 : 64);  // rows that follow each other have other banks
constexpr int STAGE = ROWS * PITCH, CHAINS = 4;
static_assert(ROWS == 8 && TOKENS <= 4 && PIECE * WARPS * PARTS == K && PIECE % 32 == 0, "warps share a stage evenly");

__device__ __forceinline__ u32 packed(float a, float b) { return to_bf16(a) | (u32)to_bf16(b) << 16; }

// The residual of output number `item` of a program, by row and then by token.
__device__ __forceinline__ float old_value(const void* out, int N, int first, int item) {
  return residual((const bf16*)out + (size_t)(item % TOKENS) * N + first + item / TOKENS, 0);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
gemv_ring_tokens(void* out, const bf16* x, const void* gain, const bf16* weight, int N, float eps) {
  extern __shared__ __align__(128) unsigned char ring[];
  // [TURNS * ROWS, TOKENS, STRIDE], then sums of squares [WARPS, TOKENS].
  float* partial = (float*)(ring + STAGES * STAGE);
  float* squares = partial + TURNS * ROWS * TOKENS * STRIDE;
  u64* full = (u64*)(partial + (TURNS * ROWS * TOKENS * STRIDE + WARPS * TOKENS + 3) / 4 * 4);
  u64* empty = full + STAGES;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  start_ring(full, empty);
  int first = (int)((long long)blockIdx.x * N / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * N / gridDim.x);
  int turns = (last - first + SETS - 1) / SETS;
  if (warp == WARPS) {
    u64 policy = evict_first();
    int row = first + lane % SETS, half = lane / SETS;
    for (int step = 0; step < turns * PARTS; step++) {
      int stage = step % STAGES, turn = step / PARTS, part = step % PARTS;
      if (lane == 0) {
        wait_for_landing<STAGES>(full, step - UNDER_WAY);
        barrier_wait(&empty[stage], (step / STAGES & 1) ^ 1);
        barrier_expect(&full[stage], HALVES * min(SETS, last - first - turn * SETS) * PART * 2);
      }
      __syncwarp();
      if (lane < ROWS && row + turn * SETS < last)
        copy_rows(ring + stage * STAGE + lane * PITCH, weight + (size_t)(row + turn * SETS + half * N) * K + part * PART,
                  PART * 2, &full[stage], policy);
    }
    // All loads are under way, so a ring of the next kernel takes no bandwidth from them.
    asm volatile("griddepcontrol.launch_dependents;");
    return;
  }
  int token = lane / 4 % 4, second = lane / 16, column = warp * PIECE + lane % 4 * 8;
  float2 gains[PARTS][BLOCKS][2];
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (NORM) gains[p][b][i] = gain_pair(gain, p * PART + column + b * 32 + second * 2 + i * 4);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // The residual of this thread's first output. Its latency is that of the whole product otherwise.
  int count = last - first;
  float old = 0;
  if (ADD && threadIdx.x < TOKENS * count) old = old_value(out, N, first, threadIdx.x);
  u32 held[PARTS][BLOCKS][2], rest[PARTS][BLOCKS][2];
  float square = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (token < TOKENS) v = fresh(x + token * K + p * PART + column + b * 32);
      u32 pairs[2] = {second ? v.y : v.x, second ? v.w : v.z};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        held[p][b][i] = pairs[i];
        if (!NORM) continue;
        float l = low(pairs[i]), h = high(pairs[i]);
        square += l * l + h * h, l *= gains[p][b][i].x, h *= gains[p][b][i].y;
        u32 near = held[p][b][i] = packed(l, h);
        rest[p][b][i] = packed(l - low(near), h - high(near));
      }
    }
  if (NORM) {
    for (int bit = 1; bit < 32; bit *= bit == 2 ? 8 : 2) square += __shfl_xor_sync(~0u, square, bit);
    if (lane % 4 == 0 && lane / 4 < TOKENS) squares[warp * TOKENS + token] = square;
  }
  for (int turn = 0; turn < turns; turn++) {
    float sum[CHAINS][4] = {};
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      int step = turn * PARTS + p, stage = step % STAGES;
      barrier_wait(&full[stage], step / STAGES & 1);
      const unsigned char* rows = ring + stage * STAGE + lane / 4 * PITCH + column * 2;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        uint4 v = *(const uint4*)(rows + b * 64);
        int at = (p * BLOCKS + b) * (NORM ? 2 : 1);
        multiply_bf16(sum[at % CHAINS], v.x, v.y, v.z, v.w, held[p][b][0], held[p][b][1]);
        if (NORM) multiply_bf16(sum[(at + 1) % CHAINS], v.x, v.y, v.z, v.w, rest[p][b][0], rest[p][b][1]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
    }
    // Lanes t = 0 and 1 of four have tokens 2 t and 2 t + 1 at the first pairs, and lanes t + 2 at the second.
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float value = 0, other = 0;
#pragma unroll
      for (int c = 0; c < CHAINS; c++) value += sum[c][i], other += sum[c][i + 2];
      value += __shfl_xor_sync(~0u, other, 2);
      int t = lane % 4 * 2 + i;
      if (t < TOKENS) partial[((turn * ROWS + lane / 4) * TOKENS + t) * STRIDE + warp] = value;
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32));
  // Tokens of a row go to neighbouring threads, whose sums lie in different banks.
  for (int item = threadIdx.x; item < TOKENS * count; item += WARPS * 32) {
    int t = item % TOKENS, row = item / TOKENS;
    if (ADD && item >= WARPS * 32) old = old_value(out, N, first, item);
    const float* mine = partial + ((row / SETS * ROWS + row % SETS) * TOKENS + t) * STRIDE;
    float value = 0, up = 0, square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      value += mine[w];
      if (GATED) up += mine[SETS * TOKENS * STRIDE + w];
      if (NORM) square += squares[w * TOKENS + t];
    }
    float scale = NORM ? rsqrtf(square / K + eps) : 1;
    value *= scale;
    if (GATED) value = gated(value, up * scale);
    store(out, (size_t)t * N + (first + row), value + old);
  }
}
