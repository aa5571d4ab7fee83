// Sums of columns, for the gradients of biases.
#pragma once
#include "common/cpu/load_store.h"
#include "common/cpu/scratch.h"
#include "engine.h"

namespace flashcell::FLASHCELL_ISA {

// out[n] = sum_m a[m, n], summed in blocks of rows: the sum then does not depend on the threads,
// and its error grows only with the square root of the number of rows.
template <typename IO>
void column_sum(const ColumnSumParams& p, const Host& host) {
  using T = State<IO>;
  using V = Vec<T>;
  constexpr int64_t kRows = 64;
  parallel_for(host, (p.N + V::kWidth - 1) / V::kWidth, [&](int64_t i) {
    const int64_t n = i * V::kWidth;
    const int count = p.N - n < V::kWidth ? int(p.N - n) : V::kWidth;
    V total = V(0);
    for (int64_t m0 = 0; m0 < p.M; m0 += kRows) {
      V part = V(0);
      for (int64_t m = m0; m < p.M && m < m0 + kRows; ++m) {
        const IO* from = (const IO*)p.a + m * p.N + n;
        part += count == V::kWidth ? load_io(from) : load_part<false>(from, count);
      }
      total += part;
    }
    store_part<false>((IO*)p.out + n, total, count);
  });
}

}  // namespace flashcell::FLASHCELL_ISA
