// The arguments of a step's kernels, besides Params.
#pragma once
#include "../../cells/reads_h.h"
#include "common/cuda/ptx/programmatic_launch.cuh"
#include "split_operands.cuh"

namespace flashcell::cuda::gemm {

struct Step {
  int t;
  const int* clock;      // null, or its value is added to t
  bool has_product;      // whether this step has a product
  int D, ND;             // width of one head, and of the heads that run
  int row;               // units of a row of the tensors, which may have more heads
  int64_t states;        // elements of one state of all sequences
  const float* product;  // recurrent weight times the last operand
  void* operand;         // written here for the next product
  int parts;             // of the product, which the cells add up
  bool is_split;         // whether the operand is written in halves
  Operand halves;        // where they lie

  DEVICE int time() const { return clock != nullptr ? t + *clock : t; }

  // Waits until the product is there: a kernel of the cells may start while the product ends. At
  // least one thread must wait, so that the next product starts after this one.
  DEVICE void wait() const { pdl_wait(); }

  // Writes four neighbouring units of a sequence for the next product. They belong to gate `gate`
  // of the `gates` gates that the operand has.
  template <typename IO>
  DEVICE void keep(int64_t s, int at, int gates, int gate, const float (&v)[kQuad]) const {
    const int head = at / D, unit = at - head * D;
    if constexpr (sizeof(IO) == 4) {
      if (is_split) {
        const int64_t place = place_of_quad(halves, s, head, gate, unit);
        return store_halves(static_cast<char*>(operand) + place, halves.bytes, v);
      }
    }
    store_quad(static_cast<IO*>(operand) + (s * ND + head * D) * gates + gate * D + unit, v);
  }

  // Adds the product of a quad: row `row` of the `rows` rows that each unit of a head has.
  DEVICE void add_product(float (&v)[kQuad], int64_t s, int at, int rows, int row) const {
    const int head = at / D, unit = at - head * D;
    const float* from = product + (s * ND + head * D) * rows * parts + row * D + unit;
    for (int part = 0; part < parts; ++part) {
      float more[kQuad];
      load_quad(more, from + int64_t(part) * rows * D);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) v[i] += more[i];
    }
  }
};

}  // namespace flashcell::cuda::gemm
