// Attention of a decode step over an FP8 cache: each row has one token, whose key and value are in the cache already.
//
// The keys of all rows and key heads are one line of blocks of 128 keys, of which each program has an equal share. So
// the GPU is full whatever the lengths are. A copying warp keeps a ring of STAGES blocks; 8 warps take 16 keys each of a
// block. A row's head that several programs share is merged by the last of them to finish, in a fixed order.
//
// The program starts while the kernels ahead still run. Rows, lengths and tables are from before the step's forward
// pass. Cached keys are copied at once; only the 16 keys among which the step's own is wait for the kernel ahead.
//
// Scores are products of codes and queries in f16, with float32 sums. The tall operand is 16 keys, or 16 channels of the
// values; the 8 columns are query heads, of which GROUP are real. A key's weight is 2^(score + e), where 2^e is the scale
// of its value. These weights share a maximum, and so they fit f16; the sum of weights is of 2^score.
//
// A page of the cache is [K heads | V heads, PAGE, D] codes at kv + page * page_stride, and its scales are E8M0 bytes
// [K heads | V heads, PAGE] at kv_scales + page * page_stride. ROWS: the most rows. `scale` holds log2(e).

#include "gpu.cuh"
#include "attend.cuh"

constexpr int BLOCK = 128, WARPS = 8, COPIERS = 4, THREADS = (WARPS + COPIERS) * 32;
constexpr int HEAD = BLOCK * D, STAGE = 2 * HEAD + 2 * BLOCK, TILES = D / 16, WORDS = D / 64;
constexpr float LOW = -1e30f;

// 16 bytes into shared memory, of which the barrier does not count the bytes. A bulk copy costs the copying unit as much
// time for 16 bytes as for 2,048.
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Arrive when this thread's copies of 16 bytes have.
__device__ __forceinline__ void arrive_after_copies(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_codes(bf16* out, const bf16* q, const unsigned char* kv, const unsigned char* kv_scales, const int* slots,
             const int* q_starts, const int* seq_lens, const int* alive, const int* block_tables, float* partial,
             float* weights, int* arrived, int table_width, int page_stride, float scale, int rows, int tokens,
             int heads) {
  extern __shared__ __align__(128) unsigned char ring[];
  float* merged = (float*)(ring + STAGES * STAGE);  // [WARPS, GROUP, D], then maxima and sums [WARPS, GROUP]
  float *tops = merged + WARPS * GROUP * D, *totals = tops + WARPS * GROUP;
  u64 *full = (u64*)(totals + WARPS * GROUP), *empty = full + STAGES;
  Row* of_rows = (Row*)(empty + STAGES);  // [ROWS]
  int* starts = (int*)(of_rows + ROWS);   // [ROWS + 1], then whether this program merges each of two heads
  int* merges = starts + ROWS + 1;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  asm volatile("griddepcontrol.launch_dependents;");  // its blocks take the SMs that these leave
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 33), barrier_init(&empty[i], WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  size_t past = (size_t)q_starts[rows] * heads * GROUP * D / 2, stop = (size_t)tokens * heads * GROUP * D / 2;
  line_up<THREADS, BLOCK>(of_rows, starts, rows, slots, q_starts, seq_lens, alive);
  // Its product with the number of programs fits an int: a cache of 2^23 blocks would have 270 GB in one layer.
  int line = starts[rows] * heads, programs = min((int)gridDim.x, line);  // those with a block or more
  int nth = blockIdx.x, begin = 0, end = 0;
  if (nth < programs) begin = nth * line / programs, end = (nth + 1) * line / programs;
  if (warp >= WARPS) {
    if (lane >= 8) return;
    int chunk = (warp - WARPS) * 2 + lane % 2, kind = lane / 2;  // kinds: keys, values, scales of keys, scales of values
    int width = kind < 2 ? D : 1;
    u64 policy = evict_first();
    auto copy = [&](int from, int until, bool old, bool own) {
      for (int done = from; done < until;) {
        Part part = part_at(starts, rows, heads, begin + done, begin + until);
        Row of = of_rows[part.row];
        if (!old && part.last < part.blocks) {
          done += part.last - part.first;
          continue;
        }
        const unsigned char* source = kind < 2 ? kv + (size_t)(part.head + kind * heads) * PAGE * D
                                               : kv_scales + (size_t)(part.head + (kind - 2) * heads) * PAGE;
        const int* table = block_tables + (size_t)of.slot * table_width;
        int ahead = table[min(part.first * BLOCK + chunk * 16, of.length - 1) / PAGE];
        for (int block = part.first; block < part.last; block++, done++) {
          int key = block * BLOCK + chunk * 16, page = ahead, stage = done % STAGES;
          ahead = table[min(key + BLOCK, of.length - 1) / PAGE];
          int chunks = min(8, (of.length - block * BLOCK + 15) / 16);
          if (old) {
            barrier_wait(&empty[stage], (done / STAGES & 1) ^ 1);
            if (warp == WARPS && lane == 0) barrier_expect(&full[stage], chunks * 32 * D);
            __syncwarp(0xff);
          }
          if (!(key / 16 == (of.length - 1) / 16 ? own : old)) continue;
          unsigned char* to = ring + stage * STAGE + (kind < 2 ? kind * HEAD : 2 * HEAD + (kind - 2) * BLOCK);
          const unsigned char* at = source + (size_t)page * page_stride + key % PAGE * width;
          if (chunk < chunks) {
            if (kind < 2) copy_rows(to + chunk * 16 * width, at, 16 * width, &full[stage], policy);
            else copy_16(to + chunk * 16, at);
          }
          arrive_after_copies(&full[stage]);
        }
      }
    };
    copy_blocks<STAGES>(copy, end - begin);
    return;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int row = nth; row < rows; row += gridDim.x)
    if (of_rows[row].count && !of_rows[row].length)
      for (int i = threadIdx.x; i < heads * GROUP * D / 2; i += WARPS * 32)
        ((u32*)(out + (size_t)of_rows[row].token * heads * GROUP * D))[i] = 0;
  for (size_t i = past + nth * WARPS * 32 + threadIdx.x; i < stop; i += gridDim.x * WARPS * 32) ((u32*)out)[i] = 0;
  if (begin == end) return;
  int g = lane / 4, t = lane % 4, done = 0;
  for (int at = begin; at < end;) {
    Part part = part_at(starts, rows, heads, at, end);
    int length = of_rows[part.row].length, token = of_rows[part.row].token;
    u32 query[WORDS][8];  // this lane's channels of query head g: 16 at (4 i + t) * 16
    const bf16* own = q + (((size_t)token * heads + part.head) * GROUP + min(g, GROUP - 1)) * D;
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
        float score[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
          uint4 va = *(const uint4*)(keys + g * D + (4 * i + t) * 16);
          uint4 vb = *(const uint4*)(keys + (g + 8) * D + (4 * i + t) * 16);
          u32 a[4] = {va.x, va.y, va.z, va.w}, b[4] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
          for (int j = 0; j < 4; j++)
            multiply(i % 2 ? other : score, halves(a[j]), halves(b[j]), halves(a[j] >> 16), halves(b[j] >> 16),
                     query[i][2 * j], query[i][2 * j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) score[i] += other[i];
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
        largest_of_rows(most);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float now = fmaxf(top[i], most[i]), decay = power_of(top[i] - now);
          top[i] = now;
          weight[i] = power_of(weight[i] - now + RAISED), weight[i + 2] = power_of(weight[i + 2] - now + RAISED);
          total[i] = total[i] * decay + power_of(plain[i] - now) + power_of(plain[i + 2] - now);
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
            v[i][0] = word.x, v[i][1] = word.y, v[i][2] = word.z, v[i][3] = word.w;
            if (key + 16 > length && key + nth >= length) v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;  // it may be NaN
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
    sum_rows(total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int of = 2 * t + i;
      if (of < GROUP) {
        if (g == 0) tops[warp * GROUP + of] = top[i], totals[warp * GROUP + of] = total[i];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          int channel = j / 8 * 128 + 16 * g + j % 8 * 2;
          merged[(warp * GROUP + of) * D + channel] = sum[j][i] * LOWERED;
          merged[(warp * GROUP + of) * D + channel + 1] = sum[j][i + 2] * LOWERED;
        }
      }
    }
    together<WARPS * 32>();
    Item item = item_of(starts, heads, part, line, programs);
    int began = item.at >= begin, place = 2 * nth + began;
    for (int i = threadIdx.x; i < GROUP * D; i += WARPS * 32) {
      int of = i / D;
      float most = LOW, value = 0, all = 0;
      for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w * GROUP + of]);
      for (int w = 0; w < WARPS; w++) {
        float share = power_of(tops[w * GROUP + of] - most);
        value += share * merged[w * GROUP * D + i], all += share * totals[w * GROUP + of];
      }
      if (item.first == item.last) {
        out[((size_t)token * heads + part.head) * GROUP * D + i] = to_bf16(value / all);
      } else {
        partial[(size_t)place * GROUP * D + i] = value;
        if (i % D == 0) *(float2*)(weights + (place * GROUP + of) * 2) = make_float2(most, all);
      }
    }
    together<WARPS * 32>();  // merged is free for the next head
    if (item.first != item.last && threadIdx.x == 0) {
      __threadfence();
      merges[began] = atomicAdd(&arrived[part.row * heads + part.head], 1) == item.last - item.first;
      __threadfence();
    }
    at += part.last - part.first;
  }
  // Who has come last to a head merges it. A program shares at most its first head and its last, and ends with both.
  together<WARPS * 32>();
  for (int last = 0; last < 2; last++) {
    Part part = part_at(starts, rows, heads, last ? end - 1 : begin, end);
    Item item = item_of(starts, heads, part, line, programs);
    if (item.first == item.last || !merges[item.at >= begin] || last && item.at <= begin) continue;
    bf16* to = out + ((size_t)of_rows[part.row].token * heads + part.head) * GROUP * D;
    for (int i = threadIdx.x; i < GROUP * D; i += WARPS * 32) {
      float most = LOW, value = 0, all = 0;
#pragma unroll 8
      for (int c = item.first; c <= item.last; c++) {
        int place = 2 * c + (item.at >= c * line / programs);
        float2 of = __ldcg((const float2*)(weights + (place * GROUP + i / D) * 2));
        float value_of = __ldcg(partial + (size_t)place * GROUP * D + i);
        float now = fmaxf(most, of.x), old = power_of(most - now), share = power_of(of.x - now);
        value = value * old + value_of * share, all = all * old + of.y * share, most = now;
      }
      to[i] = to_bf16(value / all);
    }
    if (threadIdx.x == 0) arrived[part.row * heads + part.head] = 0;
  }
}
