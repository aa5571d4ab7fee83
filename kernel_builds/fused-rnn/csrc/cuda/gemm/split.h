// Exact fp32 products on Hopper's tensor cores. A number of fp32 is the sum of two numbers of TF32,
// high + low, with a relative error of 2^-22. The product
//
//     a b = high(a) high(b) + high(a) low(b) + low(a) high(b)
//
// leaves out low(a) low(b), which is as small. Tensor cores truncate the sums they add to, so only
// 32 elements of the depth are added up there, and the rest in fp32. The result is at least as
// accurate as that of fp32's own instructions, which have an eighth of the rate.
//
// It is c[s, w] = sum over the depth of right[s, depth] left[w, depth]. Both operands lie in memory
// as they do in a stage of shared memory: panels of 32 elements of the depth, all rows of a panel
// after one another, all panels of a head. Of the right operand there are first all high halves,
// then all low ones; the left one is split in registers. The depth of a backward product of a step
// has a group of panels for every gate.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../params.h"
#include "../engine.h"

namespace flashcell::cuda::gemm {

constexpr int kPanel = 32;        // elements of the depth: 128 bytes of a row
constexpr int kPanelBytes = 128;  // of a row
constexpr int kLeftRows = 128;    // of a tile
constexpr int kMostSplitParts = 8;
constexpr int64_t kLeastSplit = 8;                       // sequences; cuBLAS is as fast with fewer
constexpr int64_t kMostHeads = 65535 / kMostSplitParts;  // a grid has 65,535 layers of blocks
constexpr int64_t kMostPacked = int64_t(256) << 20;      // bytes of a packed operand
constexpr int64_t kLeastDepth = 4096;                    // of a piece of a product

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Operand {     // where an operand lies
  int64_t rows = 0;  // of a panel, padded to whole tiles
  int panels = 0;    // of a group
  int groups = 0;
  int64_t heads = 0;
  int64_t bytes = 0;  // of all, or of a half

  constexpr Operand() = default;
  constexpr Operand(int64_t rows, int panels, int groups, int64_t heads)
      : rows(rows),
        panels(panels),
        groups(groups),
        heads(heads),
        bytes(heads * groups * panels * rows * kPanelBytes) {}
};

// How a product is divided. A thread block computes 128 rows of the left operand by `rows` of the
// right one, over a part of the depth.
struct Tiles {
  int rows = 128;
  int parts = 1;
  double clocks = 0;  // about; L2 delivers 24 bytes a clock to each multiprocessor

  constexpr Tiles() = default;
  constexpr Tiles(int64_t S, int64_t width, int64_t heads, int panels, int sms) {
    for (const int tile : {64, 128}) {
      for (int n = 1; n <= kMostSplitParts && n <= panels; ++n) {
        const int64_t tiles = round_up(width, kLeftRows) / kLeftRows * (round_up(S, tile) / tile);
        const int64_t rounds = (tiles * heads * n + sms - 1) / sms;
        const double panel = double(kLeftRows + 2 * tile) * kPanelBytes / 24;
        const double sums = double(S * heads * width) * n * 2 * sizeof(float) / (24.0 * sms);
        const double time = double(rounds) * ((panels + n - 1) / n * panel + 4000) + sums;
        if (clocks == 0 || time < clocks) rows = tile, parts = n, clocks = time;
      }
    }
  }
};

// The product of a step: of h or of the gates' gradients, and the recurrent weight.
struct Split {
  bool used;
  Tiles tiles;
  Operand weight, operand;

  constexpr Split(const SequenceParams& p, int gates, bool backward, const Device& device,
                  bool exact)
      : used(exact && device.code.sm_90a && p.S >= kLeastSplit && p.heads <= kMostHeads) {
    if (!used) return;
    const int64_t width = backward ? p.D : gates * p.D;
    const int panels = int(round_up(p.D, kPanel) / kPanel), groups = backward ? gates : 1;
    tiles = Tiles(p.S, width, p.heads, panels * groups, device.sms);
    weight = Operand(round_up(width, kLeftRows), panels, groups, p.heads);
    operand = Operand(round_up(p.S, tiles.rows), panels, groups, p.heads);
  }
};

// Packs the weights [G, N, D, D] of the heads that run to `to`, once a call.
void pack_weight(const SequenceParams& p, int gates, bool backward, void* to, const Split& split,
                 const Launch& launch);

// Computes the product of the heads that run into `sums` [S, heads, parts, width].
void multiply_split(const void* weight, const void* operand, float* sums, int64_t S, int64_t width,
                    const Split& split, const Launch& launch);

// c[m, n] = sum over k of a[m, k] b[k, n], plus what c was if `adds`; elements and rows lie as far
// apart as the strides say.
struct Matrices {
  int64_t M, N, K;
  const float* a;
  int64_t a_m, a_k;
  const float* b;
  int64_t b_k, b_n;
  float* c;
  int64_t c_m;
  bool adds;

  // A product is computed in pieces of so many rows m and so much of the depth, which fit
  // kMostPacked. Few rows would leave SMs idle, so it is the depth that is cut as far as
  // kLeastDepth.
  constexpr int64_t rows_of_piece() const {
    const int64_t least = std::min(round_up(K, kPanel), kLeastDepth);
    const int64_t most = kMostPacked / 8 / least / kLeftRows * kLeftRows;
    return std::min(round_up(M, kLeftRows), std::max<int64_t>(most, kLeftRows));
  }
  constexpr int64_t depth_of_piece() const {
    const int64_t most = kMostPacked / std::max(8 * rows_of_piece(), 4 * round_up(N, kLeftRows));
    return std::min(round_up(K, kPanel), std::max<int64_t>(most / kPanel * kPanel, kPanel));
  }
  constexpr Tiles tiles(const Device& device) const {
    return Tiles(std::min(M, rows_of_piece()), N, 1, int(depth_of_piece() / kPanel), device.sms);
  }
  // Seconds of an H200, fitted to 1,100 products (NOTEBOOK.md, "Products of great depth"). cuBLAS
  // computes whole tiles of 64 rows by 128 columns, at half its rate where there are 19 or 20 by 3
  // of them: it does not divide the depth then, and most SMs have nothing to do.
  constexpr double blas_seconds() const {
    const int64_t rows = (M + 63) / 64, columns = (N + 127) / 128;
    const bool idles = columns == 3 && (rows == 19 || rows == 20) && K >= kLeastDepth;
    return 2.0 * 64 * 128 * double(rows * columns) * double(K) / (idles ? 24e12 : 48e12) + 4e-6;
  }
  constexpr double split_seconds(const Device& device) const {
    const double pieces = std::max(1.0, double(M) / double(rows_of_piece())) *
                          std::max(1.0, double(K) / double(depth_of_piece()));
    const double packed = 16 * double(M + N) * double(K);  // bytes, read and written
    return pieces * tiles(device).clocks / 1.9e9 + packed / 2.1e12 + 16e-6;
  }
  constexpr bool split_is_faster(const Device& device) const {
    return device.code.sm_90a && split_seconds(device) < blas_seconds();
  }
  constexpr int64_t scratch_bytes(const Device& device) const {
    const int parts = tiles(device).parts;
    return 4 * depth_of_piece() * (2 * rows_of_piece() + round_up(N, kLeftRows)) +
           (parts > 1 ? 4 * parts * rows_of_piece() * N : 0);
  }
};

void multiply_matrices(const Matrices& m, const Device& device, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda::gemm
