// One token: out[N] = x[K] @ weight[N, K]^T with weights of codes, float32 sums, on the tensor cores.
//
// As in ring.cu a program an SM has a ring of STAGES x ROWS rows, which a copying warp fills, and sums are added in a fixed
// order. NORM, ADD, GATED, FLOAT and TURNS are those of ring.cu. K = COLUMNS.
//
// GROUP_BYTES: 128 columns of a row are a group of 128 bytes of e4m3, or of 64 bytes of INT4 (openinfer.kernels.int4),
// whose words, the `scales`, travel with the rows. A group has a sum of its own. CODING: 0 leaves x in bf16, for INT4, and
// 4 for FP4 (openinfer.kernels.formats.fp4); else x becomes e4m3 with a scale of each group (1), of all columns (2), or
// with `x_scale` (3). BY_ROW: the weight has a scale a row, else one for 128 rows of a group.
//
// A warp multiplies 8 groups side by side, which are 8 * GROUP_BYTES contiguous bytes. UNIT rows are PLACES such runs,
// and a warp has one place in every unit. So its 8 groups of x are the same for all rows. An operand of 16 rows has
// the 8 groups of one unit and those of the next; the 8 columns of the other one are the 8 groups of x. Of the result
// only the products of a group with itself are needed.

#include "ring.cuh"

constexpr int K = COLUMNS, GROUPS = K / 128, ROW_BYTES = GROUPS * GROUP_BYTES, STRIDE = GROUPS | 1;
constexpr int UNIT = GROUPS % 8 == 0 ? 1 : GROUPS % 4 == 0 ? 2 : GROUPS % 2 == 0 ? 4 : 8, PLACES = UNIT * GROUPS / 8;
constexpr int REPLICAS = WARPS / PLACES, PAIRS = ROWS / (2 * UNIT * REPLICAS);
constexpr bool PACKED = GROUP_BYTES == 64, FP4 = PACKED && CODING == 4, INT4 = PACKED && !FP4, CODED_X = CODING % 4;
constexpr int WORDS = FP4 ? (GROUPS + 1) / 2 * 16 + 16 : INT4 ? GROUPS * 4 : 0, STAGE = ROWS * (ROW_BYTES + WORDS);
static_assert(REPLICAS * PLACES == WARPS && PAIRS * 2 * UNIT * REPLICAS == ROWS, "warps share a stage evenly");

// multiply, of bf16 for INT4 and FP4.
__device__ __forceinline__ void add_product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (PACKED) multiply_bf16(d, a0, a1, a2, a3, b0, b1);
  else multiply(d, a0, a1, a2, a3, b0, b1);
}

// A lane's 32 codes of a group as pairs. scales: FP4's of the group, a byte for each 16 columns.
__device__ __forceinline__ void unpack(u32 (&pair)[16], const unsigned char* group, const unsigned char* scales, int lane) {
  if (PACKED) {
    unpack_four_bits<FP4>(pair, *(const uint4*)(group + lane % 4 * 16), FP4 ? *(const unsigned short*)(scales + lane % 4 * 2) : 0);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 v = *(const uint4*)(group + (i ^ lane / 4 & 1) * 64 + lane % 4 * 16);
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 8; w++) pair[8 * i + w] = halves(words[w / 2] >> w % 2 * 16);
  }
}

// The first of 16 neighbours among a lane's columns of a group; i: 0 or 1.
__device__ __forceinline__ int columns_at(int i, int lane) {
  return PACKED ? lane % 4 * 32 + i * 16 : (i ^ lane / 4 & 1) * 64 + lane % 4 * 16;
}

// Where x's n-th piece of 8 columns lies, so that lanes that read at once have different banks.
__device__ __forceinline__ int place_of(int n) { return n ^ n >> 3 & 3; }

__device__ __forceinline__ float square_of(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }

// A pair of x after the norm.
__device__ __forceinline__ u32 normed(u32 pair, float unit, float2 gain) {
  float a = low(pair) * unit, b = high(pair) * unit;
  return WIDE ? bf16_pair(a * gain.x, b * gain.y) : bf16_pair(rounded(a) * gain.x, rounded(b) * gain.y);
}

__device__ __forceinline__ u32 packed(float a, float b) { return to_bf16(a) | (u32)to_bf16(b) << 16; }

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
gemv_ring_groups(void* out, const bf16* x, const void* gain, const float* x_scale, const unsigned char* weight,
                 const void* scales, int N, float eps) {
  extern __shared__ __align__(128) unsigned char ring[];
  uint4* held_x = (uint4*)(ring + STAGES * STAGE);
  float* partial = (float*)(held_x + K / 8);  // [TURNS * ROWS, STRIDE], then a square and a maximum a warp
  float *squares = partial + TURNS * ROWS * STRIDE, *tops = squares + WARPS;
  u64* full = (u64*)(partial + (TURNS * ROWS * STRIDE + 2 * WARPS + 3) / 4 * 4);
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
        u32 rows = min(SETS, last - row);
        wait_for_landing<STAGES>(full, turn - UNDER_WAY);
        barrier_wait(&empty[stage], (turn / STAGES & 1) ^ 1);
        barrier_expect(&full[stage], HALVES * rows * (ROW_BYTES + WORDS));
        unsigned char* to = ring + stage * STAGE;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          size_t from = row + half * N;
          copy_rows(to + half * SETS * ROW_BYTES, weight + from * ROW_BYTES, rows * ROW_BYTES, &full[stage], policy);
          if (PACKED)
            copy_rows(to + ROWS * ROW_BYTES + half * SETS * WORDS, (const unsigned char*)scales + from * WORDS,
                      rows * WORDS, &full[stage], policy);
        }
      }
      // All loads are under way, so a ring of the next kernel takes no bandwidth from them.
      asm volatile("griddepcontrol.launch_dependents;");
    }
    return;
  }
  // This lane's group of every unit: the group of x, and the row of the unit.
  int slot = warp % PLACES * 8 + lane / 4, group = slot % GROUPS, below = slot / GROUPS;
  // Of the result's 4 numbers two are of this lane's group, if any.
  bool mine = lane % 4 == lane / 8, odd = lane / 4 & 1;
  // Scales of this lane's group in the 128 rows that the program is at, and in the next.
  float near[HALVES], next[HALVES], of_row[HALVES];
  int blocks = (N + 127) / 128, block = first / 128;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    near[half] = next[half] = of_row[half] = 1;
    if (!PACKED && BY_ROW && threadIdx.x < last - first)
      of_row[half] = ((const float*)scales)[half * N + first + threadIdx.x];
    if (!PACKED && !BY_ROW) {
      near[half] = ((const float*)scales)[(half * blocks + block) * GROUPS + group];
      next[half] = ((const float*)scales)[(half * blocks + min(block + 1, blocks - 1)) * GROUPS + group];
    }
  }
  // x becomes bf16 in shared memory. Each thread has the gains and numbers of some of its pieces of 8 columns.
  constexpr int PIECES = K / 8, OWN = (PIECES + WARPS * 32 - 1) / (WARPS * 32);
  float2 gains[OWN][4];
#pragma unroll
  for (int k = 0; k < OWN; k++)
    if (NORM) load_gains(gains[k], gain, min((int)threadIdx.x + k * WARPS * 32, PIECES - 1) * 8);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  uint4 piece[OWN];
  float square = 0;
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    int nth = threadIdx.x + k * WARPS * 32;
    piece[k] = nth < PIECES ? fresh(x + nth * 8) : make_uint4(0, 0, 0, 0);
  }
  if (NORM) {
#pragma unroll
    for (int k = 0; k < OWN; k++) square += square_of(piece[k].x) + square_of(piece[k].y) + square_of(piece[k].z) + square_of(piece[k].w);
    float one[1] = {square};
    square = sums(one, lane);
    if (lane == 0) squares[warp] = square;
    together<WARPS * 32>();
    square = 0;
    for (int w = 0; w < WARPS; w++) square += squares[w];
  }
  float unit = rsqrtf(square / K + eps);
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    int nth = threadIdx.x + k * WARPS * 32;
    uint4 v = piece[k];
    if (NORM)
      v = make_uint4(normed(v.x, unit, gains[k][0]), normed(v.y, unit, gains[k][1]), normed(v.z, unit, gains[k][2]), normed(v.w, unit, gains[k][3]));
    if (nth < PIECES) held_x[place_of(nth)] = v;
  }
  together<WARPS * 32>();
  float own[32];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = held_x[place_of((group * 128 + columns_at(i / 2, lane)) / 8 + i % 2)];
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) own[8 * i + 2 * j] = low(pairs[j]), own[8 * i + 2 * j + 1] = high(pairs[j]);
  }
  u32 held[16];
  float of_x = 1, sum_of_x = 0;  // the scale of x, and for INT4 the sum of the group
  if (CODED_X) {
    float top = 1e-10f;
#pragma unroll
    for (int i = 0; i < 32; i++) top = fmaxf(top, fabsf(own[i]));
    for (int bit = 1; bit < (CODING == 2 ? 32 : 4); bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
    if (CODING == 2) {
      if (lane == 0) tops[warp] = top;
      together<WARPS * 32>();
      for (int w = 0; w < PLACES; w++) top = fmaxf(top, tops[w]);
    }
    of_x = CODING == 3 ? *x_scale : __fdiv_rn(top, 448.0f);
    float factor = CODING == 3 ? __fdiv_rn(1.0f, of_x) : __fdiv_rn(448.0f, top);
#pragma unroll
    for (int i = 0; i < 16; i++) held[i] = halves(codes_of(own[2 * i] * factor, own[2 * i + 1] * factor));
  } else {
#pragma unroll
    for (int i = 0; i < 32; i++) sum_of_x += own[i];
    for (int bit = 1; bit < 4; bit *= 2) sum_of_x += __shfl_xor_sync(~0u, sum_of_x, bit);
#pragma unroll
    for (int i = 0; i < 16; i++) {  // see unpack_four_bits
      int at = i % 2 * 16 + i / 4 * 4 + i % 4 / 2;
      held[i] = packed(own[at], own[at + 2]);
    }
  }
#pragma unroll
  for (int half = 0; half < HALVES; half++)
    if (!BY_ROW) near[half] *= of_x, next[half] *= of_x;
  for (int turn = 0; turn < turns; turn++) {
    int stage = turn % STAGES, row = first + turn * SETS;
    if (!PACKED && !BY_ROW && row / 128 > block) {
      block++;
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        near[half] = next[half];
        next[half] = of_x * ((const float*)scales)[(half * blocks + min(block + 1, blocks - 1)) * GROUPS + group];
      }
    }
    barrier_wait(&full[stage], turn / STAGES & 1);
    const unsigned char* rows = ring + stage * STAGE;
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      int unit = 2 * (warp / PLACES + pair * REPLICAS);
      const unsigned char* at = rows + unit * UNIT * ROW_BYTES + slot * GROUP_BYTES;
      const unsigned char* words = rows + ROWS * ROW_BYTES + (unit * UNIT + below) * WORDS + group * 8;
      u32 a[16], b[16];
      unpack(a, at, words, lane);
      unpack(b, at + UNIT * ROW_BYTES, words + UNIT * WORDS, lane);
      float even[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        add_product(even, a[i], b[i], a[i + 1], b[i + 1], held[i], held[i + 1]);
        add_product(other, a[i + 2], b[i + 2], a[i + 3], b[i + 3], held[i + 2], held[i + 3]);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float value = odd ? even[2 * i + 1] + other[2 * i + 1] : even[2 * i] + other[2 * i];
        int r = (unit + i) * UNIT + below;
        if (FP4) {
          value *= *(const float*)(rows + ROWS * ROW_BYTES + r * WORDS + WORDS - 16);
        } else if (INT4) {
          u32 word = *(const u32*)(rows + ROWS * ROW_BYTES + r * WORDS + group * 4);
          value = (value - (float)(128 + (word & 15)) * sum_of_x) * __uint_as_float(word & ~15u);
        } else if (!BY_ROW) {
          bool up = GATED && r >= SETS;
          bool far = row + r - (up ? SETS : 0) >= (block + 1) * 128;
          value *= far ? (up ? next[HALVES - 1] : next[0]) : up ? near[HALVES - 1] : near[0];
        }
        if (mine) partial[(turn * ROWS + r) * STRIDE + group] = value;
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[stage]);
  }
  together<WARPS * 32>();
  for (int row = threadIdx.x; row < last - first; row += WARPS * 32) {
    const float* sum = partial + (row / SETS * ROWS + row % SETS) * STRIDE;
    float value[4] = {0, 0, 0, 0}, up[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      value[i % 4] += sum[i];
      if (GATED) up[i % 4] += sum[SETS * STRIDE + i];
    }
    if (!PACKED && BY_ROW && row >= WARPS * 32)
      for (int half = 0; half < HALVES; half++) of_row[half] = ((const float*)scales)[half * N + first + row];
    float scale = BY_ROW ? of_x : 1;
    finish(out, first + row, (value[0] + value[1] + (value[2] + value[3])) * (of_row[0] * scale),
           (up[0] + up[1] + (up[2] + up[3])) * (of_row[HALVES - 1] * scale));
  }
}
