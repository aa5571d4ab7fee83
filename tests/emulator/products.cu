// wgmma with every kind of operand and width, and with one fault each. Prints "<kind>: right" or
// "wrong", or the emulator's message.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "common/cuda/ptx/mbarrier.cuh"
#include "common/cuda/ptx/wgmma.cuh"

namespace flashcell::cuda {

constexpr int kRows = 64, kDepth = 128, kPanel = 64;
enum Fault {
  kNone,
  kNoWait,       // reads sums that have not been waited for
  kOverwritten,  // writes to an operand that is still being read
  kNeverArrives  // waits for a barrier that nobody arrives at
};

// The layout of an operand [width, depth] in shared memory: panels whose rows are 64 elements.
template <Major kMajor>
struct Layout {
  int width;

  static constexpr bool kAlong = kMajor == Major::kDepth;
  int rows() const { return kAlong ? width : kDepth; }
  int bytes() const { return (kAlong ? kDepth : width + kPanel - 1) / kPanel * rows() * 128; }
  int at(int w, int d) const {
    const int row = kAlong ? w : d, column = kAlong ? d : w;
    const int piece = column % kPanel / 8 ^ row % 8;
    return column / kPanel * rows() * 128 + row * 128 + piece * 16 + column % 8 * 2;
  }
  SharedOperand<kMajor> step(uint32_t address, int step) const {
    const SharedOperand<kMajor> all(address, kAlong ? 0 : rows() * 128);
    return kAlong ? all.at(step / 4 * rows() * 128).step(step % 4) : all.step(step);
  }
};

template <typename IO, Major kLeft, Major kRight, int kColumns, bool kRegisters>
__global__ void multiply(const IO* a, const IO* b, float* out, Fault fault) {
  extern __shared__ __align__(1024) char memory[];
  const Layout<kLeft> left{kRows};
  const Layout<kRight> right{kColumns};
  char* const right_memory = memory + left.bytes();
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  const auto fill = [&](char* to, const IO* from, int width, const auto& layout) {
    for (int i = t; i < width * kDepth; i += kWarpgroup) {
      reinterpret_cast<IO&>(to[layout.at(i / kDepth, i % kDepth)]) = from[i];
    }
  };
  fill(memory, a, kRows, left), fill(right_memory, b, kColumns, right);
  fence_proxy_async();
  __syncthreads();
  if (fault == kNeverArrives) {
    if (t == 0) mbarrier_init(shared_address(memory), 1);
    __syncthreads();
    mbarrier_wait(shared_address(memory), 0);
  }
  float sums[kColumns / 8][4];
  clear(sums);
  wgmma_fence(sums);
  for (int step = 0; step < kDepth / 16; ++step) {
    const auto b_step = right.step(shared_address(right_memory), step);
    if constexpr (kRegisters) {
      uint32_t words[4];
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 16 + lane / 4 + i % 2 * 8, k = step * 16 + lane % 4 * 2 + i / 2 * 8;
        words[i] = Pair<IO>::of(float(a[row * kDepth + k]), float(a[row * kDepth + k + 1])).word[0];
      }
      wgmma<IO>(sums, words, b_step);
    } else {
      wgmma<IO>(sums, left.step(shared_address(memory), step), b_step);
    }
  }
  wgmma_commit();
  if (fault == kOverwritten) {
    __syncthreads();
    fill(right_memory, a, 8, right);
  }
  if (fault != kNoWait) wgmma_wait<0>(sums);
  for (int j = 0; j < kColumns / 8; ++j) {
    for (int e = 0; e < 4; ++e) {
      const int row = warp * 16 + lane / 4 + e / 2 * 8, column = 8 * j + lane % 4 * 2 + e % 2;
      out[row * kColumns + column] = sums[j][e];
    }
  }
}

template <typename IO, Major kLeft, Major kRight, int kColumns, bool kRegisters = false>
bool is_right(Fault fault = kNone) {
  std::vector<IO> a(kRows * kDepth), b(kColumns * kDepth);
  unsigned state = 1;  // small integers, so that every sum is exact
  for (auto* matrix : {&a, &b}) {
    for (IO& x : *matrix) x = IO(float(int((state = state * 1664525 + 1013904223) >> 28) - 8));
  }
  std::vector<float> out(kRows * kColumns);
  const auto kernel = multiply<IO, kLeft, kRight, kColumns, kRegisters>;
  cudaLaunchConfig_t config{};
  config.gridDim = 1, config.blockDim = kWarpgroup;
  config.dynamicSmemBytes = Layout<kLeft>{kRows}.bytes() + Layout<kRight>{kColumns}.bytes();
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       int(config.dynamicSmemBytes));
  cudaLaunchKernelEx(&config, kernel, a.data(), b.data(), out.data(), fault);
  bool right = true;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      float sum = 0;
      for (int k = 0; k < kDepth; ++k) {
        sum += float(a[row * kDepth + k]) * float(b[column * kDepth + k]);
      }
      right &= out[row * kColumns + column] == sum;
    }
  }
  return right;
}

template <typename IsRight>
void report(const std::string& kind, const IsRight& is_right) {
  try {
    std::printf("%s: %s\n", kind.c_str(), is_right() ? "right" : "wrong");
  } catch (const std::exception& error) {
    std::printf("%s: %s\n", kind.c_str(), error.what());
  }
}

template <typename IO, Major kLeft, Major kRight, bool kRegisters>
void report_widths(const std::string& kind) {
  const auto of = [&]<int kColumns>(std::integral_constant<int, kColumns>) {
    report(kind + " " + std::to_string(kColumns),
           [] { return is_right<IO, kLeft, kRight, kColumns, kRegisters>(); });
  };
  of(std::integral_constant<int, 8>()), of(std::integral_constant<int, 64>());
  of(std::integral_constant<int, 128>()), of(std::integral_constant<int, 256>());
}
template <typename IO>
void report_operands(const std::string& type) {
  constexpr Major kDepth = Major::kDepth, kWidth = Major::kWidth;
  report_widths<IO, kDepth, kDepth, false>(type + " depth depth");
  report_widths<IO, kDepth, kWidth, false>(type + " depth width");
  report_widths<IO, kWidth, kDepth, false>(type + " width depth");
  report_widths<IO, kWidth, kWidth, false>(type + " width width");
  report_widths<IO, kDepth, kDepth, true>(type + " registers depth");
  report_widths<IO, kDepth, kWidth, true>(type + " registers width");
}

}  // namespace flashcell::cuda

int main() {
  using namespace flashcell::cuda;
  report_operands<bf16>("bf16");
  report_operands<fp16>("fp16");
  const auto with = [](Fault fault) {
    return [fault] { return is_right<bf16, Major::kDepth, Major::kWidth, 64>(fault); };
  };
  report("no wait", with(kNoWait));
  report("overwritten", with(kOverwritten));
  report("never arrives", with(kNeverArrives));
}
