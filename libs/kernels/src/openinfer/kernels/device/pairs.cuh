// The tiles of few pairs an expert, for kernels whose programs have equal runs of all tiles. A chunk is at most TOKENS
// pairs of an expert; a tile is SETS rows of its weights for a chunk.

constexpr int RUN = (EXPERTS + 31) / 32;  // experts of a lane

// A tile: rows from `row` on, for the places from `begin` on of an expert that has them up to `end`.
struct Tile {
  int expert, begin, end, row;

  __device__ __forceinline__ void next(const int* starts, int N) {
    row += SETS;
    if (row < N) return;
    row = 0, begin += TOKENS;
    if (begin < end) return;
    do expert++;
    while (starts[expert + 1] == starts[expert]);
    begin = starts[expert], end = starts[expert + 1];
  }
};

// The program's first tile, and how many it has, from own_starts [EXPERTS + 2]: behind the last expert is one with a pair,
// where walks end. For all threads, which see own_starts; it and head [3] are shared.
__device__ __forceinline__ int first_tile(Tile& tile, const int* own_starts, int* head, int N) {
  int tiles = N / SETS, lane = threadIdx.x;
  if (lane < 32) {
    auto chunks_of = [&](int e) { return (own_starts[e + 1] - own_starts[e] + TOKENS - 1) / TOKENS; };
    int chunks = 0;
    for (int e = lane * RUN; e < min(lane * RUN + RUN, EXPERTS); e++) chunks += chunks_of(e);
    int after = sum_up_to(chunks, lane), all = __shfl_sync(~0u, after, 31), e = lane * RUN;
    int chunk = (int)((long long)all * tiles * blockIdx.x / gridDim.x / tiles) - (after - chunks);
    if (lane == 0) head[0] = all;
    if (chunk >= 0 && chunk < chunks) {
      for (; chunk >= chunks_of(e); e++) chunk -= chunks_of(e);
      head[1] = e, head[2] = own_starts[e] + chunk * TOKENS;
    }
  }
  __syncthreads();
  int first = (int)((long long)head[0] * tiles * blockIdx.x / gridDim.x);
  int count = (int)((long long)head[0] * tiles * (blockIdx.x + 1) / gridDim.x) - first;
  if (count) tile = {head[1], head[2], own_starts[head[1] + 1], first % tiles * SETS};
  return count;
}
