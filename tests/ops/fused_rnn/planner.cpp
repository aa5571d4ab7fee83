// Prints what the planner and the launches in csrc/cuda decide for the calls on standard input. It
// does not use explain.h: it lists the shapes itself, and asks in the order of forward_grid and
// backward_grid.
#include <iostream>
#include <string>
#include <vector>

#include "cells/all.h"
#include "cuda/plan.h"

using namespace flashcell::cuda;
using flashcell::AllCells, flashcell::CellList;

template <typename Key, typename Value>
void print(const Key& key, const Value& value) {
  std::cout << key << ' ' << value << '\n';
}

void print_pass(const std::string& way, const std::vector<grid::Shape>& shapes, const Problem& p,
                const Device& d) {
  for (const grid::Shape& s : shapes) {
    if (!grid::takes(s, false, p.S, p.N, p.D, d) || !grid::fits(s, p.D, d)) continue;
    if (s.split > 1 && d.code.arch < 90) continue;
    const long together =
        s.split > 2 ? d.sms / 18 * (16 / s.split) * s.split : d.sms / s.split * s.split;
    const long members = grid::thread_blocks(s, p.D), tiles = (p.S + 8 * s.wide - 1) / (8 * s.wide);
    const long at_most = d.sms / (p.N * ((p.D + s.units - 1) / s.units));
    if (together < members) continue;
    if (s.split > 2 && together / (p.N * members) < std::min(at_most, tiles)) continue;
    const long a_launch = together / members, launches = (p.N + a_launch - 1) / a_launch;
    const long heads = (p.N + launches - 1) / launches;
    const long groups = std::max(1l, std::min(tiles, together / (heads * members)));
    const long chunks = grid::blocks_of_depth(s, p.D) * s.panels;
    const long held = std::min<long>(chunks, grid::held_chunks(s));
    print(way + ".units", s.units), print(way + ".warps", 8), print(way + ".split", s.split);
    print(way + ".tile", 8 * s.wide), print(way + ".members", members);
    print(way + ".launches", (p.N + heads - 1) / heads), print(way + ".heads", heads);
    print(way + ".groups", groups), print(way + ".tiles", (tiles + groups - 1) / groups);
    print(way + ".chunks_held", held), print(way + ".chunks_shared", chunks - held);
    print(way + ".shared_bytes", grid::shared_bytes(s, p.D));
    return;
  }
}

template <typename Cell>
void print_plan(Problem p, const Device& d) {
  constexpr int G = Cell::kGates, K = Cell::kStates, V = Cell::kSaved, R = Cell::kBias;
  const int e = p.io_bytes;
  const bool keeps = K - !kSizesOf<Cell>.reads_h == 1;
  p.gates = G, p.keeps_state = keeps;
  const char* names[] = {"block", "cluster", "grid", "step", "gemm", "fma", "batch"};
  const Engine engine = select_engine(p, d);
  const int tile = tile_of(engine, p, d);
  const long tiles = (p.S + tile - 1) / tile;
  print("engine", names[int(engine)]);
  std::string runs;
  const Engine own = select_matrix(p, d);
  if (engine == Engine::kGemm) print("instead_of", names[int(select_own(p, d))]);
  if (engine == Engine::kFma) print("instead_of", names[int(own)]);
  if (engine == Engine::kBatch) print("instead_of", names[int(select_other(p, d, false))]);
  if (own == Engine::kBlock) runs += "block,";
  if (own != Engine::kStep && cluster::fits(p.D, e, d)) runs += "cluster,";
  if (own != Engine::kStep && grid::fits_every_cell(G, e, p.D, d)) runs += "grid,";
  runs += p.D * e % 16 == 0 && p.aligned && p.S <= 524280 ? "step,gemm" : "step";
  const long wide = p.D <= 64 ? (p.D <= 32 ? 32 : 64) : p.D <= 96 ? 96 : p.D <= 128 ? 128 : 256;
  const long own_units = G == 1 ? std::min(wide, 128l) : wide <= 96 ? wide : wide == 128 ? 64 : 32;
  const long blocks = (p.D + own_units - 1) / own_units;
  const bool fma = e == 4 && p.T > 1 && p.D % 4 == 0 && p.D <= 256;
  if (fma && (blocks == 1 || d.code.arch >= 90)) runs += ",fma";
  const bool multiplies = e == 2 || (p.tf32 && d.code.arch >= 80);
  const bool batch = multiplies && p.T > 1 && p.D * e % 16 == 0 && d.code.sm_90a;
  print("runs", runs + (batch && p.S * p.N * p.D < 1l << 30 ? ",batch" : ""));
  constexpr CellSizes sizes = kSizesOf<Cell>;
  const Engine backward = select_backward(p, d);
  if (backward != engine) print("backward", names[int(backward)]);
  if (engine == Engine::kFma) {
    const long units = ((p.D + blocks - 1) / blocks + 3) / 4 * 4;
    const long there = G == 1 ? (units + 3) / 4 * 8 : units * (wide <= 128 ? 4 : 8);
    const long back = blocks > 1 ? 256 : (p.D + 3) / 4 * (G == 1 ? 8 : 16);
    print("tile", tile), print("clusters", tiles * p.N), print("members", blocks);
    print("units", units), print("width", wide);
    print("forward.threads", (there + 31) / 32 * 32);
    print("backward.threads", (back + 31) / 32 * 32);
    print("forward.shared_bytes", fma::forward_memory(sizes, p.D, tile).bytes());
    print("backward.shared_bytes", fma::backward_memory(sizes, p.D, tile).bytes());
  }
  if (engine == Engine::kBatch) {
    const batch::Sizes sizes{p.S, p.N, p.D, G, e, keeps};
    const batch::Tile t = batch::tiles(G, e)[batch::best_tile(sizes, d)];
    const long rows = 64 * t.blocks * (t.turns ? 1 : 2);
    const long stage = 128 * (rows + t.units * G);
    const long at_once = std::max(1l, (e == 4 ? 70'000'000 : 45'000'000) / (p.D * p.D * G * e));
    const long launches = (p.N + at_once - 1) / at_once, heads = (p.N + launches - 1) / launches;
    const long count = heads * ((p.S + rows - 1) / rows) * ((p.D + t.units - 1) / t.units);
    const long rounds = (count + d.sms - 1) / d.sms;
    print("tile", rows), print("units", t.units);
    print("takes_turns", t.turns ? "yes" : "no"), print("tiles", count);
    print("thread_blocks", (count + rounds - 1) / rounds), print("launches", launches);
    const batch::Sizes saving{p.S, p.N, p.D, G, e, keeps, true};
    const batch::Tile saves = batch::tiles(G, e)[batch::best_tile(saving, d)];
    print("saving.tile", 64 * saves.blocks * (saves.turns ? 1 : 2));
    print("saving.units", saves.units), print("saving.takes_turns", saves.turns ? "yes" : "no");
    const long kept_units = (t.units + 7) / 8 * 8;
    const long kept = keeps ? (!t.turns ? 1 : t.units > 32 ? 2 : 4) * rows * kept_units * 4 : 0;
    const long stages = std::min(8l, ((225 << 10) - kept) / stage);
    print("forward.shared_bytes", 1040 + stages * (stage + 16) + kept);
  }
  if (engine == Engine::kBlock) {
    const bool turing = d.code.arch < 80;
    const int width = p.D <= 32 ? 32 : p.D <= 64 ? 64 : 128;
    print("tile", tile), print("thread_blocks", tiles * p.N), print("width", width);
    print("forward.threads", 4 * width), print("backward.threads", 2 * width);
    print("forward.shared_bytes", block::forward_shared_bytes(sizes, width, e, turing));
    print("backward.shared_bytes", block::backward_shared_bytes(sizes, width, e, turing));
  }
  if (engine == Engine::kCluster) {
    print("tile", tile), print("clusters", tiles * p.N), print("members", (p.D + 31) / 32);
    print("units", 32);
    print("forward.shared_bytes", cluster::forward_shared_bytes(sizes, p.D, tile));
    print("backward.shared_bytes", cluster::backward_shared_bytes(sizes, p.D, tile));
  }
  if (engine == Engine::kGrid) {
    const auto forward = [&](int wide, int units) {
      return grid::forward_shape(G, K, e, wide, units);
    };
    const auto backward = [&](int split, int wide, int units) {
      return grid::backward_shape(G, K, V, R, e, split, wide, units);
    };
    std::vector<grid::Shape> there, back;
    if (G == 4 && e == 2) {
      there = {forward(2, 24), forward(1, 24)}, back = {backward(2, 2, 24), backward(2, 1, 24)};
    }
    there.push_back(forward(2, 16)), there.push_back(forward(1, 16));
    back.push_back(backward(G, 2, 16)), back.push_back(backward(G, 1, 16));
    if (G == 4) back.push_back(backward(2, 1, 16));
    back.push_back(backward(1, 1, 16));
    print_pass("forward", there, p, d), print_pass("backward", back, p, d);
  }
  std::cout << '\n';
}

template <typename... Cells>
void print_plan_of(CellList<Cells...>, const std::string& name, const Problem& p, const Device& d) {
  ((name == Cells::kName ? print_plan<Cells>(p, d) : void()), ...);
}

// Whether the step engine alone runs a call that clips states.
bool only_step_clips(Problem p, const Device& d) {
  p.gates = 4, p.clips = true;
  for (int engine = 0; engine < kEngineCount; ++engine) {
    if (Engine(engine) != Engine::kStep && can_run(Engine(engine), p, d)) return false;
  }
  return select_engine(p, d) == Engine::kStep && select_backward(p, d) == Engine::kStep;
}

int main() {
  std::string cell;
  Problem p{};
  Device d{};
  p.aligned = true;
  while (std::cin >> cell >> p.S >> p.T >> p.N >> p.D >> p.io_bytes >> p.tf32 >> d.arch >>
         d.code.arch >> d.code.sm_90a >> d.sms >> d.shared_bytes) {
    if (!only_step_clips(p, d)) return 1;
    print_plan_of(AllCells(), cell, p, d);
  }
}
