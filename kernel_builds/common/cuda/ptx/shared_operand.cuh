// Operands of wgmma in shared memory.
//
// They are panels of 64 elements of 16 bits (128 bytes) a row, swizzled: 16-byte piece c of row r
// lies at piece c ^ (r % 8), and a panel starts at a multiple of 1024 bytes. The rows of a panel
// are those of the product (of its columns, for the right operand), 64 of the depth in each:
// Major::kDepth; or the depth, 64 rows of the product in each: Major::kWidth.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

enum class Major { kDepth, kWidth };

constexpr int kWarpgroup = 128;

// 16 of the depth of an operand, by whatever the instruction's shape asks for of the other.
// `panel_stride`: bytes from panel to panel, read where the width takes several.
template <Major kMajor>
struct SharedOperand {
  uint64_t bits;

  DEVICE explicit SharedOperand(uint32_t address, int panel_stride = 0) {
    const uint64_t leading = kMajor == Major::kWidth ? panel_stride / 16 : 1;
    bits = address / 16 | leading << 16 | uint64_t(1024 / 16) << 32 | uint64_t(1) << 62;
  }
  // The next steps of 16: four of them are a panel's 128 bytes where the depth lies along rows.
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
constexpr bool kHasWgmma = kColumns == 8 || kColumns == 64 || kColumns == 128 || kColumns == 256;

template <int kN>
DEVICE void clear(float (&sums)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] = 0;
  }
}
}  // namespace flashcell::cuda
