// Attention of a decode step over an FP8 cache: each row has one token, whose key and value are in the cache already.
//
// The keys of all rows and key heads are one line of blocks of 128 keys, of which each program has an equal share. So
// the GPU is full whatever the lengths are. A copying warp keeps a ring of STAGES blocks; 8 warps take 16 keys each of a
// block. A row's head that several programs share is merged by the last of them to finish, in a fixed order.
//
// Scores are products of codes and queries in f16, with float32 sums. The tall operand is 16 keys, or 16 channels of the
// values; the 8 columns are query heads, of which GROUP are real. A key's weight is 2^(score + e), where 2^e is the scale
// of its value. These weights share a maximum, and so they fit f16; the sum of weights is of 2^score.
//
// A page of the cache is [K heads | V heads, PAGE, D] codes at kv + page * page_stride, and its scales are E8M0 bytes
// [K heads | V heads, PAGE] at kv_scales + page * page_stride. ROWS: the most rows. `scale` holds log2(e).

#include "gpu.cuh"

constexpr int BLOCK = 128, WARPS = 8, HEAD = BLOCK * D, STAGE = 2 * HEAD + 2 * BLOCK, TILES = D / 16, WORDS = D / 64;
constexpr float LOW = -1e30f, RAISED = 10;  // weights up to 2^10: f16 has more numbers below that than below 1

__device__ __forceinline__ void together() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

__device__ __forceinline__ u32 f16_pair(float a, float b) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// An 8 x 8 matrix of f16 pairs, lane / 4 the row, transposed over the warp.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

__device__ __forceinline__ float2 fresh_pair(const float* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 byte_of(const unsigned char* p) { return *p; }

// 2^(byte - 127), for a byte below 254.
__device__ __forceinline__ float power(u32 byte) { return __uint_as_float(byte ? byte << 23 : 0x400000); }

struct Part {  // a run of blocks of one row's head
  int row, head, first, last, blocks;
};

// The part of the line that begins at `at` and ends before `end`. starts: blocks of a head in the rows before each row.
__device__ __forceinline__ Part part_at(const int* starts, int rows, int heads, int at, int end) {
  int low = 0, high = rows - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (starts[middle] * heads <= at) low = middle;
    else high = middle - 1;
  }
  int blocks = starts[low + 1] - starts[low], inside = at - starts[low] * heads, first = inside % blocks;
  return {low, inside / blocks, first, min(blocks, first + end - at), blocks};
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
attend_codes(bf16* out, const bf16* q, const unsigned char* kv, const unsigned char* kv_scales, const int* slots,
             const int* q_starts, const int* seq_lens, const int* alive, const int* block_tables, float* partial,
             float* weights, int* arrived, int table_width, int page_stride, float scale, int rows, int tokens,
             int heads) {
  extern __shared__ __align__(128) unsigned char ring[];
  float* merged = (float*)(ring + STAGES * STAGE);  // [WARPS, GROUP, D], then maxima and sums [WARPS, GROUP]
  float *tops = merged + WARPS * GROUP * D, *totals = tops + WARPS * GROUP;
  u64 *full = (u64*)(totals + WARPS * GROUP), *empty = full + STAGES;
  int* starts = (int*)(empty + STAGES);  // [ROWS + 1], then whether this program merges
  int* merges = starts + ROWS + 1;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  for (int row = threadIdx.x; row < rows; row += WARPS * 32 + 32) {
    int slot = slots[row], token = q_starts[row], count = q_starts[row + 1] - token, blocks = 0;
    if (count && alive[slot]) blocks = (seq_lens[slot] + BLOCK) / BLOCK;  // of seq_lens + 1 keys
    starts[row + 1] = blocks;
    if (count && !blocks && row % gridDim.x == blockIdx.x)
      for (int i = 0; i < heads * GROUP * D / 2; i++) ((u32*)(out + (size_t)token * heads * GROUP * D))[i] = 0;
  }
  size_t past = (size_t)q_starts[rows] * heads * GROUP * D / 2, stop = (size_t)tokens * heads * GROUP * D / 2;
  for (size_t i = past + blockIdx.x * blockDim.x + threadIdx.x; i < stop; i += gridDim.x * blockDim.x) ((u32*)out)[i] = 0;
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int base = 0; base < rows; base += 32) {
      int sum = base + lane < rows ? starts[base + lane + 1] : 0;
      for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
      }
      if (base + lane < rows) starts[base + lane + 1] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) starts[0] = 0;
  }
  __syncthreads();
  long long line = (long long)starts[rows] * heads;
  int programs = (int)min((long long)gridDim.x, line);  // those with a block or more
  if ((int)blockIdx.x >= programs) return;
  int begin = (int)(blockIdx.x * line / programs), end = (int)((blockIdx.x + 1) * line / programs);
  if (warp == WARPS) {
    int chunk = lane % 8, kind = lane / 8, done = 0;  // kinds: keys, values, scales of keys, scales of values
    for (int at = begin; at < end;) {
      Part part = part_at(starts, rows, heads, at, end);
      int slot = slots[part.row], length = seq_lens[slot] + 1, head = part.head + (kind & 1) * heads;
      const int* table = block_tables + (size_t)slot * table_width;
      const unsigned char* from = kind < 2 ? kv + (size_t)head * PAGE * D : kv_scales + (size_t)head * PAGE;
      int width = kind < 2 ? D : 1;
      int ahead = table[min(part.first * BLOCK + chunk * 16, length - 1) / PAGE];
      for (int block = part.first; block < part.last; block++, done++) {
        int key = block * BLOCK + chunk * 16, page = ahead, stage = done % STAGES;
        ahead = table[min(key + BLOCK, length - 1) / PAGE];
        int chunks = min(8, (length - block * BLOCK + 15) / 16);
        barrier_wait(&empty[stage], (done / STAGES & 1) ^ 1);
        if (lane == 0) barrier_expect(&full[stage], chunks * 32 * (D + 1));
        __syncwarp();
        unsigned char* to = ring + stage * STAGE + (kind < 2 ? kind * HEAD : 2 * HEAD + (kind - 2) * BLOCK);
        if (chunk < chunks)
          copy_rows(to + chunk * 16 * width, from + (size_t)page * page_stride + key % PAGE * width, 16 * width,
                    &full[stage], 0x12F0000000000000ull);  // the policy evict_first
      }
      at += part.last - part.first;
    }
    return;
  }
  int g = lane / 4, t = lane % 4, done = 0;
  for (int at = begin; at < end;) {
    Part part = part_at(starts, rows, heads, at, end);
    int slot = slots[part.row], length = seq_lens[slot] + 1, token = q_starts[part.row];
    u32 query[WORDS][8];  // this lane's channels of query head g: 16 at (4 i + t) * 16
    const bf16* own = q + ((size_t)token * heads * GROUP + part.head * GROUP + min(g, GROUP - 1)) * D;
#pragma unroll
    for (int i = 0; i < WORDS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint4 v = fresh(own + (4 * i + t) * 16 + half * 8);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) query[i][4 * half + j] = g < GROUP ? f16_pair(low(pairs[j]), high(pairs[j])) : 0;
      }
    float top[2] = {LOW, LOW}, total[2] = {0, 0}, sum[TILES][4];  // of query heads 2 t and 2 t + 1
#pragma unroll
    for (int i = 0; i < TILES; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
    for (int block = part.first; block < part.last; block++, done++) {
      int stage = done % STAGES, key = block * BLOCK + warp * 16;
      barrier_wait(&full[stage], done / STAGES & 1);
      const unsigned char *keys = ring + stage * STAGE + warp * 16 * D, *values = keys + HEAD;
      const unsigned char* scales = ring + stage * STAGE + 2 * HEAD + warp * 16;
      if (key < length) {
        float score[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
          uint4 va = *(const uint4*)(keys + g * D + (4 * i + t) * 16);
          uint4 vb = *(const uint4*)(keys + (g + 8) * D + (4 * i + t) * 16);
          u32 a[4] = {va.x, va.y, va.z, va.w}, b[4] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
          for (int j = 0; j < 4; j++)
            multiply(score, halves(a[j]), halves(b[j]), halves(a[j] >> 16), halves(b[j] >> 16), query[i][2 * j],
                     query[i][2 * j + 1]);
        }
        float plain[4], weight[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          bool seen = key + g + 8 * half < length;
          float of_key = power(byte_of(scales + g + 8 * half)) * scale;
          float exponent = (int)byte_of(scales + BLOCK + g + 8 * half) - 127;
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; i++) {
            plain[i] = seen ? score[i] * of_key : -__uint_as_float(0x7f800000);
            weight[i] = seen ? plain[i] + exponent : plain[i];
          }
        }
        float most[2] = {fmaxf(weight[0], weight[2]), fmaxf(weight[1], weight[3])};
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
          most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], bit));
          most[1] = fmaxf(most[1], __shfl_xor_sync(~0u, most[1], bit));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float now = fmaxf(top[i], most[i]), decay = exp2f(top[i] - now);
          top[i] = now;
          weight[i] = exp2f(weight[i] - now + RAISED), weight[i + 2] = exp2f(weight[i + 2] - now + RAISED);
          total[i] = total[i] * decay + exp2f(plain[i] - now) + exp2f(plain[i + 2] - now);
#pragma unroll
          for (int j = 0; j < TILES; j++) sum[j][i] *= decay, sum[j][i + 2] *= decay;
        }
        u32 p0 = transposed(f16_pair(weight[0], weight[1])), p1 = transposed(f16_pair(weight[2], weight[3]));
#pragma unroll
        for (int h = 0; h < D / 128; h++) {
          u32 v[4][4];  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 by words of channels from 16 g on
#pragma unroll
          for (int i = 0; i < 4; i++) {
            int nth = 2 * t + i % 2 + i / 2 * 8;
            uint4 word = *(const uint4*)(values + nth * D + h * 128 + 16 * g);
            bool seen = key + nth < length;  // what was never written may be NaN
            v[i][0] = seen ? word.x : 0, v[i][1] = seen ? word.y : 0;
            v[i][2] = seen ? word.z : 0, v[i][3] = seen ? word.w : 0;
          }
#pragma unroll
          for (int j = 0; j < 4; j++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
              u32 near = __byte_perm(v[0][j], v[1][j], pair ? 0x7362 : 0x5140);
              u32 far = __byte_perm(v[2][j], v[3][j], pair ? 0x7362 : 0x5140);
              multiply(sum[8 * h + 2 * j + pair], halves(near), halves(near >> 16), halves(far), halves(far >> 16), p0,
                       p1);
            }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
    }
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) {
      total[0] += __shfl_xor_sync(~0u, total[0], bit);
      total[1] += __shfl_xor_sync(~0u, total[1], bit);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int of = 2 * t + i;
      if (of < GROUP) {
        if (g == 0) tops[warp * GROUP + of] = top[i], totals[warp * GROUP + of] = total[i];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          int channel = j / 8 * 128 + 16 * g + j % 8 * 2;
          merged[(warp * GROUP + of) * D + channel] = sum[j][i] * exp2f(-RAISED);
          merged[(warp * GROUP + of) * D + channel + 1] = sum[j][i + 2] * exp2f(-RAISED);
        }
      }
    }
    together();
    // Of the programs that share this head, who begin with which block of the line.
    long long item = (long long)starts[part.row] * heads + (long long)part.head * part.blocks;
    int from = (int)(((item + 1) * programs - 1) / line), until = (int)(((item + part.blocks) * programs - 1) / line);
    bf16* to = out + ((size_t)token * heads + part.head) * GROUP * D;
    int counter = part.row * heads + part.head, place = 2 * blockIdx.x + (item >= begin);
    for (int i = threadIdx.x; i < GROUP * D; i += WARPS * 32) {
      int of = i / D;
      float most = LOW, value = 0, all = 0;
      for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w * GROUP + of]);
      for (int w = 0; w < WARPS; w++) {
        float share = exp2f(tops[w * GROUP + of] - most);
        value += share * merged[w * GROUP * D + i], all += share * totals[w * GROUP + of];
      }
      if (from == until) {
        to[i] = to_bf16(value / all);
      } else {
        partial[(size_t)place * GROUP * D + i] = value;
        if (i % D == 0) *(float2*)(weights + (place * GROUP + of) * 2) = make_float2(most, all);
      }
    }
    if (from != until) {
      __threadfence();
      together();
      if (threadIdx.x == 0) *merges = atomicAdd(&arrived[counter], 1) == until - from;
      together();
      if (*merges) {
        __threadfence();
        for (int i = threadIdx.x; i < GROUP * D; i += WARPS * 32) {
          float most = LOW, value = 0, all = 0;
          for (int pass = 0; pass < 2; pass++)
            for (int c = from; c <= until; c++) {
              int theirs = 2 * c + (item >= (int)(c * line / programs));
              float2 of = fresh_pair(weights + (theirs * GROUP + i / D) * 2);
              if (pass == 0) {
                most = fmaxf(most, of.x);
              } else {
                float share = exp2f(of.x - most);
                value += share * __ldcg(partial + (size_t)theirs * GROUP * D + i), all += share * of.y;
              }
            }
          to[i] = to_bf16(value / all);
        }
        if (threadIdx.x == 0) arrived[counter] = 0;
      }
    }
    together();  // merged is free for the next head
    at += part.last - part.first;
  }
}
