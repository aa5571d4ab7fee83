// What cells on tensor cores have beside the matrix instruction: their scalars, and tiles of units
// by columns. Rows of a product are units or gates of a weight, columns are sequences.
#pragma once
#include "approx.cuh"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

template <typename IO>
struct IoTraits {  // what 32 bits and 16 bytes hold, and the scalar the cell computes in
  static constexpr int kWord = 4 / sizeof(IO), kVector = 16 / sizeof(IO);
  using Value = Approx<std::is_same_v<IO, bf16>>;
};

constexpr int kColumns = 8;  // sequences of a tile: the width of the matrix instruction

template <bool kCoarse>
DEVICE float to_float(Approx<kCoarse> x) {
  return x.v;
}

// Unit r of columns 2 q and 2 q + 1, in lane 4 r + q: a piece of d of the matrix instruction, in
// io.
template <typename IO>
struct ColumnPair {
  Pair<IO> pair;
  DEVICE static ColumnPair of(float first, float second) { return {Pair<IO>::of(first, second)}; }
  DEVICE float2 floats() const { return pair.floats(); }
};

// Tiles in shared memory: 8 columns, kStride elements apart, by 8 neighbouring units. In 16 bits
// four tiles are loaded by one instruction and stored by one each, transposed on their way; then
// lane l names column l % 8 of tile l / 8. In fp32 a lane names its own first element.
template <typename IO, int kStride>
DEVICE int tile_offset() {  // what a lane adds to the place of a tile, in elements
  const int lane = threadIdx.x % 32;
  return sizeof(IO) == 2 ? lane % 8 * kStride : lane % 4 * 2 * kStride + lane / 4;
}

// place(i): bytes from `address` to tile i. `address` contains the lane's tile_offset and, in 16
// bits, the way from the first of four tiles to the lane's.
template <int kStride, int kCount, typename IO, typename Place>
DEVICE void load_tiles(ColumnPair<IO> (&values)[kCount], uint32_t address, Place place) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if constexpr (sizeof(IO) == 2) {
      uint32_t words[4];
      if (kCount - i > 2) {
        load_transposed(words, address + place(i));
      } else {  // the other half would lie beyond the last tile
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(words[0]), "=r"(words[1])
                     : "r"(address + place(i)));
      }
#pragma unroll
      for (int j = 0; j < 4 && i + j < kCount; ++j) values[i + j].pair.word[0] = words[j];
    } else {
#pragma unroll
      for (int j = i; j < i + 4 && j < kCount; ++j) {
        float first, second;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(first) : "r"(address + place(j)));
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(second)
                     : "r"(address + place(j) + kStride * 4));
        values[j] = ColumnPair<IO>::of(first, second);
      }
    }
  }
}

template <int kStride, typename IO>
DEVICE void store_tile(uint32_t address, const ColumnPair<IO>& value) {
  if constexpr (sizeof(IO) == 4) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value.pair.word[0]) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + kStride * 4), "r"(value.pair.word[1])
                 : "memory");
  } else {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address),
                 "r"(value.pair.word[0])
                 : "memory");
#else
    // The lane's own place, from that of the column it names.
    const int lane = threadIdx.x % 32;
    const uint32_t to = address + (lane % 4 * 2 - lane % 8) * kStride * 2 + lane / 4 * 2;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(uint16_t(value.pair.word[0])) : "memory");
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + kStride * 2),
                 "h"(uint16_t(value.pair.word[0] >> 16))
                 : "memory");
#endif
  }
}

// As an operand of the matrix instruction; 0 outside the head, where it is anything.
template <int kStride, typename IO>
DEVICE void store_operand(uint32_t address, ColumnPair<IO> value, bool in_head) {
  for (uint32_t& word : value.pair.word) word = in_head ? operand<IO>(word) : 0;
  store_tile<kStride>(address, value);
}

}  // namespace flashcell::cuda
