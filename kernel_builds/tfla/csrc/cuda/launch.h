// Launches of this kernel project, and scratch memory divided into arrays.
#pragma once

namespace flashcell::cuda {
inline constexpr char kKernelName[] = "tfla";
}

#include "common/cuda/launch.cuh"

namespace flashcell::cuda {

// Hands out arrays one after the other; without memory it only counts the bytes.
class Arrays {
 public:
  explicit Arrays(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * int64_t(sizeof(T)) + 255) / 256 * 256;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace flashcell::cuda
