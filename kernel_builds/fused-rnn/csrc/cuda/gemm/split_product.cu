// The exact product (split.h): one warp copies panels of both operands into a ring of stages in
// shared memory, two warpgroups multiply half the rows of the left operand each.
#include "../launch.h"
#include "common/cuda/ptx/bulk_copy.cuh"
#include "common/cuda/ptx/registers.cuh"
#include "common/cuda/ptx/wgmma.cuh"
#include "split_operands.cuh"

namespace flashcell::cuda::gemm {

constexpr int kPackThreads = 256, kPackRows = 32;
constexpr int kProductThreads = 3 * kWarpgroup;

// The elements of an operand in the caller's memory. Row `r` begins at
// (r / inner) * outer + (r % inner) * row, and the depth of group g at g * group.
struct Source {
  const float* data;
  int64_t rows, inner, outer, row;
  int64_t depth, element, group, head;
};

// A thread block packs 32 rows of a panel. Neighbouring threads read neighbouring elements, of a
// row's depth or of rows.
template <bool kHalves, bool kByRows>
static __global__ void __launch_bounds__(kPackThreads) pack_kernel(
    const __grid_constant__ Source from, char* to, const __grid_constant__ Operand operand) {
  __shared__ float tile[kPanel][kPackRows + 1];
  const int64_t row_blocks = operand.rows / kPackRows;
  const int64_t panels = int64_t(operand.panels) * operand.groups * operand.heads;
  for (int64_t block = blockIdx.x; block < row_blocks * panels; block += gridDim.x) {
    const int64_t row0 = block % row_blocks * kPackRows, panel = block / row_blocks;
    const int64_t depth0 = panel % operand.panels * kPanel;
    const int64_t of = panel / operand.panels, head = of / operand.groups;
    const int group = int(of % operand.groups);
    const float* data = from.data + head * from.head + group * from.group;
    const auto element = [&](int64_t row, int64_t at) {
      if (row >= from.rows || at >= from.depth) return 0.f;
      return data[row / from.inner * from.outer + row % from.inner * from.row + at * from.element];
    };
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    float v[kQuad];
    if constexpr (kByRows) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const int k = i * 8 + threadIdx.x / kPackRows, r = threadIdx.x % kPackRows;
        tile[k][r] = element(row0 + r, depth0 + k);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      v[i] =
          kByRows ? tile[piece * kQuad + i][row] : element(row0 + row, depth0 + piece * kQuad + i);
    }
    char* place = to + place_of_quad(operand, row0 + row, head, group, int(depth0) + piece * kQuad);
    if constexpr (kHalves) {
      store_halves(place, operand.bytes, v);
    } else {
      store_quad(reinterpret_cast<float*>(place), v);
    }
  }
}

template <bool kHalves>
static void pack(const Source& from, void* to, const Operand& operand, int sms,
                 cudaStream_t stream) {
  const auto kernel = from.element == 1 ? pack_kernel<kHalves, false> : pack_kernel<kHalves, true>;
  kernel<<<unsigned(8 * sms), kPackThreads, 0, stream>>>(from, static_cast<char*>(to), operand);
  check(cudaGetLastError());
}

struct Product {
  const char *left, *right;
  Operand of_left, of_right;
  float* c;
  int64_t row, part;  // from c's row of s to the next, and to the next part of a head
  int64_t S, width;
  int parts;
  bool adds;
};

template <int kRows>
struct Stage {
  static constexpr int kLeft = kLeftRows * kPanelBytes, kRight = kRows * kPanelBytes;
  static constexpr int kBytes = kLeft + 2 * kRight;
  static constexpr int kStages = (224 << 10) / kBytes;
  static constexpr int kShared = 1024 + kStages * (kBytes + 16);

  uint32_t memory;
  int index = 0, round = 0;

  DEVICE uint32_t left() const { return memory + index * kBytes; }
  DEVICE uint32_t right() const { return left() + kLeft; }
  DEVICE uint32_t full() const { return memory + kStages * kBytes + index * 16; }
  DEVICE uint32_t empty() const { return full() + 8; }
  DEVICE void advance() {
    if (++index == kStages) index = 0, ++round;
  }
};

template <int kRows>
DEVICE void copy_panels(const Product& p, Stage<kRows> stage, int64_t w0, int64_t s0, int64_t first,
                        int64_t end) {
  using S = Stage<kRows>;
  for (int64_t panel = first; panel < end; ++panel, stage.advance()) {
    mbarrier_wait(stage.empty(), stage.round - 1);
    mbarrier_arrive_expect_tx(stage.full(), S::kBytes);
    bulk_copy(stage.left(), p.left + (panel * p.of_left.rows + w0) * kPanelBytes, S::kLeft,
              stage.full());
    const char* right = p.right + (panel * p.of_right.rows + s0) * kPanelBytes;
    bulk_copy(stage.right(), right, S::kRight, stage.full());
    bulk_copy(stage.right() + S::kRight, right + p.of_right.bytes, S::kRight, stage.full());
  }
}

// Both halves of 8 elements of the depth of the left operand, as wgmma takes them from registers.
DEVICE void load_left(uint32_t (&high)[4], uint32_t (&low)[4], const char* rows, int k) {
  const int lane = threadIdx.x % 32, r = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* row = rows + (r + i % 2 * 8) * kPanelBytes;
    const int piece = 2 * k + i / 2;
    const float x = *reinterpret_cast<const float*>(row + (piece ^ r) * 16 + lane % 4 * 4);
    const float top = round_to_tf32(x);
    high[i] = __float_as_uint(top), low[i] = __float_as_uint(low_half(x, top));
  }
}

template <int kRows>
static __global__ void __launch_bounds__(kProductThreads, 1) product_kernel(
    const __grid_constant__ Product p) {
#if FLASHCELL_WGMMA_CODE
  extern __shared__ __align__(1024) char shared[];
  const uint32_t begin = shared_address(shared), memory = (begin + 1023) / 1024 * 1024;
  Stage<kRows> stage{memory};
  if (threadIdx.x == 0) {
    for (Stage<kRows> each = stage; each.round == 0; each.advance()) {
      mbarrier_init(each.full(), 1), mbarrier_init(each.empty(), 2 * kWarpgroup / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int64_t w0 = int64_t(blockIdx.x) * kLeftRows, s0 = int64_t(blockIdx.y) * kRows;
  const int64_t head = blockIdx.z / p.parts, part = blockIdx.z % p.parts;
  const int64_t panels = int64_t(p.of_left.groups) * p.of_left.panels;
  const int64_t first = head * panels + part * panels / p.parts;
  const int64_t end = head * panels + (part + 1) * panels / p.parts;
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) copy_panels<kRows>(p, stage, w0, s0, first, end);
    return;
  }
  setmaxnreg_inc<232>();
  float total[kRows / 8][4], sums[kRows / 8][4];
  uint32_t high[4][4], low[4][4];
  clear(total);
  const int lane = threadIdx.x % 32, own = (threadIdx.x - kWarpgroup) / 32 * 16;
  for (int64_t panel = first; panel < end; ++panel, stage.advance()) {
    mbarrier_wait(stage.full(), stage.round);
    const char* left = shared + (stage.left() - begin) + own * kPanelBytes;
    const SharedOperand<Major::kDepth> right(stage.right());
    const auto right_low = right.at(Stage<kRows>::kRight);
#pragma unroll
    for (int k = 0; k < 4; ++k) load_left(high[k], low[k], left, k);
    wgmma_fence(sums, high, low);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_tf32(sums, low[k], right.step(k), k > 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_tf32(sums, high[k], right_low.step(k));
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_tf32(sums, high[k], right.step(k));
    wgmma_commit();
    wgmma_wait<0>(sums, high, low);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(stage.empty());
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[j][e] += sums[j][e];
    }
  }
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t s = s0 + 8 * j + lane % 4 * 2 + e % 2, w = w0 + own + lane / 4 + e / 2 * 8;
      if (s >= p.S || w >= p.width) continue;
      float* to = p.c + s * p.row + blockIdx.z * p.part + w;
      *to = p.adds ? *to + total[j][e] : total[j][e];
    }
  }
#else
  __trap();  // the planner chooses it only where it is compiled for 9.0a
#endif
}

template <int kRows>
static void launch_product(const Product& p, cudaStream_t stream) {
  const auto kernel = product_kernel<kRows>;
  const int bytes = Stage<kRows>::kShared;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(unsigned(p.of_left.rows / kLeftRows), unsigned(p.of_right.rows / kRows),
                  unsigned(p.of_left.heads * p.parts));
  kernel<<<grid, kProductThreads, bytes, stream>>>(p);
  check(cudaGetLastError());
}

static void launch_product(const Product& p, const Tiles& tiles, cudaStream_t stream) {
  if (tiles.rows == 64) return launch_product<64>(p, stream);
  launch_product<128>(p, stream);
}

void pack_weight(const SequenceParams& p, int gates, bool backward, void* to, const Split& split,
                 const Launch& launch) {
  const int64_t matrix = p.D * p.D, gate = p.N * matrix;
  const auto* weight = static_cast<const float*>(p.weight);
  const Source from = backward ? Source{weight, p.D, p.D, 0, 1, p.D, p.D, gate, matrix}
                               : Source{weight, gates * p.D, p.D, gate, p.D, p.D, 1, 0, matrix};
  pack<false>(from, to, split.weight, launch.device.sms, launch.stream);
}

void multiply_split(const void* weight, const void* operand, float* sums, int64_t S, int64_t width,
                    const Split& split, const Launch& launch) {
  const int parts = split.tiles.parts;
  const Product p{static_cast<const char*>(weight),
                  static_cast<const char*>(operand),
                  split.weight,
                  split.operand,
                  sums,
                  split.weight.heads * parts * width,
                  width,
                  S,
                  width,
                  parts,
                  false};
  launch_product(p, split.tiles, launch.stream);
}

// Adds up the parts of c [M, N], which lie M rows of N apart.
static __global__ void __launch_bounds__(kPackThreads) add_parts_kernel(const float* parts,
                                                                        int count, int64_t M,
                                                                        int64_t N, float* c,
                                                                        int64_t c_m, bool adds) {
  for (int64_t i = blockIdx.x * int64_t(kPackThreads) + threadIdx.x; i < M * N;
       i += gridDim.x * int64_t(kPackThreads)) {
    float* to = c + i / N * c_m + i % N;
    float sum = adds ? *to : 0.f;
    for (int part = 0; part < count; ++part) sum += parts[(i / N * count + part) * N + i % N];
    *to = sum;
  }
}

void multiply_matrices(const Matrices& m, const Device& device, void* scratch,
                       cudaStream_t stream) {
  const int64_t depth = m.depth_of_piece(), rows = m.rows_of_piece();
  const Tiles tiles = m.tiles(device);
  char* right = static_cast<char*>(scratch);
  char* left = right + 8 * rows * depth;
  float* parts = reinterpret_cast<float*>(left + 4 * round_up(m.N, kLeftRows) * depth);
  for (int64_t k = 0; k < m.K; k += depth) {
    const int64_t K = std::min(depth, m.K - k);
    const int panels = int(round_up(K, kPanel) / kPanel);
    const Operand of_left(round_up(m.N, kLeftRows), panels, 1, 1);
    pack<false>({m.b + k * m.b_k, m.N, m.N, 0, m.b_n, K, m.b_k, 0, 0}, left, of_left, device.sms,
                stream);
    for (int64_t row = 0; row < m.M; row += rows) {
      const int64_t M = std::min(rows, m.M - row);
      const Operand of_right(round_up(M, tiles.rows), panels, 1, 1);
      pack<true>({m.a + row * m.a_m + k * m.a_k, M, M, 0, m.a_m, K, m.a_k, 0, 0}, right, of_right,
                 device.sms, stream);
      float* c = m.c + row * m.c_m;
      const bool adds = m.adds || k > 0, whole = tiles.parts == 1;
      const Product p{
          left, right, of_left, of_right,    whole ? c : parts, whole ? m.c_m : tiles.parts * m.N,
          m.N,  M,     m.N,     tiles.parts, whole && adds};
      launch_product(p, tiles, stream);
      if (whole) continue;
      add_parts_kernel<<<unsigned(8 * device.sms), kPackThreads, 0, stream>>>(parts, tiles.parts, M,
                                                                              m.N, c, m.c_m, adds);
      check(cudaGetLastError());
    }
  }
}

}  // namespace flashcell::cuda::gemm
