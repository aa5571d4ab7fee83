// What runs an emulated kernel: a fiber for every CUDA thread of a block, block after block.
//
// A fiber runs until it waits: at a barrier of the block, or in a collective of its warp (a
// shuffle, ldmatrix, mma), whose answers the last lane to arrive works out for all 32. A warp runs
// from barrier to barrier before the next one starts: in lockstep, a collective would do for a
// barrier that is missing. README.md says what this models and what it does not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

namespace emulator {

constexpr int kWarpSize = 32;

// FLASHCELL_EMULATOR, read at every launch: words from `backwards` (threads and blocks run last
// first), `early` (a copy lands when it is issued, not when it is waited for), `arch=<90 for 9.0>`,
// `code=<80: compiled for 8.0; 90 or 90a; 0: for no such GPU; arch's own>`, `processors=<count>`
// and `shared=<KB of a block>`.
struct Options {
  bool backwards = false, early = false;
  int arch = 90, code = -1, processors = 132, shared_bytes = 227 << 10;  // an H200's
  bool sm_90a = false;                                                   // in the code
};
Options read_options();
int current_gpu();  // its index: every GPU that options describe is one of its own

struct Index {  // of one dimension only
  unsigned x = 0;
};

struct Copy {  // cp.async: `bytes` zeros without a source
  uint32_t to;
  const void* from;
  int bytes;
};

struct Thread {
  char* stack = nullptr;
  void* stack_pointer = nullptr;
  bool alive = false;
  std::vector<Copy> issued;                     // since the last commit
  std::deque<std::vector<Copy>> pending;        // committed groups, oldest first
  std::vector<std::function<void()>> products;  // wgmma: likewise
  std::deque<std::vector<std::function<void()>>> running;
};

struct Warp {
  int arrived = 0;
  uint64_t generation = 0;        // counts what the warp has done together
  const void* kind = nullptr;     // of the collective that lanes wait in
  uint32_t given[kWarpSize][10];  // by lane; mma gives most
  uint32_t answer[kWarpSize][4];
};

struct Machine {
  Options options;
  Index thread, block, block_size, grid_size;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::function<void()> body;                  // the kernel and its arguments
  std::deque<std::function<void()>> landings;  // of copies that a barrier waits for
  char* shared = nullptr;                      // dynamic shared memory of the block
  uint32_t shared_bytes = 0;
  void* main_stack = nullptr;
  unsigned alive = 0, at_barrier = 0;
  uint64_t barriers = 0, idle = 0;  // switches since anything happened
  struct {
    unsigned arrived = 0;
    uint64_t generation = 0;
  } named[16];  // barriers of some threads
  const char* failure = nullptr;

  int lane() const { return int(thread.x % kWarpSize); }
  Warp& warp() { return warps[thread.x / kWarpSize]; }
};
extern Machine machine;

// Runs the kernel, or throws what it did wrong.
void launch(const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
            std::function<void()> body);
// Dynamic shared memory that a kernel may ask for beyond 48 KB; false where there is not so much.
bool allow_shared(const void* kernel, int bytes);

// ---- What threads do ----

[[noreturn]] void fail(const char* what);  // ends the launch
// To the next living one of `count` threads.
void yield(unsigned first, unsigned count);
void yield_to_block();
void barrier();  // of the threads that have not returned
void barrier(int name, unsigned threads);
char* shared_at(uint32_t address, int bytes);
void issue_copy(const Copy& copy);
void commit_copies();
void wait_copies(int pending);
// The thread's copies since the last commit, and what follows their landing; then runs the oldest
// such, of any thread, and says whether there was one.
void arrive_after_copies(std::function<void()> arrive);
bool land_oldest();
void issue_product(std::function<void()> product);
void commit_products();
void wait_products(int pending);

template <typename Compute>
inline constexpr char kKind = 0;

// Every lane gives words; compute(warp) fills the answers of all.
template <int kGiven, int kAnswers, typename Compute>
void collective(const uint32_t (&given)[kGiven], uint32_t (&answer)[kAnswers], Compute compute) {
  Warp& warp = machine.warp();
  if (machine.block_size.x % kWarpSize) fail("a collective of a warp that is not whole");
  if (warp.arrived == 0) warp.kind = &kKind<Compute>;
  if (warp.kind != &kKind<Compute>) fail("lanes of a warp are in different collectives");
  static_assert(kGiven <= 10 && kAnswers <= 4);
  const int lane = machine.lane();
  std::memcpy(warp.given[lane], given, sizeof given);
  machine.idle = 0;
  if (++warp.arrived == kWarpSize) {
    compute(warp);
    warp.arrived = 0, ++warp.generation;
  } else {
    // Only the warp's own: it runs ahead of the others as far as barriers let it.
    const unsigned first = machine.thread.x - lane;
    for (const uint64_t here = warp.generation; warp.generation == here;) yield(first, kWarpSize);
  }
  std::memcpy(answer, warp.answer[lane], sizeof answer);
}

}  // namespace emulator
