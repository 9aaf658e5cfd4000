// Tiles by bulk tensor copies, clusters and products of warpgroups (sm_90a), for kernels of CUDA C++.

struct __align__(64) TensorMap { unsigned char bytes[128]; };

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrive at the same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}"
               ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}

// The tile whose first element is at `row` and `column`.
__device__ __forceinline__ void copy_tile(void* to, const TensorMap* map, u64* barrier, int row, int column) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row) : "memory");
}

// The same into the blocks of `mask`, at the same place of their shared memory; each block's barrier is told.
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

#define PLACES_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d [64, 152] (+)= a [64, 16] @ b [152, 16]^T, of bf16; without `add` what was there is forgotten.
__device__ __forceinline__ void multiply_152(float (&d)[76], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %78, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n152k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, "
      "%71, %72, %73, %74, %75}, %76, %77, p, 1, 1, 0, 0;\n}"
      : PLACES_8(d, 0), PLACES_8(d, 8), PLACES_8(d, 16), PLACES_8(d, 24), PLACES_8(d, 32), PLACES_8(d, 40),
        PLACES_8(d, 48), PLACES_8(d, 56), PLACES_8(d, 64), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
      : "l"(a), "l"(b), "r"(add));
}
