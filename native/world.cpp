#include "world.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "collectives.h"

namespace cp {
namespace {

constexpr int64_t NAP_NS = 50'000'000;  // between two looks whether the others are alive
constexpr int YIELDS = 8;               // another rank on this core may be what is waited for

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t nanoseconds) {
  timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

}  // namespace

World::World(void* memory, int rank, int num_ranks, const int* pidfds, int spins, int64_t slice_ns)
    : rank_(rank), num_ranks_(num_ranks), spins_(spins), slice_ns_(slice_ns), pidfds_(pidfds, pidfds + num_ranks) {
  auto* bytes = static_cast<uint8_t*>(memory);
  header_ = reinterpret_cast<WorldHeader*>(bytes);
  seats_ = reinterpret_cast<Seat*>(bytes + aligned(sizeof(WorldHeader)));
  pipes_ = reinterpret_cast<Pipe*>(bytes + aligned(sizeof(WorldHeader)) + aligned(num_ranks * sizeof(Seat)));
}

World::~World() {
  seats_[rank_].has_left.store(1, std::memory_order_release);
  ring_all();
  for (auto& [key, mapped] : segments_) munmap(mapped.first, mapped.second);
}

uint8_t* World::segment(int rank, int number) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  auto found = segments_.find({rank, number});
  if (found != segments_.end()) return found->second.first;
  Seat& owner = seats_[rank];
  if (number < 0 || number >= static_cast<int>(owner.num_segments.load(std::memory_order_acquire))) return nullptr;
  Segment& segment = owner.segments[number];
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", owner.pid, segment.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* address = mmap(nullptr, segment.num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (address == MAP_FAILED) return nullptr;
  segments_[{rank, number}] = {static_cast<uint8_t*>(address), segment.num_bytes};
  return static_cast<uint8_t*>(address);
}

void World::ring(const std::vector<int>& ranks) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what happened is seen before `asleep` is read
  for (int rank : ranks) {
    Seat& other = seats_[rank];
    if (rank == rank_ || other.asleep.load(std::memory_order_relaxed) == 0) continue;
    other.bell.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&other.bell), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
}

void World::ring_all() {
  std::vector<int> everybody(num_ranks_);
  std::iota(everybody.begin(), everybody.end(), 0);
  ring(everybody);
}

bool World::advance() {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  bool moved = false;
  for (Group* group : groups_) moved |= group->advance();
  return moved;
}

Status World::trouble(const std::vector<int>& awaited) {
  if (header_->stop.load(std::memory_order_acquire) == 2) return STOPPED;
  std::vector<pollfd> polled;
  for (int rank : awaited) polled.push_back({pidfds_[rank], POLLIN, 0});  // poll passes over the own, which is -1
  poll(polled.data(), polled.size(), 0);
  for (size_t i = 0; i < polled.size(); i++) {
    if (polled[i].revents != 0 || has_left(awaited[i])) {
      lost_ = awaited[i];
      return header_->stop.load(std::memory_order_acquire) == 2 ? STOPPED : LOST;
    }
  }
  return DONE;
}

Status World::wait(const std::function<bool()>& is_done, const std::vector<int>& awaited, int64_t slice_ns) {
  Seat& own = seats_[rank_];
  int64_t end = 0;
  for (int turn = 0;; turn++) {
    advance();
    if (is_done()) return DONE;
    if (turn < spins_) {
      relax();
      continue;
    }
    if (turn < spins_ + YIELDS) {
      sched_yield();
      continue;
    }
    Status status = trouble(awaited);
    if (status != DONE) {
      advance();  // what it did before it ended, or stopped, counts
      return is_done() ? DONE : status;
    }
    int64_t now = now_ns();
    if (end == 0) end = now + slice_ns;
    if (now >= end) return NOT_YET;
    own.asleep.fetch_add(1);
    uint32_t heard = own.bell.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool moved = advance();
    if (!moved && !is_done()) sleep_on(own.bell, heard, std::min(end - now, NAP_NS));
    own.asleep.fetch_sub(1);
  }
}

void World::add(Group* group) {
  std::lock_guard<std::recursive_mutex> guard(lock_);  // another thread may be advancing the others
  groups_.push_back(group);
}

void World::remove(Group* group) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
}

void World::stop(const char* reason, size_t num_bytes) {
  uint32_t nobody = 0;
  if (!header_->stop.compare_exchange_strong(nobody, 1)) return;
  size_t length = std::min(num_bytes, REASON_BYTES - 1);
  std::memcpy(header_->reason, reason, length);
  header_->reason[length] = 0;
  header_->stopper = rank_;
  header_->stop.store(2, std::memory_order_release);
  ring_all();
}

}  // namespace cp
