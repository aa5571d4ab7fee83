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

// How the wide engine divides a call, computed from its description alone.
struct Wide {
  struct Way {
    long staged, held, bytes;
  };
  long heads = 0, groups, units, tile;
  Way forward, backward;
};
Wide::Way wide_way(long rows, long depth, long task_rows, long units, long tile, CellSizes c,
                   long shared_bytes) {
  const auto up = [](long a, long b) { return (a + b - 1) / b * b; };
  const long columns = tile <= 2 ? 2 : tile <= 4 ? 4 : 8, tasks = up(rows, task_rows) / task_rows;
  const long chunks = up(std::min(depth, 1536l), 128) / 128;
  const long slices = std::min(std::max(12 / tasks, 1l), chunks);
  const long sums = std::max(slices * tasks * 4 * columns, c.bias_rows * units * columns);
  const long places = up(14 * tile, 4) + 8 * tile, states = up(tile * units * c.states, 4);
  const long before = places + states + up(sums, 4), whole = std::min(1536l, up(depth, 128));
  const long room = shared_bytes / 4 - before;
  long held = depth;
  long staged = std::min(whole, std::max(0l, room - rows * depth) / columns / 128 * 128);
  if (staged < std::min(256l, whole)) {
    staged = std::min(whole, columns < 8 ? 1536l : 1024l);
    held = std::max(0l, room - columns * staged) / rows / 128 * 128;
  }
  return {staged, held, 4 * (before + rows * held + columns * staged)};
}
Wide divide(const Problem& p, CellSizes c, const Device& d) {
  const CellSizes most{c.gates, 4, c.gates + 1, 7, true, true};
  for (long heads = std::min<long>(p.N, d.sms); heads > 0; --heads) {
    for (long groups = (p.S + 7) / 8; groups > 0; --groups) {
      const long blocks = d.sms / heads / groups, tile = (p.S + groups - 1) / groups;
      if (blocks == 0 || tile > 64) continue;
      const long units = (p.D + blocks - 1) / blocks, task = c.gates == 3 ? 3 : 4;
      if (units * (tile <= 2 ? 2 : tile <= 4 ? 4 : 8) > 384) continue;
      const auto way = [&](bool back, const CellSizes& cell) {
        return back ? wide_way(units, c.gates * p.D, 4, units, tile, cell, d.shared_bytes)
                    : wide_way(c.gates * units, p.D, task, units, tile, cell, d.shared_bytes);
      };
      const long rows[] = {c.gates * units, units}, depth[] = {p.D, c.gates * p.D};
      bool fits = true;
      for (const bool back : {false, true}) {
        const long held = way(back, most).held, streamed = (depth[back] - held) * rows[back];
        const long tasks = (rows[back] + (back ? 3 : task - 1)) / (back ? 4 : task);
        if (held == 0 || 4 * streamed * blocks > 50'000'000) fits = false;
        if (heads * groups > 1 && (streamed > 0 || tasks > 12)) fits = false;
      }
      if (!fits) continue;
      return {heads, groups, units, tile, way(false, c), way(true, c)};
    }
  }
  return {};
}

template <typename Cell>
void print_plan(Problem p, const Device& d) {
  constexpr int G = Cell::kGates, K = Cell::kStates, V = Cell::kSaved, R = Cell::kBias;
  const int e = p.io_bytes;
  const bool keeps = K - !kSizesOf<Cell>.reads_h == 1;
  p.gates = G, p.keeps_state = keeps;
  const char* names[] = {"block", "cluster", "grid", "step", "gemm", "fma", "batch", "wide"};
  const Engine engine = select_engine(p, d);
  const int tile = tile_of(engine, p, d);
  const long tiles = (p.S + tile - 1) / tile;
  print("engine", names[int(engine)]);
  std::string runs;
  const Engine own = select_matrix(p, d);
  if (engine == Engine::kGemm) print("instead_of", names[int(select_own(p, d))]);
  if (engine == Engine::kFma) print("instead_of", names[int(own)]);
  if (engine == Engine::kWide) print("instead_of", names[int(select_stepwise(p, d, false))]);
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
  if (batch && p.S * p.N * p.D < 1l << 30) runs += ",batch";
  const bool exact_can = e == 4 && p.T > 1 && p.D % 4 == 0 && p.D > 256 && d.code.sm_90a;
  const Wide wide_form = exact_can ? divide(p, kSizesOf<Cell>, d) : Wide{};
  print("runs", runs + (wide_form.heads > 0 ? ",wide" : ""));
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
  if (engine == Engine::kWide) {
    const Wide& w = wide_form;
    print("tile", w.tile), print("pass", w.tile <= 2 ? 2 : w.tile <= 4 ? 4 : 8);
    print("groups", (p.S + w.tile - 1) / w.tile), print("heads", w.heads);
    print("launches", (p.N + w.heads - 1) / w.heads);
    print("members", (p.D + w.units - 1) / w.units), print("units", w.units);
    print("forward.staged", w.forward.staged), print("backward.staged", w.backward.staged);
    print("forward.held", w.forward.held), print("backward.held", w.backward.held);
    print("forward.shared_bytes", w.forward.bytes);
    print("backward.shared_bytes", w.backward.bytes);
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
