// Which part of a call a thread block of the wide engine runs, and which cell each of its threads.
#pragma once
#include "../fma/tile.cuh"
#include "plan.h"

namespace flashcell::cuda {

// Thread blocks are numbered [group][head][member]. A group runs a tile of sequences of a head, and
// a member computes some of the head's units.
struct WideBlock {
  int rank, head, index;  // the member's number, the head, and the number of the group
  int first_unit, units;  // of this member
  int64_t first;          // sequence
  int sequence, unit;     // of the cell that the thread runs in every pass
  bool runs;              // whether it runs one

  DEVICE WideBlock(const SequenceParams& p, const wide::Memory& m, int first_head) {
    rank = blockIdx.x % m.members;
    head = first_head + int(blockIdx.x / m.members) % m.heads;
    index = int(blockIdx.x / m.members) / m.heads;
    first_unit = rank * m.units, units = min(m.units, int(p.D) - first_unit);
    first = int64_t(index) * m.tile;
    sequence = int(threadIdx.x) / m.units, unit = int(threadIdx.x) % m.units;
    runs = sequence < m.pass && unit < units;
  }
  // Of the tile.
  DEVICE int sequences(const SequenceParams& p, const wide::Memory& m) const {
    return int(min(p.S - first, int64_t(m.tile)));
  }
};

// Copies what is held of the rows of a product to shared memory; element(row, i) reads global
// memory. Neighbouring threads take neighbouring elements of a row, or, with kAcross, of
// neighbouring rows.
template <bool kAcross, typename Element>
DEVICE void load_wide_weights(float* to, const wide::Memory& m, Element element) {
  const int rows = m.product.rows, count = rows * m.held;
#pragma unroll 8
  for (int n = threadIdx.x; n < count; n += wide::kThreads) {
    const int row = kAcross ? n % rows : n / m.held;
    const int i = kAcross ? n / rows : n % m.held;
    to[row * m.held + i] = element(row, i);
  }
}

// Loads a value if it is wanted, else returns 0. It is volatile so that the compiler does not move
// the load behind the wait for the operand.
DEVICE float load_ahead(bool wanted, const float* from) {
  float value = 0;
  asm volatile("{.reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p ld.global.nc.b32 %0, [%1];}"
               : "+f"(value)
               : "l"(from), "r"(int(wanted)));
  return value;
}

}  // namespace flashcell::cuda
