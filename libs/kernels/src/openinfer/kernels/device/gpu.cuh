// Barriers in shared memory, copies and numbers, for kernels of CUDA C++.

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

__device__ __forceinline__ void barrier_arrive(u64* barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// The first COUNT threads of a block meet.
template <int COUNT>
__device__ __forceinline__ void together() {
  asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
      ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Wait until the copies of the turn-th stage have landed. A copying warp that waits for those UNDER_WAY stages before has no
// more of them on their way. So what the block reads of the kernel ahead does not queue up behind a whole ring.
template <int RING>
__device__ __forceinline__ void wait_for_landing(u64* full, int turn) {
  if (turn >= 0) barrier_wait(&full[turn % RING], turn / RING & 1);
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

__device__ __forceinline__ uint2 fresh_pair(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ bf16 to_bf16(float value) {
  bf16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two numbers as a pair of bf16, the first one low.
__device__ __forceinline__ u32 bf16_pair(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ float rounded(float value) { return low(to_bf16(value)); }

__device__ __forceinline__ float gated(float gate, float up) {
  gate = rounded(gate);
  float small = exp2f(fabsf(gate) * -1.4426950408889634f);  // never overflows
  return rounded(gate * (gate < 0 ? small : 1.0f) / (1.0f + small)) * rounded(up);
}

// Two gated numbers, of factors rounded to bf16: of the gate what silu makes of it, too, if ROUNDED. A gate below -40 has no part in the result; it would overflow here.
template <bool ROUNDED>
__device__ __forceinline__ u32 gated_pair(float gate_a, float gate_b, float up_a, float up_b) {
  u32 gate = bf16_pair(gate_a, gate_b), up = bf16_pair(up_a, up_b);
  float a = low(gate), b = high(gate);
  a = a < -40.0f ? -40.0f : a, b = b < -40.0f ? -40.0f : b;  // NaN stays, which fmaxf would hide
  float of_a = 1.0f + __expf(-a), of_b = 1.0f + __expf(-b), both;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(both) : "f"(of_a * of_b));  // one reciprocal for two divisions
  a *= both * of_b, b *= both * of_a;
  if (ROUNDED) gate = bf16_pair(a, b), a = low(gate), b = high(gate);
  return bf16_pair(a * low(up), b * high(up));
}

// The policy of weights: no step reads one twice.
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Two numbers rounded to e4m3, within its range, the first one low.
__device__ __forceinline__ unsigned short codes_of(float a, float b) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
  return codes;
}

// Two numbers of e4m3 as a pair of f16.
__device__ __forceinline__ u32 halves(unsigned short codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}

__device__ __forceinline__ u32 f16_pair(float a, float b) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// A byte of scales, and 2^(byte - 127) for one below 254.
__device__ __forceinline__ u32 byte_of(const unsigned char* p) { return *p; }
__device__ __forceinline__ float power(u32 byte) { return __uint_as_float(byte ? byte << 23 : 0x400000); }

// The byte of the scale of q8 for numbers of which this is the largest: 2^ceil(log2(largest / 448)).
__device__ __forceinline__ u32 exponent_of(float largest) {
  return (__float_as_uint(fmaxf(largest, 1e-4f)) + 0x1fffff >> 23) - 8;
}

// Weights of keys in f16 go up to 2^10, because it has more numbers below that than below 1.
constexpr float RAISED = 10, LOWERED = 0x1p-10f;

// The numbers of two codes.
__device__ __forceinline__ float2 numbers_of(unsigned short codes) {
  float2 v;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(v.x), "=f"(v.y) : "r"(halves(codes)));
  return v;
}

// Four numbers of e4m3 as two pairs of f16.
__device__ __forceinline__ void halves_of(u32& first, u32& second, u32 codes) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(first), "=r"(second) : "r"(codes));
}

// d[16, 8] += a[16, 16] @ b[16, 8], of f16.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of bf16.
__device__ __forceinline__ void multiply_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The product of two pairs of bf16.
__device__ __forceinline__ u32 multiplied(u32 a, u32 b) {
  u32 pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// The second and fourth of four codes of e4m3 as bf16. Their exponents have another bias, for which 2^120 makes up.
__device__ __forceinline__ u32 wide(u32 codes) {
  return multiplied(codes & 0x80008000u | codes >> 4 & 0x07f007f0u, 0x7b807b80u);
}

__device__ __forceinline__ float power_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The sum over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int value, int lane) {
  for (int bit = 1; bit < 32; bit *= 2) {
    int other = __shfl_up_sync(~0u, value, bit);
    if (lane >= bit) value += other;
  }
  return value;
}

// An 8 x 8 matrix of pairs, lane / 4 the row, transposed over the warp.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

// The largest scores of two columns of such a matrix over its rows.
__device__ __forceinline__ void largest_of_rows(float (&most)[2]) {
#pragma unroll
  for (int bit = 4; bit < 32; bit *= 2) {
    most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], bit));
    most[1] = fmaxf(most[1], __shfl_xor_sync(~0u, most[1], bit));
  }
}

// The sums of two columns over the rows.
__device__ __forceinline__ void sum_rows(float (&total)[2]) {
#pragma unroll
  for (int bit = 4; bit < 32; bit *= 2) {
    total[0] += __shfl_xor_sync(~0u, total[0], bit);
    total[1] += __shfl_xor_sync(~0u, total[1], bit);
  }
}

// The lowest four bits of both halves as 128 + code in bf16. Compilers make two instructions of it.
__device__ __forceinline__ u32 raised(u32 pair) {
  u32 numbers;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(pair), "r"(0x000f000f), "r"(0x43004300));
  return numbers;
}

// The i-th of the four pairs of a word with FP4 (openinfer.kernels.formats.fp4), its bits where bf16 has them.
__device__ __forceinline__ u32 placed(u32 word, int i) {
  return (i < 3 ? word << (6 - 3 * i) : (word >> 10 & 0x001b001bu) * 0x1084u) & 0x81c081c0u;
}

// A byte of FP4's scales as a pair of bf16.
__device__ __forceinline__ u32 scale_pair(u32 byte) { return byte * 0x00100010u + 0x6f806f80u; }

// 32 codes of four bits, which are neighbours in a row, as 16 pairs of bf16: of INT4 128 + code, of FP4 the values by `word`'s
// two scales. Pair i has columns i % 2 * 16 + i / 4 * 4 + i % 4 / 2 and the next but one.
template <bool SCALED>
__device__ __forceinline__ void unpack_four_bits(u32 (&pair)[16], uint4 codes, u32 word) {
  u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, of_half[2] = {scale_pair(word & 255), scale_pair(word >> 8)};
#pragma unroll
  for (int i = 0; i < 16; i++)
    pair[i] = SCALED ? multiplied(placed(words[i / 4], i % 4), of_half[i % 2]) : raised(words[i / 4] >> 4 * (i % 4));
}

// The row of a tile of 16 that a lane has, and the one 8 further: those that are read at once have different banks.
__device__ __forceinline__ int own_row_of(int lane) { return lane / 4 % 2 * 4 + lane / 8; }

// sum += 16 rows of codes, which have 128 swizzled bytes each, times a group of 128 columns of 8 tokens: the first or second group
// of these rows. word: this lane's of both its rows, of FP4 two scales; held: its columns of x in the order of unpack_four_bits,
// two pairs for each 16; of_held: the sums of tokens 2 * (lane % 4) and the next. Of FP4 the row's factor is left out.
template <bool SCALED>
__device__ __forceinline__ void add_four_bits(float (&sum)[4], const unsigned char* rows, int second, const u32 (&word)[2],
                                              const u32 (&held)[16], float2 of_held, int lane) {
  int row = own_row_of(lane);
  u32 a[2][16];
#pragma unroll
  for (int r = 0; r < 2; r++)
    unpack_four_bits<SCALED>(a[r], *(const uint4*)(rows + (row + r * 8) * 128 + (second * 4 + lane % 4 ^ row) * 16), word[r]);
  float part[2][4] = {};
#pragma unroll
  for (int s = 0; s < 8; s++)
    multiply_bf16(SCALED ? sum : part[s % 2], a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1], held[2 * s], held[2 * s + 1]);
#pragma unroll
  for (int r = 0; !SCALED && r < 4; r++) {
    float of = r % 2 ? of_held.y : of_held.x, zero = 128 + (word[r / 2] & 15);
    sum[r] += (part[0][r] + part[1][r] - zero * of) * __uint_as_float(word[r / 2] & ~15u);
  }
}
