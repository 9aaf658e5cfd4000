// Rows of a step of attention, and their keys as one line of blocks: those of all rows and key heads, one after the other. So
// each program has an equal share, whatever the lengths are. A row's head that several programs share is merged.

struct Row {  // its first token, their count, and keys with theirs: 0 where it is not to be attended to
  int slot, token, count, length;
};

struct Part {  // a run of blocks of one row's head
  int row, head, first, last, blocks;
};

struct Item {  // a row's head: where it begins in the line, and the programs that have a part of it
  int at, first, last;
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

__device__ __forceinline__ Item item_of(const int* starts, int heads, const Part& part, int line, int programs) {
  int at = starts[part.row] * heads + part.head * part.blocks;
  return {at, ((at + 1) * programs - 1) / line, ((at + part.blocks) * programs - 1) / line};
}

// Fill of_rows [rows], and starts [rows + 1]: the blocks of SIZE keys of a head in the rows before each row.
template <int THREADS, int SIZE>
__device__ __forceinline__ void line_up(Row* of_rows, int* starts, int rows, const int* slots, const int* q_starts,
                                        const int* seq_lens, const int* alive) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = threadIdx.x; row < rows; row += THREADS) {
    int slot = slots[row], token = q_starts[row], count = q_starts[row + 1] - token, length = 0;
    if (count && alive[slot]) length = seq_lens[slot] + count;
    of_rows[row] = {slot, token, count, length};
    starts[row + 1] = (length + SIZE - 1) / SIZE;
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < rows; base += 32) {
      int sum = sum_up_to(base + lane < rows ? starts[base + lane + 1] : 0, lane);
      if (base + lane < rows) starts[base + lane + 1] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) starts[0] = 0;
  }
  __syncthreads();
}

// Copy a program's blocks, by copy(from, until, old, own): of those from `from` on the keys of other steps, which are there
// before the kernel ahead has ended, those of this step, or both. The first RING blocks have room at once.
template <int RING, class Copy>
__device__ __forceinline__ void copy_blocks(const Copy& copy, int count) {
  int ready = min(RING, count);
  copy(0, ready, true, false);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  copy(0, ready, false, true);
  copy(ready, count, true, true);
}
