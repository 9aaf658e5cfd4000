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

// For the first warp, which sees own_starts [EXPERTS + 2]: where the program's tiles begin, and how many it has, to head
// [4], as `own_tile` reads it. Behind the last expert is one with a pair, where walks end.
__device__ __forceinline__ void find_tiles(const int* own_starts, int* head, int N) {
  u32 tiles = N / SETS;
  int lane = threadIdx.x, e = lane * RUN, chunks = 0;
  auto chunks_of = [&](int e) { return (own_starts[e + 1] - own_starts[e] + TOKENS - 1) / TOKENS; };
  for (int i = e; i < min(e + RUN, EXPERTS); i++) chunks += chunks_of(i);
  int after = sum_up_to(chunks, lane);
  u32 all = __shfl_sync(~0u, after, 31) * tiles, first = all * blockIdx.x / gridDim.x;
  int chunk = (int)(first / tiles) - (after - chunks);
  if (lane == 0) head[0] = all * (blockIdx.x + 1) / gridDim.x - first, head[1] = first % tiles * SETS;
  if (chunk >= 0 && chunk < chunks) {
    for (; chunk >= chunks_of(e); e++) chunk -= chunks_of(e);
    head[2] = e, head[3] = own_starts[e] + chunk * TOKENS;
  }
}

// The program's first tile, and how many it has. own_starts and head are shared, and all threads see them.
__device__ __forceinline__ int own_tile(Tile& tile, const int* own_starts, const int* head) {
  if (head[0]) tile = {head[2], head[3], own_starts[head[2] + 1], head[1]};
  return head[0];
}
