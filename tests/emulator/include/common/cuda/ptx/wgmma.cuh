// Emulated functions of common/cuda/ptx/wgmma.cuh. A product is four collectives, one for each warp
// of the warpgroup with a quarter of the rows. It runs, and reads shared memory, when the warps
// wait for it or, with the option `early`, at once.
#pragma once
#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/shared_operand.cuh"

#define FLASHCELL_WGMMA_CODE 1

namespace flashcell::cuda {

inline void fence_proxy_async() {}

template <typename... Registers>
void wgmma_fence(Registers&...) {}
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending, typename... Registers>
void wgmma_wait(Registers&...) {
  emulator::wait_products(kPending);
}

// Returns element (width, depth) of an operand, at the place that PTX ISA 8 gives it (matrix
// descriptor, canonical layouts with 128-byte swizzle).
template <typename IO, Major kMajor>
float operand_element(uint64_t bits, int width, int depth) {
  const auto bytes = [bits](int from) { return uint32_t(bits >> from & 0x3fff) * 16; };
  const uint32_t start = bytes(0), leading = bytes(16), stride = bytes(32);
  if (bits >> 62 != 1) emulator::fail("wgmma: an operand without the 128-byte swizzle");
  const bool along = kMajor == Major::kDepth;
  const int row = along ? width : depth, column = along ? depth : width % 64;
  uint32_t at = start + row / 8 * stride + row % 8 * 128 + column * 2;
  if (!along) at += width / 64 * leading;
  IO x;
  std::memcpy(&x, emulator::shared_at(at ^ (at >> 7 & 7) << 4, 2), 2);
  return float(x);
}

// Each lane passes its words of the left operand, or the left operand's descriptor, the right
// operand's descriptor, and the address of its sums.
struct LaneProduct {
  uint32_t words[4];
  uint64_t left, right;
  void* sums;
};
static_assert(sizeof(LaneProduct) == sizeof(uint32_t[10]));

// Returns an element of the left operand: left_of(the warp's lanes, row of the warp's 16, depth).
template <typename IO, Major kRight, int kN, typename LeftOf>
void multiply_now(const LaneProduct& own, LeftOf) {
  uint32_t given[10], none[1];
  std::memcpy(given, &own, sizeof given);
  emulator::collective(given, none, [](emulator::Warp& warp) {
    LaneProduct lanes[emulator::kWarpSize];
    for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
      std::memcpy(&lanes[lane], warp.given[lane], sizeof lanes[lane]);
    }
    float left[16][16], right[16][8 * kN];
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 16; ++row) left[row][k] = LeftOf{}(lanes, row, k);
      for (int n = 0; n < 8 * kN; ++n) {
        right[k][n] = operand_element<IO, kRight>(lanes[0].right, n, k);
      }
    }
    for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
      float (*sums)[4] = static_cast<float (*)[4]>(lanes[lane].sums);
      for (int j = 0; j < kN; ++j) {
        for (int e = 0; e < 4; ++e) {
          const int row = lane / 4 + e / 2 * 8, column = 8 * j + lane % 4 * 2 + e % 2;
          for (int k = 0; k < 16; ++k) sums[j][e] += left[row][k] * right[k][column];
        }
      }
    }
  });
}

template <typename IO, Major kRight, int kN, typename LeftOf>
void multiply_later(const LaneProduct& own, bool add, LeftOf left_of) {
  static_assert(kHasWgmma<8 * kN> && sizeof(IO) == 2);
  if (!emulator::machine.options.sm_90a) emulator::fail("wgmma: only code for 9.0a has it");
  emulator::issue_product([own, add, left_of] {
    if (!add) std::memset(own.sums, 0, kN * sizeof(float[4]));
    multiply_now<IO, kRight, kN>(own, left_of);
  });
}

template <typename IO, Major kLeft, Major kRight, int kN>
void wgmma(float (&d)[kN][4], SharedOperand<kLeft> left, SharedOperand<kRight> right,
           bool add = true) {
  multiply_later<IO, kRight, kN>({{}, left.bits, right.bits, d}, add,
                                 [](const LaneProduct* lanes, int row, int k) {
                                   const int first = emulator::machine.thread.x / 32 % 4 * 16;
                                   return operand_element<IO, kLeft>(lanes[0].left, first + row, k);
                                 });
}
template <typename IO, Major kRight, int kN>
void wgmma(float (&d)[kN][4], const uint32_t (&left)[4], SharedOperand<kRight> right,
           bool add = true) {
  multiply_later<IO, kRight, kN>({{left[0], left[1], left[2], left[3]}, 0, right.bits, d}, add,
                                 [](const LaneProduct* lanes, int row, int k) {
                                   const int lane = row % 8 * 4 + k % 8 / 2;
                                   const uint32_t word = lanes[lane].words[row / 8 + k / 8 * 2];
                                   return element<IO>(word, k % 2);
                                 });
}

}  // namespace flashcell::cuda
