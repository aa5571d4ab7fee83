// The asynchronous work of emulated threads: copies to shared memory, and products.
#include "machine.h"

namespace emulator {

namespace {

void land(const Copy& copy) {
  char* to = shared_at(copy.to, copy.bytes);
  if (copy.from) {
    std::memcpy(to, copy.from, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
}

}  // namespace

// Between issue and wait a copy may read and land at any time. The emulator does both at once, when
// it is issued or when it is waited for.
void issue_copy(const Copy& copy) {
  char* to = shared_at(copy.to, copy.bytes);
  if (reinterpret_cast<uintptr_t>(copy.from) % copy.bytes) fail("copy from a misaligned address");
  if (machine.options.early) return land(copy);
  std::memset(to, 0xff, copy.bytes);
  machine.threads[machine.thread.x].issued.push_back(copy);
}
void commit_copies() {
  Thread& thread = machine.threads[machine.thread.x];
  thread.pending.push_back(std::move(thread.issued));
  thread.issued.clear();
}
void wait_copies(int pending) {
  auto& groups = machine.threads[machine.thread.x].pending;
  for (; int(groups.size()) > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) land(copy);
  }
}

void arrive_after_copies(std::function<void()> arrive) {
  std::vector<Copy>& issued = machine.threads[machine.thread.x].issued;
  machine.landings.push_back([copies = std::move(issued), arrive] {
    for (const Copy& copy : copies) land(copy);
    arrive();
  });
  issued.clear();
}
bool land_oldest() {
  if (machine.landings.empty()) return false;
  const auto landing = std::move(machine.landings.front());
  machine.landings.pop_front();
  landing();
  return true;
}

void issue_product(std::function<void()> product) {
  if (machine.options.early) return product();
  machine.threads[machine.thread.x].products.push_back(std::move(product));
}
void commit_products() {
  Thread& thread = machine.threads[machine.thread.x];
  thread.running.push_back(std::move(thread.products));
  thread.products.clear();
}
void wait_products(int pending) {
  Thread& thread = machine.threads[machine.thread.x];
  while (int(thread.running.size()) > pending) {
    const auto group = std::move(thread.running.front());
    thread.running.pop_front();
    for (const auto& product : group) product();
  }
}

}  // namespace emulator
