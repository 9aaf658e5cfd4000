// One token: out[N] = x[K] @ weight[N, K]^T in bf16, float32 sums, on the CUDA cores.
//
// One program an SM. A copying warp keeps a ring of STAGES x ROWS rows of the weight filled by bulk copies. It starts
// before the kernel ahead has ended, because no kernel of a step writes weights. The other warps wait for that kernel.
// Each of them then holds its part of x in registers, multiplies that part of every row, and leaves a sum a row in shared
// memory. At the end the sums of a row are added in the order of the warps. So the bits are the same in every run.
//
// K = WARPS * CHUNKS * 256. NORM: x is normalised: gain multiplies x before the product, and 1 / rms multiplies the sum.
// ADD: out += the product. GATED: weight is [2 N, K], and out = silu(gate) * up; a stage has ROWS / 2 rows of each.
// FLOAT: out is float32. TURNS: stages of the program with the most rows.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
      ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_rows(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// Past the first-level cache: another SM may have written the value while this kernel was already resident.
__device__ __forceinline__ uint4 fresh(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two neighbours of the gain, in bf16, or in float32 if WIDE.
__device__ __forceinline__ float2 gain_pair(const void* gain, int column) {
  if (WIDE) return *(const float2*)((const float*)gain + column);
  u32 pair = *(const u32*)((const bf16*)gain + column);
  return make_float2(low(pair), high(pair));
}

__device__ __forceinline__ bf16 to_bf16(float value) {
  bf16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float rounded(float value) { return low(to_bf16(value)); }

__device__ __forceinline__ float gated(float gate, float up) {
  gate = rounded(gate);
  float small = exp2f(fabsf(gate) * -1.4426950408889634f);  // never overflows
  return rounded(gate * (gate < 0 ? small : 1.0f) / (1.0f + small)) * rounded(up);
}

// Store an output, from its sum and the up projection's.
__device__ __forceinline__ void finish(void* out, size_t at, float value, float up) {
  if (GATED) value = gated(value, up);
  if (ADD) {
    bf16 old;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(old) : "l"((const bf16*)out + at));
    value += low(old);
  }
  if (FLOAT) ((float*)out)[at] = value;
  else ((bf16*)out)[at] = to_bf16(value);
}

// The sums over the lanes of a warp of N values a lane. Lane 32 / N * i has the i-th.
template <int N>
__device__ __forceinline__ float sums(float (&value)[N], int lane) {
#pragma unroll
  for (int count = N, bit = 16; count > 1; count /= 2, bit /= 2)
#pragma unroll
    for (int i = 0; i < count / 2; i++) {
      float give = lane & bit ? value[i] : value[i + count / 2], keep = lane & bit ? value[i + count / 2] : value[i];
      value[i] = keep + __shfl_xor_sync(~0u, give, bit);
    }
#pragma unroll
  for (int bit = 16 / N; bit; bit /= 2) value[0] += __shfl_xor_sync(~0u, value[0], bit);
  return value[0];
}

constexpr int K = WARPS * CHUNKS * 256, STAGE = ROWS * K * 2, STRIDE = WARPS | 1;
constexpr int HALVES = GATED ? 2 : 1, SETS = ROWS / HALVES;

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
gemv_ring(void* out, const bf16* x, const void* gain, const bf16* weight, int N, float eps) {
  extern __shared__ __align__(128) unsigned char ring[];
  float* partial = (float*)(ring + STAGES * STAGE);  // [TURNS * ROWS, STRIDE], then a sum of squares a warp
  u64* full = (u64*)(partial + (TURNS * ROWS * STRIDE + WARPS + 3) / 4 * 4);
  u64* empty = full + STAGES;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  int first = (int)((long long)blockIdx.x * N / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * N / gridDim.x);
  int turns = (last - first + SETS - 1) / SETS;
  if (warp == WARPS) {
    if (lane == 0) {
      u64 policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      for (int turn = 0; turn < turns; turn++) {
        int stage = turn % STAGES, row = first + turn * SETS;
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
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (NORM) gains[c][i] = gain_pair(gain, column + c * 256 + i * 2);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float own[CHUNKS][8], square = 0;
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
  float* squares = partial + TURNS * ROWS * STRIDE;
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
  float scale = 1;
  if (NORM) {
    float square = 0;
    for (int w = 0; w < WARPS; w++) square += squares[w];
    scale = rsqrtf(square / K + eps);
  }
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
