// Host services of a CPU engine, on torch: threads, memory, the list of sequences; isa.h has the
// choice of instruction set. Only ops.cpp includes it, and it is compiled for the oldest machine.
#pragma once
#include <malloc.h>
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "common/cpu/host.h"
#include "common/torch/checks.h"
#include "common/torch/isa.h"

namespace flashcell {

// torch's parallel_for loses the type of an exception. Only allocation can throw in these threads,
// so the caller throws std::bad_alloc again.
inline void run_parallel(int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
  std::atomic<bool> has_memory = true;
  torch::stable::parallel_for(0, count, 1, [&, body, context](int64_t begin, int64_t end) {
    try {
      body(context, begin, end);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  if (!has_memory) throw std::bad_alloc();
}

// Advises huge pages inside [pointer, pointer + bytes): otherwise the first write to a fresh
// mapping costs one page fault per 4 KB. It is a hint, and its failure is harmless.
inline void prefer_huge_pages(void* pointer, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = ((uintptr_t)pointer + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = ((uintptr_t)pointer + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

// Caches scratch of finished calls: a fresh mapping costs page faults and zeroing (3 ms on one
// thread of a Zen 3 for the 9.4 MB of an LSTM's packed weights of 768 units).
struct IdleScratch {
  static constexpr int kCount = 32;
  // The least bytes of a block that is kept, and the most bytes of all kept blocks.
  static constexpr int64_t kLeast = 128 << 10, kMost = 96 << 20;
  std::atomic_flag busy;
  void* blocks[kCount] = {};
  int64_t total = 0;

  static int64_t size(void* block) { return block ? int64_t(malloc_usable_size(block)) : 0; }

  // Waits for other threads, but not for long: one that holds the lock may have lost its core, and
  // after a fork it does not exist. The caller then does without the cache.
  bool enter() {
    constexpr int kTries = 200;
    for (int i = 0; i < kTries; ++i) {
      if (!busy.test_and_set(std::memory_order_acquire)) return true;
      pause_core();
    }
    return false;
  }
  void leave() { busy.clear(std::memory_order_release); }

  void* take(int64_t bytes) {  // the smallest that fits, if it is not far too large
    if (!enter()) return nullptr;
    void** best = nullptr;
    for (void*& block : blocks) {
      const bool fits = size(block) >= bytes && size(block) <= 2 * bytes;
      if (fits && (!best || size(block) < size(*best))) best = &block;
    }
    void* found = best ? std::exchange(*best, nullptr) : nullptr;
    total -= size(found);
    leave();
    return found;
  }

  // Keeps a block, for which it may free others: the smallest if all places are taken, and any of
  // them to stay within kMost.
  bool keep(void* kept) {
    const int64_t bytes = size(kept);
    if (bytes < kLeast || bytes > kMost || !enter()) return false;
    void** place = &blocks[0];
    for (void*& block : blocks) {
      if (size(block) < size(*place)) place = &block;
    }
    const bool keeps = size(*place) < bytes;
    if (keeps) {
      put(*place, kept);
      for (void*& block : blocks) {
        if (total > kMost && &block != place) put(block, nullptr);
      }
    }
    leave();
    return keeps;
  }

  void put(void*& block, void* next) {
    total += size(next) - size(block);
    std::free(std::exchange(block, next));
  }
};

inline IdleScratch& idle_scratch() {
  static IdleScratch idle;
  return idle;
}

inline void* allocate(int64_t bytes) {
  constexpr int64_t kHugePage = 2 << 20;
  if (bytes < 0) throw std::bad_alloc();  // more than 2^63 bytes
  void* pointer = bytes >= IdleScratch::kLeast ? idle_scratch().take(bytes) : nullptr;
  if (pointer == nullptr) {
    const int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
    pointer = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (pointer == nullptr) throw std::bad_alloc();
    prefer_huge_pages(pointer, bytes);
  }
  if (fills_memory()) std::memset(pointer, 255, bytes);
  return pointer;
}

inline void release(void* pointer) {
  if (!idle_scratch().keep(pointer)) std::free(pointer);
}

inline Host host() {
  return {run_parallel, allocate, release, int(torch::stable::get_num_threads())};
}

inline Tensor new_tensor(const Tensor& /*like*/, const Shape& shape, ScalarType dtype) {
  Tensor tensor = empty(shape, dtype, aoti_torch_device_type_cpu(), -1);
  prefer_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
  return tensor;
}

inline Shape read_integers(const Tensor& tensor, const char* name, int64_t count) {
  check_rank(tensor, name, 1, "one-dimensional");
  STD_TORCH_CHECK(count < 0 || tensor.size(0) == count, name, " must have ", count,
                  " entries, got ", tensor.size(0));
  const bool is_int = tensor.scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK(is_int || tensor.scalar_type() == ScalarType::Long, name,
                  " must be int32 or int64, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  const Tensor values = dense(tensor);
  Shape result(values.numel());
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = is_int ? values.const_data_ptr<int32_t>()[i] : values.const_data_ptr<int64_t>()[i];
  }
  return result;
}

// Turns batch rows, documents and padded rows into one list of sequences, longest first.
inline std::vector<Sequence> sequences(const Tensor& /*like*/, int64_t B, int64_t T,
                                       const OptionalTensor& lengths,
                                       const OptionalTensor& cu_seqlens, int64_t x_batch,
                                       int64_t x_time) {
  std::vector<Sequence> list;
  if (cu_seqlens) {
    STD_TORCH_CHECK(!lengths, "lengths and cu_seqlens exclude each other");
    STD_TORCH_CHECK(B == 1, "cu_seqlens needs x of shape [1, total, ...], got batch ", B);
    const Shape at = read_integers(*cu_seqlens, "cu_seqlens", -1);
    STD_TORCH_CHECK(!at.empty() && at.front() == 0, "cu_seqlens must start with 0");
    STD_TORCH_CHECK(at.back() == T, "cu_seqlens must end with the total length ", T, ", got ",
                    at.back());
    for (size_t s = 0; s + 1 < at.size(); ++s) {
      STD_TORCH_CHECK(at[s] <= at[s + 1], "cu_seqlens must not decrease, got ", at[s], " before ",
                      at[s + 1]);
      list.push_back({int64_t(s), at[s], at[s] * x_time, at[s + 1] - at[s], 0});
    }
  } else {
    list.reserve(B);
    Shape steps(B, T);
    if (lengths) steps = read_integers(*lengths, "lengths", B);
    for (int64_t b = 0; b < B; ++b) {
      STD_TORCH_CHECK(0 <= steps[b] && steps[b] <= T, "lengths must be in 0..", T, ", got ",
                      steps[b], " at ", b);
      list.push_back({b, b * T, b * x_batch, steps[b], T - steps[b]});
    }
  }
  if (!lengths && !cu_seqlens) return list;  // all of one length
  std::stable_sort(list.begin(), list.end(),
                   [](const Sequence& a, const Sequence& b) { return a.length > b.length; });
  return list;
}

}  // namespace flashcell
