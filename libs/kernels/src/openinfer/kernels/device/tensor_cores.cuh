// Tiles by bulk tensor copies, clusters and products of warpgroups (sm_90a), for kernels of CUDA C++.

struct __align__(64) TensorMap { unsigned char bytes[128]; };

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where block `rank` of the cluster has what lies at `address` in this one.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// All threads of the cluster meet, and no memory is ordered. That would take a fence for the GPU, which waits long while
// many copies are under way.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// Wait until the first phase of a barrier ends, to which other blocks of the cluster arrive.
__device__ __forceinline__ void wait_for_cluster(u64* barrier) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@p bra DONE;\n"
      "bra AGAIN;\nDONE:\n}" ::"r"(shared_address(barrier)) : "memory");
}

// Of the first COUNT threads of BLOCKS blocks, a cluster: what they wrote to shared memory is there for all of them. One
// thread tells each block, by `barrier`, which is of BLOCKS arrivals and for one use.
template <int BLOCKS, int COUNT>
__device__ __forceinline__ void share_sums(u64* barrier) {
  together<COUNT>();
  if (BLOCKS == 1) return;
  if (threadIdx.x < BLOCKS)
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                 ::"r"(address_in(shared_address(barrier), threadIdx.x)) : "memory");
  wait_for_cluster(barrier);
}

constexpr int MOST_SENT = 16;  // tokens whose sums are sent: those of more take stages from the ring

// Numbers for another block, whose barrier counts their bytes. So they need no fence.
__device__ __forceinline__ void send(u32 to, float a, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               ::"r"(to), "f"(a), "r"(barrier) : "memory");
}

__device__ __forceinline__ void send(u32 to, float a, float b, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               ::"r"(to), "f"(a), "f"(b), "r"(barrier) : "memory");
}

__device__ __forceinline__ void send(u32 to, uint4 v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}

// Arrive at the same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(shared_address(barrier), rank)) : "memory");
}

// Four numbers of this block's shared memory.
__device__ __forceinline__ float4 of_shared(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

// Four numbers at the same place of another block's.
__device__ __forceinline__ float4 of_block(u32 address, u32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address_in(address, rank)) : "memory");
  return v;
}

// The sums over K of four neighbouring columns, from PIECES parts of each of BLOCKS blocks, in their order. `at`: their
// place in a block's first part, and BYTES further in the next one. HERE: all parts were sent to this block.
template <bool HERE, int BLOCKS, int PIECES, int BYTES>
__device__ __forceinline__ float4 total(u32 at) {
  float4 found[BLOCKS * PIECES], sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < BLOCKS * PIECES; i++)
    found[i] = HERE ? of_shared(at + i * BYTES) : of_block(at + i % PIECES * BYTES, i / PIECES);
#pragma unroll
  for (int i = 0; i < BLOCKS * PIECES; i++) {
    sum.x += found[i].x, sum.y += found[i].y;
    sum.z += found[i].z, sum.w += found[i].w;
  }
  return sum;
}

// Bring the map near, so that the first copy by it does not wait for that.
__device__ __forceinline__ void fetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The tile whose first element is at `row` and `column`.
__device__ __forceinline__ void copy_tile(void* to, const TensorMap* map, u64* barrier, int row, int column) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row) : "memory");
}

// The same with a policy of the second-level cache.
__device__ __forceinline__ void copy_tile(void* to, const TensorMap* map, u64* barrier, int row, int column, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "l"(policy) : "memory");
}

// The same of a tensor of four dimensions, whose tile begins at `row` of the second one.
__device__ __forceinline__ void copy_tiles(void* to, const TensorMap* map, u64* barrier, int row, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %3, %3}], [%2], %5;"
      ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(row), "l"(policy) : "memory");
}

// A tile into the blocks of `mask`, at the same place of their shared memory; each block's barrier is told.
__device__ __forceinline__ void copy_tile_to(unsigned short mask, void* to, const TensorMap* map, u64* barrier, int row,
                                             int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(mask) : "memory");
}

__device__ __forceinline__ void store_tile(const TensorMap* map, const void* from, int row, int column) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;"
               ::"l"(map), "r"(shared_address(from)), "r"(column), "r"(row) : "memory");
}

// The operand of a product: rows of 128 swizzled bytes at a multiple of 1,024; `at` may lie 32, 64 or 96 bytes further.
__device__ __forceinline__ u64 operand(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// What follows reads the results after the wait before, not ahead of it.
template <int COUNT>
__device__ __forceinline__ void results(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// multiply: d [64, N] (+)= a [64, 16] @ b [N, 16]^T, of bf16; without `add` what was there is forgotten. N is a multiple of
// 8 from 40 to 160, or 8. multiply_codes: the same of 32 numbers of e4m3. PLACES and NUMBERS are the N / 2 registers of d; A, B
// and ADDS the numbers of what follows.
#define PRODUCT_OF(NAME, KINDS, MAJOR, N, A, B, ADDS, NUMBERS, ...)                                                        \
  __device__ __forceinline__ void NAME(float (&d)[N / 2], u64 a, u64 b, int add) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N KINDS " {" NUMBERS "}, %" #A ", %" #B ", p, 1, 1" MAJOR ";\n}"    \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                                               \
  }
#define PRODUCT(N, A, B, ADDS, PLACES, NUMBERS)                                               \
  PRODUCT_OF(multiply, "k16.f32.bf16.bf16", ", 0, 0", N, A, B, ADDS, NUMBERS, PLACES)        \
  PRODUCT_OF(multiply_codes, "k32.f32.e4m3.e4m3", "", N, A, B, ADDS, NUMBERS, PLACES)
#define PLACES_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
PRODUCT(8, 4, 5, 6, PLACES_4(0), "%0, %1, %2, %3")
#define PLACES_20 PLACES_4(0), PLACES_4(4), PLACES_4(8), PLACES_4(12), PLACES_4(16)
#define NUMBERS_20 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
PRODUCT(40, 20, 21, 22, PLACES_20, NUMBERS_20)
#define PLACES_24 PLACES_20, PLACES_4(20)
#define NUMBERS_24 NUMBERS_20 ", %20, %21, %22, %23"
PRODUCT(48, 24, 25, 26, PLACES_24, NUMBERS_24)
#define PLACES_28 PLACES_24, PLACES_4(24)
#define NUMBERS_28 NUMBERS_24 ", %24, %25, %26, %27"
PRODUCT(56, 28, 29, 30, PLACES_28, NUMBERS_28)
#define PLACES_32 PLACES_28, PLACES_4(28)
#define NUMBERS_32 NUMBERS_28 ", %28, %29, %30, %31"
PRODUCT(64, 32, 33, 34, PLACES_32, NUMBERS_32)
#define PLACES_36 PLACES_32, PLACES_4(32)
#define NUMBERS_36 NUMBERS_32 ", %32, %33, %34, %35"
PRODUCT(72, 36, 37, 38, PLACES_36, NUMBERS_36)
#define PLACES_40 PLACES_36, PLACES_4(36)
#define NUMBERS_40 NUMBERS_36 ", %36, %37, %38, %39"
PRODUCT(80, 40, 41, 42, PLACES_40, NUMBERS_40)
#define PLACES_44 PLACES_40, PLACES_4(40)
#define NUMBERS_44 NUMBERS_40 ", %40, %41, %42, %43"
PRODUCT(88, 44, 45, 46, PLACES_44, NUMBERS_44)
#define PLACES_48 PLACES_44, PLACES_4(44)
#define NUMBERS_48 NUMBERS_44 ", %44, %45, %46, %47"
PRODUCT(96, 48, 49, 50, PLACES_48, NUMBERS_48)
#define PLACES_52 PLACES_48, PLACES_4(48)
#define NUMBERS_52 NUMBERS_48 ", %48, %49, %50, %51"
PRODUCT(104, 52, 53, 54, PLACES_52, NUMBERS_52)
#define PLACES_56 PLACES_52, PLACES_4(52)
#define NUMBERS_56 NUMBERS_52 ", %52, %53, %54, %55"
PRODUCT(112, 56, 57, 58, PLACES_56, NUMBERS_56)
#define PLACES_60 PLACES_56, PLACES_4(56)
#define NUMBERS_60 NUMBERS_56 ", %56, %57, %58, %59"
PRODUCT(120, 60, 61, 62, PLACES_60, NUMBERS_60)
#define PLACES_64 PLACES_60, PLACES_4(60)
#define NUMBERS_64 NUMBERS_60 ", %60, %61, %62, %63"
PRODUCT(128, 64, 65, 66, PLACES_64, NUMBERS_64)
#define PLACES_68 PLACES_64, PLACES_4(64)
#define NUMBERS_68 NUMBERS_64 ", %64, %65, %66, %67"
PRODUCT(136, 68, 69, 70, PLACES_68, NUMBERS_68)
#define PLACES_72 PLACES_68, PLACES_4(68)
#define NUMBERS_72 NUMBERS_68 ", %68, %69, %70, %71"
PRODUCT(144, 72, 73, 74, PLACES_72, NUMBERS_72)
#define PLACES_76 PLACES_72, PLACES_4(72)
#define NUMBERS_76 NUMBERS_72 ", %72, %73, %74, %75"
PRODUCT(152, 76, 77, 78, PLACES_76, NUMBERS_76)
#define PLACES_80 PLACES_76, PLACES_4(76)
#define NUMBERS_80 NUMBERS_76 ", %76, %77, %78, %79"
PRODUCT(160, 80, 81, 82, PLACES_80, NUMBERS_80)
