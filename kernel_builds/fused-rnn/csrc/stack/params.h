// What a stack of layers (layers.h) asks of a device besides the engines: strided copies, which
// bring parameters and states into the engines' layout and back and turn sequences around in time,
// and matrix products.
#pragma once
#include "common/sequence.h"

namespace flashcell {

#if defined(CUDA_KERNEL)
inline constexpr bool kProjectsBySteps = false;
#else
inline constexpr bool kProjectsBySteps = true;
#endif

// The rows of a PackedSequence: step t of sequence b is row begins[t] + b, and for the engines row
// firsts[b] + t. Sequences are sorted, longest first. The arrays are on the device.
struct PackedRows {
  int64_t *begins, *firsts, *lengths;  // [T], [B], [B]
};

// out[i] = in[i] + plus[i] for every index i of four dimensions; a stride may be negative.
struct Copy {
  void* out;
  const void *in, *plus;  // plus has the dtype of `in`, or is null for 0
  Dtype out_type, in_type;
  int64_t size[4], out_stride[4], in_stride[4], plus_stride[4];  // in elements
  // Of `out`, the elements of a row (dimension 3) and the rows (dimension 2): those from size[3]
  // and size[2] on become 0.
  int64_t padded, padded_rows;
  // If `packed` has arrays, indices 1 and 2 are b and t: stride 2 is that between rows, and stride
  // 1 is not read. `out` or `in` has the rows of the engines; `turns` takes these in reverse order.
  // Steps past a sequence's end have no rows in the other; in `out` those of the engines become 0.
  PackedRows packed;
  bool out_is_engine, turns;

  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }
};

// For every i < batch: c_i[m, n] = sum_k a_i[m, k] b_i[k, n]
struct Product {
  int64_t M, N, K, batch;
  const void* a;  // io; strides in elements; one of a_m, a_k is 1
  int64_t a_batch, a_m, a_k;
  const void* b;  // io; one of b_k, b_n is 1
  int64_t b_k, b_n;
  void* c;  // io; rows of N contiguous elements
  int64_t c_batch, c_m;
  // If `group` is not 0, the rows of a lie in groups: row m begins at (m / group) a_group + (m %
  // group) a_m. Only where copies_rows() says that a is copied, and for a batch of one.
  int64_t group = 0, a_group = 0;
  int64_t b_batch = 0;  // not 0 only where nothing of the product is copied
};

}  // namespace flashcell
