// coded_product of packed_experts.py for FP4 weights and few pairs an expert, with the sort of pairs before it and the
// gate between both products: out is bf16, sums are float32.
//
// Each program sorts all pairs, of which there are at most MOST_PAIRS. Tiles are those of pairs.cuh, of 64 rows. A stage
// of the ring has 1,024 columns of a tile: four boxes of 256 with 128 bytes a row, swizzled, and the scales. A copying
// thread keeps STAGES of them filled, also while the others change to the next chunk, and before the kernel ahead has
// ended if that is the first product. Each of PARTS warpgroups multiplies one box of every stage. In turn they add up a
// tile's sums, in the order of the parts, so the bits are the same in every run. No other one waits for that: BUFFERS have
// the sums of as many tiles as a warpgroup can be ahead, since it reuses no stage before all have left it.
//
// The weight is the left operand, in registers. Its even columns come first in the operand, then the odd ones. So do those
// of x, whose codes lie in shared memory, in tiles of 128 columns. The tensor cores add up 32 columns, which have one
// scale of the weight; the rest is float32.
//
// FIRST: from tokens, x e4m3 [.., K] with factors uint8 [.., K / 128] (E8M0), to places. Else from places to pairs, of which
// a token has CHOSEN: x is the first product's out, bf16 [.., 2 K], and its gated product gets the pair's number of
// factors, float32, and goes through q8. weight [EXPERTS * N, K / 2], scales [EXPERTS * N, K / 32].

#include "gpu.cuh"
#include "tensor_cores.cuh"

constexpr int TOKENS = 8, SETS = 64, DEPTH = 1024, PARTS = 4, THREADS = PARTS * 128, BOX = SETS * 128;
constexpr int STAGE = PARTS * BOX + SETS * DEPTH / 32, X_TILE = TOKENS * 128, PITCH = SETS + 4, STEPS = K / DEPTH;
constexpr int PARTIAL = TOKENS * PITCH, SUMS = BUFFERS * PARTS * PARTIAL;
static_assert(STEPS * DEPTH == K, "a row has whole stages");
static_assert(BUFFERS * STEPS > STAGES && BUFFERS < 15, "sums are read before others take their place");
static_assert(SUMS >= MOST_PAIRS, "pairs are sorted where sums lie later");

#include "pairs.cuh"

// Fill own_starts, which are zeros, head (find_tiles), and order with the pairs by expert, which those that multiply see
// behind their next barrier; found is room for a number a pair. For all threads.
__device__ __forceinline__ void sort_pairs(int* own_starts, int* head, unsigned short* order, int* found, const int* expert_ids,
                                           int pairs, int N) {
  for (int i = threadIdx.x; i < pairs; i += THREADS + 128) found[i] = __ldcg(expert_ids + i);
  if (pairs > 32) __syncthreads();
  int lane = threadIdx.x;
  if (lane < 32) {
    __syncwarp();
    for (int i = lane; i < (pairs + 31) / 32 * 32; i += 32) {
      int e = i < pairs ? found[i] : -1, before = own_starts[max(e, 0)];
      u32 same = __match_any_sync(~0u, e), ahead = same & (1u << lane) - 1;
      __syncwarp();  // all have read
      if (e >= 0) found[i] = e << 16 | before + __popc(ahead);
      if (e >= 0 && !ahead) own_starts[e] = before + __popc(same);
      __syncwarp();
    }
    int sum = 0, place;
    for (int e = lane * RUN; e < min(lane * RUN + RUN, EXPERTS); e++) sum += own_starts[e];
    place = sum_up_to(sum, lane) - sum;
    for (int e = lane * RUN; e < min(lane * RUN + RUN, EXPERTS); e++) {
      int next = place + own_starts[e];
      own_starts[e] = place, place = next;
    }
    if (lane == 31) own_starts[EXPERTS] = place, own_starts[EXPERTS + 1] = place + 1;
    __syncwarp();
    find_tiles(own_starts, head, N);
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) return;
  for (int i = threadIdx.x; i < pairs; i += THREADS)
    if (found[i] >= 0) order[own_starts[found[i] >> 16] + (found[i] & 0xffff)] = i;
}

__device__ __forceinline__ float clamped_product(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  float small = exp2f(fabsf(gate) * -1.4426950408889634f);  // never overflows
  return gate * (gate < 0 ? small : 1.0f) / (1.0f + small) * fminf(fmaxf(up, -limit), limit);
}

// Eight columns of a place's hidden values through q8: their codes, and the scale of their 128, which 16 lanes share.
__device__ __forceinline__ uint2 hidden_codes(const bf16* gates, float factor, float limit, float& scale) {
  uint4 g = fresh(gates), u = fresh(gates + K);
  u32 gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
  float value[8], largest = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    value[2 * j] = rounded(clamped_product(low(gate[j]), low(up[j]), limit) * factor);
    value[2 * j + 1] = rounded(clamped_product(high(gate[j]), high(up[j]), limit) * factor);
    largest = fmaxf(largest, fmaxf(fabsf(value[2 * j]), fabsf(value[2 * j + 1])));
  }
#pragma unroll
  for (int bit = 8; bit; bit /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, bit));
  u32 exponent = exponent_of(largest);
  float shrink = __uint_as_float(254 - exponent << 23);
  scale = __uint_as_float(exponent << 23);
#pragma unroll
  for (int j = 0; j < 8; j++) value[j] *= shrink;
  return make_uint2(codes_of(value[0], value[1]) | (u32)codes_of(value[2], value[3]) << 16,
                    codes_of(value[4], value[5]) | (u32)codes_of(value[6], value[7]) << 16);
}

// A word's even and odd numbers as e4m3, times 2^-6: the exponents have other biases. A shift to the left is a product,
// which has its own part of the hardware.
__device__ __forceinline__ void unpack(u32& even, u32& odd, u32 word) {
  even = word * 16 & 0x80808080u | word * 4 & 0x1c1c1c1cu;
  odd = word & 0x80808080u | word >> 2 & 0x1c1c1c1cu;
}

// The i-th of eight scales, of E8M0.
__device__ __forceinline__ float scale_of(uint2 bytes, int i) {
  u32 word = i < 4 ? bytes.x : bytes.y;
  return __uint_as_float((i % 4 == 3 ? word >> 1 : word << (23 - i % 4 * 8)) & 0x7f800000u);
}

// d [64, 8] = a [64, 32] @ b [8, 32]^T of e4m3.
__device__ __forceinline__ void multiply_codes(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1;\n}"
               : PLACES_4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(0));
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
experts_fp4(bf16* out, const void* x, const void* factors, const __grid_constant__ TensorMap weight,
            const __grid_constant__ TensorMap scales, const int* expert_ids, int pairs, int N, float limit) {
  extern __shared__ __align__(1024) unsigned char ring[];
  unsigned char* held = ring + STAGES * STAGE;       // x of the chunk: K / 128 tiles
  float *sums = (float*)(held + K * TOKENS), *held_scales = sums + SUMS;  // [BUFFERS, PARTS, TOKENS, PITCH], [K / 128, TOKENS]
  u64 *full = (u64*)(held_scales + K / 128 * TOKENS), *empty = full + STAGES;
  int *own_starts = (int*)(empty + STAGES), *head = own_starts + EXPERTS + 2;
  unsigned short* order = (unsigned short*)(head + 4);  // [MOST_PAIRS]
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], PARTS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;");
    fetch_map(&weight), fetch_map(&scales);
  }
  for (int i = threadIdx.x; i < EXPERTS; i += THREADS + 128) own_starts[i] = 0;
  __syncthreads();
  // The second product waits below: the kernel ahead of it is the first one, which began after expert_ids were written.
  if (FIRST) asm volatile("griddepcontrol.wait;" ::: "memory");
  sort_pairs(own_starts, head, order, (int*)sums, expert_ids, pairs, N);
  Tile tile;
  int count = own_tile(tile, own_starts, head);
  if (count == 0) {
    if (!FIRST) asm volatile("griddepcontrol.wait;" ::: "memory");
    return;
  }
  if (warp >= PARTS * 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == THREADS) {
      u64 policy = evict_first();
      for (int i = 0, turn = 0; i < count; i++, tile.next(own_starts, N))
#pragma unroll 1
        for (int step = 0; step < STEPS; step++, turn++) {
          int stage = turn % STAGES, row = tile.expert * N + tile.row;
          unsigned char* to = ring + stage * STAGE;
          wait_for_landing<STAGES>(full, turn - UNDER_WAY);
          barrier_wait(&empty[stage], (turn / STAGES & 1) ^ 1);
          barrier_expect(&full[stage], STAGE);
#pragma unroll
          for (int part = 0; part < PARTS; part++)
            copy_tile(to + part * BOX, &weight, &full[stage], row, step * (DEPTH / 2) + part * 128, policy);
          copy_tile(to + PARTS * BOX, &scales, &full[stage], row, step * (DEPTH / 32), policy);
        }
      asm volatile("griddepcontrol.launch_dependents;");  // all loads are under way
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  if (!FIRST) asm volatile("griddepcontrol.wait;" ::: "memory");
  int part = warp / 4, row = warp % 4 * 16 + lane / 4, quad = lane % 4, held_of = -1, stage = 0, phase = 0;
  int at[8];  // of a lane's word of each 32 columns of a box
#pragma unroll
  for (int g = 0; g < 8; g++) at[g] = part * BOX + row * 128 + (g ^ lane / 4) * 16 + quad * 4;
  for (int i = 0; i < count; i++, tile.next(own_starts, N)) {
    int tokens = min(TOKENS, tile.end - tile.begin);
    if (held_of != tile.begin) {
      held_of = tile.begin;
      asm volatile("bar.sync 15, %0;" ::"n"(THREADS) : "memory");  // nobody reads the last chunk's any more
      for (int item = threadIdx.x; item < K / 8 * tokens; item += THREADS) {
        int token = item / (K / 8), column = item % (K / 8) * 8, block = column / 128;
        int place = tile.begin + token, pair = order[place];
        float scale;
        uint2 codes;
        if (FIRST) {
          codes = fresh_pair((const unsigned char*)x + (size_t)(pair / CHOSEN) * K + column);
          int exponent = __ldcg((const unsigned char*)factors + (size_t)(pair / CHOSEN) * (K / 128) + block);
          scale = __uint_as_float(exponent ? exponent << 23 : 0x400000);
        } else {
          codes = hidden_codes((const bf16*)x + (size_t)place * 2 * K + column, __ldcg((const float*)factors + pair), limit, scale);
        }
        u32* to = (u32*)(held + block * X_TILE + token * 128) + column / 8 % 4;
        to[(column / 32 % 4 * 2 ^ token % 8) * 4] = __byte_perm(codes.x, codes.y, 0x6420);
        to[(column / 32 % 4 * 2 + 1 ^ token % 8) * 4] = __byte_perm(codes.x, codes.y, 0x7531);
        if (column % 128 == 0) held_scales[block * TOKENS + token] = scale;
      }
      asm volatile("fence.proxy.async.shared::cta;\nbar.sync 15, %0;" ::"n"(THREADS) : "memory");
    }
    float total[TOKENS / 2];
#pragma unroll
    for (int j = 0; j < TOKENS / 2; j++) total[j] = 0;
    u64 of_x = operand(shared_address(held) + part * 2 * X_TILE);
    const float* of_scales = held_scales + part * 2 * TOKENS + quad * 2;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
      const unsigned char* here = ring + stage * STAGE;
      barrier_wait(&full[stage], phase);
      uint2 above = *(const uint2*)(here + PARTS * BOX + row * (DEPTH / 32) + part * 8);
      uint2 below = *(const uint2*)(here + PARTS * BOX + (row + 8) * (DEPTH / 32) + part * 8);
      float sum[8][TOKENS / 2];
#pragma unroll
      for (int b = 0; b < 8; b += 4) {
        u32 a[4][4];
#pragma unroll
        for (int g = 0; g < 4; g++) {
          unpack(a[g][0], a[g][2], *(const u32*)(here + at[b + g]));
          unpack(a[g][1], a[g][3], *(const u32*)(here + at[b + g] + 8 * 128));
        }
        products_begin();
#pragma unroll
        for (int g = 0; g < 4; g++) multiply_codes(sum[b + g], a[g], of_x + (b / 4 * X_TILE + g * 32) / 16);
        products_commit();
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      products_wait<0>();
#pragma unroll
      for (int b = 0; b < 8; b += 4) {
        float scaled[TOKENS / 2];
#pragma unroll
        for (int g = b; g < b + 4; g++) {
          results(sum[g]);
          float near = scale_of(above, g), far = scale_of(below, g);
#pragma unroll
          for (int j = 0; j < TOKENS / 2; j++) {
            float value = sum[g][j] * (j / 2 % 2 ? far : near);
            scaled[j] = g == b ? value : scaled[j] + value;
          }
        }
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++) total[j] += scaled[j] * of_scales[b / 4 * TOKENS + j / 4 * 8 + j % 2];
      }
      of_x += DEPTH / 128 * X_TILE / 16, of_scales += DEPTH / 128 * TOKENS;
    }
    int buffer = i % BUFFERS;
    float* mine = sums + (buffer * PARTS + part) * PARTIAL + quad * 2 * PITCH + row;
#pragma unroll
    for (int j = 0; j < TOKENS / 2; j++) mine[(j / 4 * 8 + j % 2) * PITCH + j / 2 % 2 * 8] = total[j];
    if (i % PARTS != part) {
      asm volatile("bar.arrive %0, %1;" ::"r"(1 + buffer), "n"(THREADS) : "memory");
      continue;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + buffer), "n"(THREADS) : "memory");
    const float* parts = sums + buffer * PARTS * PARTIAL;
    for (int item = threadIdx.x % 128; item < SETS / 2 * tokens; item += 128) {
      int r = item % (SETS / 2) * 2, token = item / (SETS / 2), place = tile.begin + token;
      float2 value = make_float2(0, 0);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        float2 more = *(const float2*)(parts + p * PARTIAL + token * PITCH + r);
        value.x += more.x, value.y += more.y;
      }
      *(u32*)(out + (size_t)(FIRST ? place : order[place]) * N + tile.row + r) = bf16_pair(value.x * 64, value.y * 64);
    }
  }
}
