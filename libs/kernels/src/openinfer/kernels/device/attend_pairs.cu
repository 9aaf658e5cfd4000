// Attention of rows of few tokens over a cache in bf16, which has their keys and values already. A row's tokens times the GROUP
// query heads that share a key head are its pairs, at most PAIRS, a multiple of 8.
//
// Keys are dealt to programs as in attend.cuh, 64 a block. A warp copies blocks into a ring of STAGES by bulk tensor copies, and a
// warpgroup multiplies 64 pairs by them, of which only the real ones count: scores [64, 64], whose weights become bf16 and the
// left operand of the product with the values. The operand reads on behind the queries of the real pairs, and what that gives is
// never stored. Programs that share a row's head leave their sums, wait for each other, and merge a slice of it each. What runs
// once is short, since its instructions come from far.
//
// The program starts while the kernels ahead still run. Rows, lengths and tables are from before the step's forward pass. Pages
// with keys of other steps are copied at once; those with the step's own wait for the kernel ahead.
//
// `cache`: pages as a matrix of D columns; a page is [K heads | V heads, PAGE] rows of it, page_rows after the last one. `scale`
// holds log2(e). The result, rounded, is multiplied by the rounded sigmoid of `gates`, of which a head has every second D columns.

#include "gpu.cuh"
#include "attend.cuh"
#include "tensor_cores.cuh"

constexpr int KEYS = 64, TILES = D / 64, TILE = KEYS * 128, STAGE = 2 * TILES * TILE, OF_Q = PAIRS * 128, THREADS = 128;
constexpr int BOX = PAGE < KEYS ? PAGE : KEYS, BOXES = KEYS / BOX * TILES * 2;
constexpr int SIDES = PAIRS > 8 ? 2 : 1;  // rows of a thread's, 8 apart, that can be real pairs
constexpr float LOW = -1e30f;
static_assert(BOXES <= 32, "a lane has a box");

// d [64, 64] += a [64, 16] @ b [16, 64], of bf16, with a in registers and columns of b next to each other.
__device__ __forceinline__ void multiply_values(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : PLACES_32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// A pair of the result.
__device__ __forceinline__ u32 gated_result(float a, float b, const bf16* gate) {
  u32 pair = bf16_pair(a, b), of = *(const u32*)gate;
  u32 factor = bf16_pair(1 / (1 + __expf(-low(of))), 1 / (1 + __expf(-high(of))));
  return bf16_pair(low(pair) * low(factor), high(pair) * high(factor));
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
attend_pairs(bf16* out, const bf16* q, const __grid_constant__ TensorMap cache, const int* slots, const int* q_starts,
             const int* seq_lens, const int* alive, const int* block_tables, float* partial, float* weights, int* arrived,
             const bf16* gates, int gate_stride, int table_width, int page_rows, float scale, int rows, int tokens, int heads) {
  extern __shared__ __align__(1024) unsigned char of_q[];
  unsigned char* ring = of_q + TILES * OF_Q;
  u64 *full = (u64*)(ring + STAGES * STAGE), *empty = full + STAGES;
  Row* of_rows = (Row*)(empty + STAGES);  // [ROWS]
  int* starts = (int*)(of_rows + ROWS);   // [ROWS + 1]
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    fetch_map(&cache);
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  line_up<THREADS + 32, KEYS>(of_rows, starts, rows, slots, q_starts, seq_lens, alive);
  // Its product with the number of programs fits an int: a cache of 2^23 blocks would have more than a GPU's memory in one layer.
  int line = starts[rows] * heads, programs = min((int)gridDim.x, line);  // those with a block or more
  int nth = blockIdx.x, begin = 0, end = 0;
  if (nth < programs) begin = nth * line / programs, end = (nth + 1) * line / programs;
  if (warp == THREADS / 32) {
    u64 policy = evict_first();
    int kind = lane / (BOXES / 2), tile = lane % TILES, box = lane / TILES % (KEYS / BOX);
    auto copy = [&](int from, int until, bool old, bool own) {
      for (int done = from; done < until;) {
        Part part = part_at(starts, rows, heads, begin + done, begin + until);
        Row of = of_rows[part.row];
        const int* table = block_tables + (size_t)of.slot * table_width;
        auto page_of = [&](int block) { return min(block * KEYS + box * BOX, of.length - 1) / PAGE; };
        int ahead = table[page_of(part.first)], row = (part.head + kind * heads) * PAGE;
        for (int block = part.first; block < part.last; block++, done++) {
          int page = ahead, stage = done % STAGES;
          bool fresh_page = page_of(block) >= (of.length - of.count) / PAGE;
          ahead = table[page_of(block + 1)];
          if (old) {
            barrier_wait(&empty[stage], (done / STAGES & 1) ^ 1);
            if (lane == 0) barrier_expect(&full[stage], STAGE);
            __syncwarp();
          }
          if (lane < BOXES && (fresh_page ? own : old))
            copy_tile(ring + stage * STAGE + (kind * TILES + tile) * TILE + box * BOX * 128, &cache, &full[stage],
                      page * page_rows + row + (block * KEYS + box * BOX) % PAGE, tile * 64, policy);
        }
      }
    };
    copy_blocks<STAGES>(copy, end - begin);
    asm volatile("griddepcontrol.launch_dependents;");  // all loads are under way
    return;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  size_t width = (size_t)heads * GROUP * D / 2;
#pragma unroll 1
  for (int row = nth; row < rows; row += gridDim.x)
    if (!of_rows[row].length)
#pragma unroll 1
      for (int i = threadIdx.x; i < of_rows[row].count * width; i += THREADS) ((u32*)out)[of_rows[row].token * width + i] = 0;
#pragma unroll 1
  for (size_t i = q_starts[rows] * width + nth * THREADS + threadIdx.x; i < tokens * width; i += gridDim.x * THREADS)
    ((u32*)out)[i] = 0;
  if (begin == end) return;
  int first = warp * 16 + lane / 4, column = lane % 4 * 2, done = 0;  // of this thread's pairs, and 8 behind it
  // Of a row's pair: the number of its head in q and out, and where its gate begins.
  auto place_of = [&](const Part& part, int pair) {
    return ((size_t)(of_rows[part.row].token + pair / GROUP) * heads + part.head) * GROUP + pair % GROUP;
  };
  auto gate_of = [&](const Part& part, int pair) {
    return gates + (size_t)(of_rows[part.row].token + pair / GROUP) * gate_stride + (part.head * GROUP + pair % GROUP) * 2 * D;
  };
  // The parts of the line, and then those of the first head and of the last that other programs share.
  for (int at = begin, last = 0; at < end || last < 2;) {
    Part part = part_at(starts, rows, heads, at < end ? at : last ? end - 1 : begin, end);
    Item item = item_of(starts, heads, part, line, programs);
    Row of = of_rows[part.row];
    int pairs = of.count * GROUP, before = of.length - of.count, shares = item.last - item.first + 1;
    int* counter = arrived + part.row * heads + part.head;
    if (at < end) {
      together<THREADS>();  // the queries of the last part were multiplied
      constexpr int CHUNKS = PAIRS * D / 8, SOME = 8 * THREADS;  // of 8 channels; those of which loads are under way at once
#pragma unroll 1
      for (int from = threadIdx.x; from < CHUNKS; from += SOME) {
        uint4 query[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          int chunk = min(from + i * THREADS, pairs * D / 8 - 1);
          if (i * THREADS < CHUNKS) query[i] = fresh(q + place_of(part, chunk / (D / 8)) * D + chunk % (D / 8) * 8);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          int pair = (from + i * THREADS) / (D / 8), chunk = from % (D / 8);
          if (pair < PAIRS) *(uint4*)(of_q + chunk / 8 * OF_Q + pair * 128 + (chunk % 8 ^ pair % 8) * 16) = query[i];
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      together<THREADS>();
      float top[2] = {LOW, LOW}, total[2] = {0, 0}, sum[TILES][32];
#pragma unroll
      for (int i = 0; i < TILES * 32; i++) sum[i / 32][i % 32] = 0;
      for (int block = part.first; block < part.last; block++, done++) {
        int stage = done % STAGES, key = block * KEYS, there = of.length - key;
        unsigned char *keys = ring + stage * STAGE, *values = keys + TILES * TILE;
        barrier_wait(&full[stage], done / STAGES & 1);
        float score[32];
        products_begin();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
          multiply(score, operand(shared_address(of_q) + i / 4 * OF_Q + i % 4 * 32),
                   operand(shared_address(keys) + i / 4 * TILE + i % 4 * 32), i);
        products_commit();
        if (there < KEYS) {  // what was never written may be NaN
#pragma unroll 1
          for (int i = threadIdx.x; i < (KEYS - there) * TILES * 8; i += THREADS)
            *(uint4*)(values + i / 8 % TILES * TILE + (there + i / 8 / TILES) * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          together<THREADS>();
        }
        products_wait<0>();
        results(score);
        u32 weight[16];
        if (warp * 16 < pairs) {
          if (key + KEYS > before + 1) {  // some are not seen
#pragma unroll
            for (int i = 0; i < 32; i++)
              if (key + i / 4 * 8 + column + i % 2 > before + (first + i / 2 % 2 * 8) / GROUP) score[i] = -__uint_as_float(0x7f800000);
          }
#pragma unroll
          for (int r = 0; r < SIDES; r++) {
            float most = LOW;
#pragma unroll
            for (int i = 0; i < 32; i += 4) most = fmaxf(most, fmaxf(score[i + 2 * r], score[i + 2 * r + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            float now = fmaxf(top[r], most * scale), decay = power_of(top[r] - now), all = 0;
#pragma unroll
            for (int i = 0; i < 32; i += 4)
#pragma unroll
              for (int j = i + 2 * r; j < i + 2 * r + 2; j++) score[j] = power_of(score[j] * scale - now), all += score[j];
            top[r] = now, total[r] = total[r] * decay + all;
#pragma unroll
            for (int i = 0; i < TILES * 32; i += 4) sum[i / 32][i % 32 + 2 * r] *= decay, sum[i / 32][i % 32 + 2 * r + 1] *= decay;
          }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) weight[i] = bf16_pair(score[2 * i], score[2 * i + 1]);
        products_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
          u32 of_keys[4] = {weight[4 * i], weight[4 * i + 1], weight[4 * i + 2], weight[4 * i + 3]};
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) multiply_values(sum[tile], of_keys, operand(shared_address(values) + tile * TILE + i * 2048));
        }
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) results(sum[tile]);
        together<THREADS>();
        if (threadIdx.x == 0) barrier_arrive(&empty[stage]);
      }
      float* to = partial + (size_t)(2 * nth + (nth == item.first)) * PAIRS * D;
      float* its = weights + (2 * nth + (nth == item.first)) * PAIRS * 2;
#pragma unroll
      for (int r = 0; r < SIDES; r++) {
        int pair = first + 8 * r;
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        if (pair >= pairs) continue;
        if (lane % 4 == 0) *(float2*)(its + pair * 2) = make_float2(top[r], total[r]);
#pragma unroll
        for (int i = 0; i < TILES * 32; i += 4)
          *(float2*)(to + pair * D + i * 2 + column) = make_float2(sum[i / 32][i % 32 + 2 * r], sum[i / 32][i % 32 + 2 * r + 1]);
      }
      at += part.last - part.first;
      together<THREADS>();
      if (shares > 1) {
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
        continue;
      }
    } else {
      bool again = last++ && item.at <= begin;
      if (shares == 1 || again) continue;
      if (threadIdx.x == 0)
        for (int there = 0; there < shares;) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
      together<THREADS>();
    }
    // Of many parts a thread merges every fourth.
    int size = of.count * GROUP * D / 4, mine = nth - item.first, stop = (mine + 1) * size / shares, every = shares < 8 ? 1 : 4;
#pragma unroll 1
    for (int base = mine * size / shares; base < stop; base += THREADS / every) {
      int i = base + threadIdx.x / every, pair = min(i, stop - 1) / (D / 4), column_of = min(i, stop - 1) % (D / 4) * 4;
      float most = LOW, all = 0;
      float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int c = item.first + threadIdx.x % every; c <= item.last; c += every) {
        int place = (2 * c + (c == item.first)) * PAIRS + pair;
        float2 of_part = __ldcg((const float2*)(weights + place * 2));
        float4 sums_of = __ldcg((const float4*)(partial + (size_t)place * D + column_of));
        float now = fmaxf(most, of_part.x), old = power_of(most - now), share = power_of(of_part.x - now);
        value.x = value.x * old + sums_of.x * share, value.y = value.y * old + sums_of.y * share;
        value.z = value.z * old + sums_of.z * share, value.w = value.w * old + sums_of.w * share;
        all = all * old + of_part.y * share, most = now;
      }
      for (int bit = 1; bit < every; bit *= 2) {
        float now = fmaxf(most, __shfl_xor_sync(~0u, most, bit)), old = power_of(most - now);
        float* own[] = {&all, &value.x, &value.y, &value.z, &value.w};
#pragma unroll
        for (int k = 0; k < 5; k++) *own[k] *= old, *own[k] += __shfl_xor_sync(~0u, *own[k], bit);
        most = now;
      }
      if (i >= stop || threadIdx.x % every) continue;
      const bf16* gate = gate_of(part, pair) + column_of;
      *(uint2*)(out + place_of(part, pair) * D + column_of) =
          make_uint2(gated_result(value.x / all, value.y / all, gate), gated_result(value.z / all, value.w / all, gate + 2));
    }
    together<THREADS>();
    if (threadIdx.x == 0 && shares > 1 && atomicAdd(counter, 1) == 2 * shares - 1) *counter = 0;
  }
}
