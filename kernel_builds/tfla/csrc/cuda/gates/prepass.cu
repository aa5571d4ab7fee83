// The gate pre-pass: the effect of each tile on (b, m), a scan over tiles, and the factors of rows
// (rows.cuh).
//
// A step maps the log decay b to b + lf and the scale m to max(m + lf, li). This is a max-plus
// recurrence, whose steps compose. A warp has one tile, with two rows per lane. Sums are in double.
#include "rows.cuh"

namespace flashcell::cuda {

namespace {

constexpr int kWarps = 8;
// Lower bound of log gates: its exponential is 0, and sums stay finite.
constexpr double kShut = -1000;
constexpr double kLog2e = 1.4426950408889634;

struct Transfer {
  double decay, m;  // m of the steps in this range alone
  bool cut;         // a reset makes both independent of earlier steps
};

DEVICE double larger(double a, double b) { return a < b || isnan(b) ? b : a; }  // NaN if either is

DEVICE Transfer join(const Transfer& first, const Transfer& second) {
  if (second.cut) return second;
  const double m = larger(first.m + second.decay, second.m);
  return {first.decay + second.decay, m, first.cut};
}

DEVICE double shuffle_up(double x, int by) { return __shfl_up_sync(~0u, x, by); }
DEVICE Transfer shuffle_up(const Transfer& x, int by) {
  return {shuffle_up(x.decay, by), shuffle_up(x.m, by), bool(__shfl_up_sync(~0u, int(x.cut), by))};
}

// Inclusive scan over the lanes of a warp.
DEVICE Transfer scan(Transfer x) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const Transfer before = shuffle_up(x, by);
    if (threadIdx.x % 32 >= by) x = join(before, x);
  }
  return x;
}

DEVICE double shift(double m) { return m < kNever ? 0 : m; }
DEVICE float power(double log) { return exp2f(float(log * kLog2e)); }
DEVICE float2 split(double log) {  // splits a base-2 logarithm into an integer and a remainder
  const double x = log * kLog2e;
  const float whole = float(rint(x));
  return {whole, isinf(whole) ? 0.0f : float(x - whole)};
}

DEVICE double log_sigmoid(float x) {
  const double log = fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
  return log < kShut ? kShut : log;
}

struct Step {
  double log_f, log_i;
  bool reset, held;

  DEVICE Step(const MlstmParams& p, const Chunk& chunk, int step, int head) {
    log_f = 0, log_i = -INFINITY, reset = false, held = true;
    if (step >= chunk.steps) return;
    const int64_t row = chunk.row + step;
    // In 32 bits: a division of 64 takes as long as all the rest.
    const unsigned b = unsigned(chunk.row) / unsigned(p.T);
    const unsigned t = unsigned(row) - b * unsigned(p.T);  // a chunk lies in one row of x
    reset = p.reset != nullptr && p.reset[row];
    held = p.hold != nullptr && p.hold[row];
    if (held) return;
    const auto gate = [&](const Strided& x) {
      return static_cast<const float*>(x.data)[b * x.batch + t * x.time + head * x.head];
    };
    const float i = gate(p.i);
    log_f = log_sigmoid(gate(p.f));
    log_i = p.exponential ? (i < float(kNever) ? kNever : i) : log_sigmoid(i);
  }
  DEVICE Transfer transfer() const {  // a reset leaves m = 0
    return {log_f, reset ? larger(log_f, log_i) : log_i, reset};
  }
};

// The tile of a warp, one of [H, slots, tiles].
struct Place {
  int64_t slot;
  int tile, head;

  // The warps of a block have neighbouring heads.
  DEVICE Place(const Rows& rows, int64_t heads) {
    const unsigned groups = head_groups(heads), tiles = unsigned(rows.chunks.tiles());
    const unsigned place = blockIdx.x / groups;  // in 32 bits: 64 take far longer
    head = int(blockIdx.x % groups * kWarps + threadIdx.x / 32);
    tile = int(place % tiles), slot = place / tiles;
  }
  __host__ DEVICE static unsigned head_groups(int64_t heads) {
    return unsigned(heads + kWarps - 1) / kWarps;
  }
  DEVICE bool exists(const Rows& rows, int64_t heads) const {
    return head < heads && slot < rows.chunks.slots();
  }
  DEVICE int64_t index(const Rows& rows) const {
    return rows.slot(head, slot) * rows.chunks.tiles() + tile;
  }
};

struct GateScratch {
  double2* transfer;  // [H, slots, tiles] the tile's log decay (-inf with a reset), and its own m
  float2* m;          // [H, slots, tiles] m before and after the tile
};

DEVICE bool has_reset(const double2& transfer) { return transfer.x == -INFINITY; }

__global__ void __launch_bounds__(256) list_kernel(const Chunks chunks, Chunk* table) {
  const Sequence s = chunks.list[blockIdx.x];
  const int64_t count = (s.length + s.padding + chunks.length - 1) / chunks.length;
  for (int64_t c = threadIdx.x; c < count; c += blockDim.x) {
    table[chunks.first_slot(s) + c] = Chunks::part(s, c, chunks.length);
  }
}

__global__ void __launch_bounds__(32 * kWarps) tile_kernel(const MlstmParams p, const Rows rows,
                                                           const GateScratch scratch) {
  const Place place(rows, p.H);
  if (!place.exists(rows, p.H)) return;
  const Chunk chunk = rows.chunks.at(place.slot);
  const int first = place.tile * kTile, lane = threadIdx.x % 32;
  if (first >= chunk.steps) return;
  const Step near(p, chunk, first + 2 * lane, place.head);
  const Step far(p, chunk, first + 2 * lane + 1, place.head);
  const Transfer all = scan(join(near.transfer(), far.transfer()));
  if (lane == 31) {
    scratch.transfer[place.index(rows)] = {all.cut ? -INFINITY : all.decay, all.m};
  }
}

// Computes m at the ends of tiles. One warp handles a head of a sequence, with several tiles per
// lane.
__global__ void __launch_bounds__(32) m_kernel(const MlstmParams p, const Rows rows,
                                               const GateScratch scratch, float* last_m) {
  const int head = int(blockIdx.x % p.H), lane = threadIdx.x;
  const Sequence s = rows.chunks.sequence(blockIdx.x / p.H);
  const int64_t count = (s.length + kTile - 1) / kTile, each = (count + 31) / 32;
  const int64_t from = rows.slot(head, rows.chunks.first_slot(s)) * rows.chunks.tiles();
  const int64_t begin = lane * each < count ? lane * each : count;
  const int64_t end = begin + each < count ? begin + each : count;
  const auto tile = [&](int64_t t) -> Transfer {
    const double2 x = scratch.transfer[from + t];
    return {x.x, x.y, has_reset(x)};
  };
  Transfer own{0, -INFINITY, false};
  for (int64_t t = begin; t < end; ++t) own = join(own, tile(t));
  const Transfer before = shuffle_up(scan(own), 1);
  const int64_t state = s.index * p.H + head;
  const float* given = static_cast<const float*>(p.m);
  double m = p.exponential && given != nullptr ? given[state] : 0;
  // The sigmoid gate has m = 0, or NaN if a gate is NaN.
  const auto after = [&](const Transfer& x) {
    const double next = join({0, m, false}, x).m;
    return p.exponential || isnan(next) ? next : 0;
  };
  if (lane > 0) m = after(before);
  for (int64_t t = begin; t < end; ++t) {
    const float start = float(m);
    m = after(tile(t));
    scratch.m[from + t] = {start, float(m)};
  }
  m = __shfl_sync(~0u, m, 31);
  if (lane == 31 && last_m != nullptr) last_m[state] = float(m);
}

// The product of the decays of consecutive tiles. A NaN from before a reset ends at the reset.
struct Decay {
  float all = 1;
  bool reset = false;  // whether one of the tiles has a reset

  DEVICE void join(const GateScratch& scratch, int64_t index) {
    const double2 transfer = scratch.transfer[index];
    const float2 m = scratch.m[index];
    if (has_reset(transfer)) {
      all = isnan(m.y) ? m.y : 0.0f, reset = true;
    } else {
      all *= m.x < float(kNever) ? 0.0f : power(transfer.x + m.x - shift(m.y));
    }
  }
};

__global__ void __launch_bounds__(32 * kWarps) row_kernel(const MlstmParams p, const Rows rows,
                                                          const GateScratch scratch) {
  const Place place(rows, p.H);
  if (!place.exists(rows, p.H)) return;
  const Chunk chunk = rows.chunks.at(place.slot);
  const int first = place.tile * kTile, lane = threadIdx.x % 32;
  if (first >= chunk.steps) return;
  const Step steps[2] = {{p, chunk, first + 2 * lane, place.head},
                         {p, chunk, first + 2 * lane + 1, place.head}};
  Transfer sums[2];  // since the tile's start or the last reset
  const Transfer both = scan(join(steps[0].transfer(), steps[1].transfer()));
  const Transfer earlier = shuffle_up(both, 1);
  sums[0] = lane == 0 ? steps[0].transfer() : join(earlier, steps[0].transfer());
  sums[1] = join(sums[0], steps[1].transfer());
  const double end = __shfl_sync(~0u, sums[1].decay, 31);

  // The first step of each row's document in the tile.
  const uint32_t near = __ballot_sync(~0u, steps[0].reset),
                 far = __ballot_sync(~0u, steps[1].reset);
  const auto last_reset = [&](uint32_t near, uint32_t far) {
    const int even = near ? 2 * (31 - __clz(near)) : 0, odd = far ? 2 * (31 - __clz(far)) + 1 : 0;
    return even > odd ? even : odd;
  };
  const int last = last_reset(near, far);

  // The decays of this tile, and of the tiles before and after it in the chunk.
  const int64_t index = place.index(rows);
  Decay before, own, after;
  for (int t = 0; t * kTile < chunk.steps; ++t) {
    (t < place.tile ? before : t == place.tile ? own : after).join(scratch, index - place.tile + t);
  }

  // m at the tile's ends. If it is NaN, only `past` may become NaN. `future` and the tile's decay
  // must not: products would carry the NaN past a reset, where its factor is 0 but 0 times NaN is
  // NaN.
  const float2 m = scratch.m[index];
  if (lane == 0) {
    rows.tile_decay[index] = isnan(own.all) ? 0.0f : own.all;
    if (place.tile == 0) {
      rows.keep[rows.slot(place.head, place.slot)] = after.reset ? after.all : own.all * after.all;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = 2 * lane + i;
    if (first + step >= chunk.steps) continue;
    const Step& now = steps[i];
    const uint32_t until = (2u << lane) - 1;
    const double carried = sums[i].decay + double(m.x);
    double scale = 0;
    if (p.exponential) {
      scale = shift(float(sums[i].cut ? sums[i].m : larger(carried, sums[i].m)));
    }
    const bool seen = !now.held && !sums[i].cut && !(m.x < float(kNever));
    const bool left = !now.held && step >= last && !isnan(m.y);
    const float past = seen ? power(carried - scale) : 0.0f;
    const float future = left ? power(end - sums[i].decay + now.log_i - shift(m.y)) : 0.0f;
    const int64_t row = rows.row(place.head, chunk) + first + step;
    rows.u[row] = split(now.held ? -INFINITY : sums[i].decay - scale);
    rows.w[row] = split(now.held ? -INFINITY : now.log_i - sums[i].decay);
    rows.past[row] = past, rows.future[row] = future;
    rows.inflow[row] = seen ? past * before.all : 0.0f;
    rows.outflow[row] = after.reset ? 0.0f : future * after.all;
    rows.floor[row] = now.held ? 1.0f : power(-scale);
    if (place.head == 0) {
      rows.start[chunk.row + first + step] =
          now.held ? kTile : last_reset(near & until, far & (i == 0 ? until >> 1 : until));
    }
  }
}

struct Layout {
  Rows rows;
  GateScratch scratch;
  Chunk* table;
  int64_t bytes;

  Layout(const MlstmParams& p, void* memory) {
    Arrays arrays(memory);
    rows.chunks = chunks_of(p);
    const int64_t slots = rows.chunks.slots(), tiles = slots * rows.chunks.tiles();
    const int64_t values = p.H * rows.chunks.rows;
    table = arrays.take<Chunk>(p.sequences ? slots : 0);
    rows.chunks.table = p.sequences ? table : nullptr;
    rows.u = arrays.take<float2>(values), rows.w = arrays.take<float2>(values);
    rows.past = arrays.take<float>(values), rows.future = arrays.take<float>(values);
    rows.inflow = arrays.take<float>(values), rows.outflow = arrays.take<float>(values);
    rows.floor = arrays.take<float>(values);
    rows.start = arrays.take<int>(rows.chunks.rows);
    rows.tile_decay = arrays.take<float>(p.H * tiles);
    rows.keep = arrays.take<float>(p.H * slots);
    scratch.transfer = arrays.take<double2>(p.H * tiles);
    scratch.m = arrays.take<float2>(p.H * tiles);
    bytes = arrays.bytes();
  }
};

}  // namespace

int64_t rows_scratch(const MlstmParams& p) { return Layout(p, nullptr).bytes; }

Rows prepare_rows(const MlstmParams& p, void* scratch, float* last_m, cudaStream_t stream) {
  const Layout layout(p, scratch);
  const Rows& rows = layout.rows;
  const int64_t slots = rows.chunks.slots();
  if (p.sequences) {
    check(cudaMemsetAsync(layout.table, 0, slots * sizeof(Chunk), stream));
    launch(list_kernel, {p.S, 256, 0, stream}, rows.chunks, layout.table);
  }
  const int64_t blocks = slots * rows.chunks.tiles() * Place::head_groups(p.H);
  launch(tile_kernel, {blocks, 32 * kWarps, 0, stream}, p, rows, layout.scratch);
  launch(m_kernel, {p.S * p.H, 32, 0, stream}, p, rows, layout.scratch, last_m);
  launch(row_kernel, {blocks, 32 * kWarps, 0, stream}, p, rows, layout.scratch);
  return rows;
}

}  // namespace flashcell::cuda
