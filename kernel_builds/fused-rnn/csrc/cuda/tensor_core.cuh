// Helpers of cells on tensor cores, besides the matrix instruction: scalar types, and tiles of
// units by columns. Rows of a product are units or gates of a weight, columns are sequences.
#pragma once
#include "approx.cuh"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

template <typename IO>
// Elements in 32 bits and in 16 bytes, and the scalar type in which the cell computes.
struct IoTraits {
  static constexpr int kWord = 4 / sizeof(IO), kVector = 16 / sizeof(IO);
  using Value = std::conditional_t<std::is_same_v<IO, bf16>, Coarse, Fast>;
};

constexpr int kColumns = 8;  // sequences of a tile: the width of the matrix instruction

template <Accuracy kAccuracy>
DEVICE float to_float(Approx<kAccuracy> x) {
  return x.v;
}

// The values of unit r for columns 2 q and 2 q + 1, in lane 4 r + q, as io: half of d of the matrix
// instruction.
template <typename IO>
struct ColumnPair {
  Pair<IO> pair;
  DEVICE static ColumnPair of(float first, float second) { return {Pair<IO>::of(first, second)}; }
  DEVICE float2 floats() const { return pair.floats(); }
};

// Tiles in shared memory: 8 columns, kStride elements apart, of 8 neighbouring units. With 16-bit
// types one instruction loads and transposes four tiles, or stores one; lane l supplies the address
// of column l % 8 of tile l / 8. With fp32 a lane addresses its own first element.
template <typename IO, int kStride>
DEVICE int tile_offset() {  // the lane's offset in a tile, in elements
  const int lane = threadIdx.x % 32;
  return sizeof(IO) == 2 ? lane % 8 * kStride : lane % 4 * 2 * kStride + lane / 4;
}

// place(i) is the offset of tile i from `address` in bytes. `address` includes the lane's
// tile_offset and, with 16-bit types, the offset of the tile (of four) whose address the lane
// supplies.
template <int kStride, int kCount, typename IO, typename Place>
DEVICE void load_tiles(ColumnPair<IO> (&values)[kCount], uint32_t address, Place place) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if constexpr (sizeof(IO) == 2) {
      uint32_t words[4];
      if (kCount - i > 2) {
        load_transposed(words, address + place(i));
      } else {  // the other half would be past the last tile
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
    // Computes the lane's own address from that of the column it supplies.
    const int lane = threadIdx.x % 32;
    const uint32_t to = address + (lane % 4 * 2 - lane % 8) * kStride * 2 + lane / 4 * 2;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(uint16_t(value.pair.word[0])) : "memory");
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + kStride * 2),
                 "h"(uint16_t(value.pair.word[0] >> 16))
                 : "memory");
#endif
  }
}

// Rounds to an operand of the matrix instruction; units outside the head, which may hold any bits,
// become 0.
template <int kStride, typename IO>
DEVICE void store_operand(uint32_t address, ColumnPair<IO> value, bool in_head) {
  for (uint32_t& word : value.pair.word) word = in_head ? operand<IO>(word) : 0;
  store_tile<kStride>(address, value);
}

}  // namespace flashcell::cuda
