// Descriptors of wgmma operands in shared memory.
//
// An operand is stored in panels whose rows are 64 elements of 16 bits (128 bytes), swizzled:
// 16-byte piece c of row r is at piece c ^ (r % 8), and a panel starts at a multiple of 1024 bytes.
// With Major::kDepth a panel's row is a row of the product (a column, for the right operand) and
// holds 64 elements of the depth (or 32 of fp32). With Major::kWidth a panel's row is one element
// of the depth and holds 64 rows of the product.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

enum class Major { kDepth, kWidth };

constexpr int kWarpgroup = 128;

// Describes 16 elements of an operand's depth (8 of fp32), by as many rows or columns as the
// instruction's shape takes. `panel_stride` is the number of bytes between panels, used where
// Major::kWidth takes several.
template <Major kMajor>
struct SharedOperand {
  uint64_t bits;

  DEVICE explicit SharedOperand(uint32_t address, int panel_stride = 0) {
    const uint64_t leading = kMajor == Major::kWidth ? panel_stride / 16 : 1;
    bits = address / 16 | leading << 16 | uint64_t(1024 / 16) << 32 | uint64_t(1) << 62;
  }
  // Returns the descriptor `steps` times so many elements further along the depth. With
  // Major::kDepth, four such steps are the 128 bytes of a panel's row.
  DEVICE SharedOperand step(int steps) const {
    SharedOperand other = *this;
    other.bits += steps * (kMajor == Major::kWidth ? 16 * 128 : 32) / 16;
    return other;
  }
  DEVICE SharedOperand at(int bytes) const {
    SharedOperand other = *this;
    other.bits += bytes / 16;
    return other;
  }
};

template <int kColumns>
constexpr bool kHasWgmma =
    kColumns == 8 || kColumns == 48 || kColumns == 64 || kColumns == 96 || kColumns == 120 ||
    kColumns == 128 || kColumns == 144 || kColumns == 160 || kColumns == 192 || kColumns == 256;

template <int kN>
DEVICE void clear(float (&sums)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] = 0;
  }
}
}  // namespace flashcell::cuda
