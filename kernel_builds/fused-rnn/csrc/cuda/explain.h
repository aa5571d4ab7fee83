// Describes as text how a call runs on CUDA, for users and tests, with the functions of the planner
// that the launches call too. It is host code without CUDA, so the CPU library has it as well.
//
// Every line is a key and its values, separated by tabs: `engine grid`, `forward.units 24`, `limit
// NAME USED LIMIT UNIT` (a limit of the engine that runs) and `refused NAME USED LIMIT UNIT` (a
// limit that keeps a faster engine from this call).
#pragma once
#include <algorithm>
#include <string>

#include "plan.h"

namespace flashcell::cuda {

class Explanation {
 public:
  // `input` is the width of a layer's input that is multiplied too, or 0.
  Explanation(const CellSizes& cell, const Problem& problem, int64_t input, const Device& device)
      : cell_(cell),
        p_(with_input(problem, input, cell, device)),
        device_(device),
        engine_(select_engine(p_, device)),
        backward_(select_backward(problem, device)),
        other_(select_other(problem, device, false)),
        stepwise_(select_stepwise(problem, device, false)),
        own_(select_own(problem, device)),
        matrix_(select_matrix(problem, device)) {
    add("engine", kEngineNames[int(engine_)]);
    if (input > 0) add("input", p_.I > 0 ? "engine" : "product");
    std::string runs;
    for (int i = 0; i < kEngineCount; ++i) {
      if (!can_run(Engine(i), p_, device_)) continue;
      runs += std::string(runs.empty() ? "" : ",") + kEngineNames[i];
    }
    add("runs", runs);
    explain_refusals();
    if (engine_ != matrix_) {
      add("instead_of", kEngineNames[int(engine_ == Engine::kBatch  ? other_
                                         : engine_ == Engine::kWide ? stepwise_
                                         : engine_ == Engine::kGemm ? own_
                                                                    : matrix_)]);
    }
    if (backward_ != engine_) add("backward", kEngineNames[int(backward_)]);
    if (engine_ == Engine::kBlock) explain_block();
    if (engine_ == Engine::kCluster) explain_cluster();
    if (engine_ == Engine::kGrid) explain_grid();
    if (engine_ == Engine::kFma) explain_fma();
    if (engine_ == Engine::kWide) explain_wide();
    if (engine_ == Engine::kBatch) explain_batch();
  }

  const std::string& text() const { return text_; }

 private:
  const CellSizes cell_;
  const Problem p_;
  const Device device_;
  const Engine engine_;
  const Engine backward_;  // what runs the backward pass
  const Engine other_;     // what would run the forward pass without the batch engine
  const Engine stepwise_;  // the same without the batch and wide engines
  const Engine own_;       // ... without the batch, wide and gemm engines
  const Engine matrix_;    // ... without the batch, wide, gemm and fma engines
  std::string text_;

  static Problem with_input(Problem p, int64_t I, const CellSizes& cell, const Device& device) {
    if (I > 0 && multiplies_input(p, I, cell.splits_gradient, device)) p.I = I;
    return p;
  }
  void add(const std::string& key, const std::string& value) { text_ += key + "\t" + value + "\n"; }
  void add(const std::string& key, int64_t value) { add(key, std::to_string(value)); }
  void add(const std::string& key, const std::string& prefix, const Limit& limit) {
    add(key, prefix + limit.name + "\t" + std::to_string(limit.used) + "\t" +
                 std::to_string(limit.limit) + "\t" + limit.unit);
  }
  void refuse(const Limit& limit) {
    if (!limit.holds()) add("refused", "", limit);
  }

  // Limits are listed in the order in which select_engine tests them.
  void explain_refusals() {
    for (const Limit& limit : limits_of_all(p_)) refuse(limit);
    if (!all_hold(limits_of_all(p_))) return;
    refuse(limit_of_matrix(p_, device_));
    if (!limit_of_matrix(p_, device_).holds()) {
      for (const Limit& limit : fma::limits(p_.D, p_.gates, p_.io_bytes, device_)) refuse(limit);
      if (p_.D <= fma::kWidest) return;
      for (const Limit& limit : wide::limits(wide_sizes(p_), p_.T, device_)) refuse(limit);
      return;
    }
    if (matrix_ == Engine::kBlock) return;
    refuse(block::limit(p_.D, p_.io_bytes, device_));
    if (matrix_ == Engine::kCluster) return;
    for (const Limit& limit : cluster::limits(p_.D, p_.io_bytes, device_)) refuse(limit);
    if (cluster::fits(p_.D, p_.io_bytes, device_)) {
      refuse(cluster::limit_of_speed(p_.S, p_.N, p_.D, device_));
    }
    if (matrix_ == Engine::kGrid) return;
    refuse(grid::limit_of_code(device_));
    const auto [forward, backward] = grid::shapes_of_every_cell(p_.gates, p_.io_bytes);
    add_grid_limits("refused", "forward ", forward, false);
    add_grid_limits("refused", "backward ", backward, false);
  }

  // Adds the limits that hold, or those that do not. Limit 0 applies to every engine and is
  // skipped; limit 1 is the same for both passes and gets no direction.
  void add_grid_limits(const char* key, const std::string& direction, const grid::Shape& s,
                       bool hold) {
    const auto limits = grid::limits(s, p_.D, device_);
    for (size_t i = 1; i < limits.size(); ++i) {
      if (limits[i].holds() == hold) add(key, i > 1 ? direction : "", limits[i]);
    }
  }

  void add_shared_bytes(const std::string& direction, int64_t bytes) {
    add(direction + ".shared_bytes", bytes);
    add("limit", direction + " ", Limit{"shared memory", bytes, device_.shared_bytes, "bytes"});
  }

  void explain_block() {
    const int tile = block_tile(p_, device_), width = block::compiled_width(p_.D);
    const bool turing = device_.code.is_turing();
    add("tile", tile);
    add("thread_blocks", p_.N * grid::divide_up(p_.S, tile));
    add("width", width);
    add("forward.threads", block::forward_threads(width));
    add("backward.threads", block::backward_threads(width));
    add_shared_bytes("forward", block::forward_shared_bytes(cell_, width, p_.io_bytes, turing));
    add_shared_bytes("backward", block::backward_shared_bytes(cell_, width, p_.io_bytes, turing));
  }

  void explain_cluster() {
    const int tile = cluster::tile(p_.S, p_.N, p_.D, device_);
    add("tile", tile);
    add("clusters", p_.N * grid::divide_up(p_.S, tile));
    add("members", cluster::members(p_.D));
    add("units", cluster::kUnits);
    add("limit", "", cluster::limits(p_.D, p_.io_bytes, device_)[1]);
    if (p_.D > 256) add("limit", "", cluster::limit_of_speed(p_.S, p_.N, p_.D, device_));
    add_shared_bytes("forward", cluster::forward_shared_bytes(cell_, p_.D, tile));
    add_shared_bytes("backward", cluster::backward_shared_bytes(cell_, p_.D, tile));
  }

  void explain_fma() {
    const int tile = fma::tile(p_.S, p_.N, p_.D, p_.gates, device_);
    const int width = fma::compiled_width(p_.D), units = fma::units(p_.gates, p_.D);
    const fma::Division back = fma::backward_division(p_.gates, width);
    add("tile", tile);
    add("clusters", p_.N * fma::divide_up(p_.S, tile));
    add("members", fma::members(p_.gates, p_.D));
    add("units", units);
    add("width", width);
    add("forward.threads", fma::forward_division(p_.gates, width).threads(units));
    add("backward.threads", back.threads(fma::uses_cluster(p_.gates, width) ? width : p_.D));
    add_shared_bytes("forward", fma::forward_memory(cell_, p_.D, tile).bytes());
    add_shared_bytes("backward", fma::backward_memory(cell_, p_.D, tile).bytes());
  }

  void explain_wide() {
    const auto partition = wide::partition(wide_sizes(p_), device_);
    const int units = partition.units, tile = partition.tile;
    add("tile", tile);
    add("pass", wide::pass_of(tile));
    add("groups", partition.groups);
    add("heads", partition.heads);
    add("launches", wide::divide_up(p_.N, partition.heads));
    add("members", partition.members);
    add("units", units);
    const auto add_memory = [&](const std::string& direction, const wide::Product& product) {
      const auto m = wide::memory(product, cell_, units, tile, device_.shared_bytes);
      add(direction + ".staged", m.piece);
      add(direction + ".held", m.held);
      add_shared_bytes(direction, m.bytes());
    };
    add_memory("forward", wide::forward_product(p_.gates, p_.D, units));
    add_memory("backward", wide::backward_product(p_.gates, p_.D, units));
  }

  void explain_batch() {
    const batch::Sizes sizes = batch_sizes(p_);
    const batch::Tile tile = batch::tiles(p_.gates, p_.io_bytes)[batch::best_tile(sizes, device_)];
    const int64_t tiles = batch::count_tiles(tile, sizes);
    add("tile", tile.rows());
    add("units", tile.units);
    add("takes_turns", tile.turns ? "yes" : "no");
    add("tiles", tiles);
    add("thread_blocks", batch::count_blocks(tiles, device_));
    add("launches", sizes.launches());
    batch::Sizes saving = sizes;
    saving.saves = true;
    const batch::Tile saves =
        batch::tiles(p_.gates, p_.io_bytes)[batch::best_tile(saving, device_)];
    add("saving.tile", saves.rows());
    add("saving.units", saves.units);
    add("saving.takes_turns", saves.turns ? "yes" : "no");
    add_shared_bytes("forward", tile.shared_bytes(p_.gates, sizes.keeps));
  }

  void explain_grid() {
    explain_pass("forward", grid::forward_variants(cell_.gates, p_.io_bytes), [&](auto v) {
      return grid::forward_shape(cell_.gates, cell_.states, p_.io_bytes, v.wide, v.units);
    });
    explain_pass("backward", grid::backward_variants(cell_.gates, p_.io_bytes), [&](auto v) {
      return grid::backward_shape(cell_.gates, cell_.states, cell_.saved, cell_.bias_rows,
                                  p_.io_bytes, v.split, v.wide, v.units);
    });
  }

  template <typename ShapeOf>
  void explain_pass(const std::string& direction, const grid::Variants& variants,
                    ShapeOf shape_of) {
    const bool marked = false;  // no step is reset or held
    for (int i = 0; i < variants.count; ++i) {
      const grid::Shape s = shape_of(variants.list[i]);
      const int64_t together = grid::expected_together(s, device_);
      if (grid::can_run(s, marked, p_.S, p_.N, p_.D, device_) &&
          grid::has_room(s, p_.S, p_.N, p_.D, together, device_)) {
        return explain_shape(direction, s, together);
      }
    }
  }

  void explain_shape(const std::string& direction, const grid::Shape& s, int64_t together) {
    const std::string key = direction + ".";
    const int64_t heads = grid::heads_at_once(s, p_.N, p_.D, together);
    const int64_t groups = grid::groups_of(s, p_.S, heads, p_.D, together);
    const int64_t chunks = grid::blocks_of_depth(s, p_.D) * s.panels;
    const int64_t held = std::min<int64_t>(chunks, grid::held_chunks(s));
    add(key + "units", s.units);
    add(key + "warps", grid::kWarps);
    add(key + "split", s.split);
    add(key + "tile", grid::tile_columns(s));
    add(key + "members", grid::thread_blocks(s, p_.D));
    add(key + "launches", grid::divide_up(p_.N, heads));
    add(key + "heads", heads);
    add(key + "groups", groups);
    add(key + "tiles", grid::divide_up(grid::tiles_of(s, p_.S), groups));
    add(key + "chunks_held", held);
    add(key + "chunks_shared", chunks - held);
    add(key + "shared_bytes", grid::shared_bytes(s, p_.D));
    add_grid_limits("limit", direction + " ", s, true);
  }
};

inline std::string explain(const CellSizes& cell, const Problem& problem, int64_t input,
                           const Device& device) {
  return Explanation(cell, problem, input, device).text();
}

}  // namespace flashcell::cuda
