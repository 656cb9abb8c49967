#include "host_context.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
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

constexpr int64_t NAP_NS = 50'000'000;  // between two checks that the awaited ranks are alive
constexpr int YIELDS = 8;               // sched_yield calls before sleeping: an awaited rank may share this core

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t value, int64_t nanoseconds) {
  timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

// Whether an open file is the sealed memory of this user that its rank has registered.
bool is_registered(int fd, const Segment& segment) {
  struct stat status;
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         status.st_ino == segment.inode && status.st_uid == geteuid() &&
         static_cast<uint64_t>(status.st_size) == segment.num_bytes;
}

}  // namespace

HostContext::HostContext(void* memory, int rank, int num_ranks, const int* pidfds, int spins, int64_t slice_ns)
    : rank_(rank), num_ranks_(num_ranks), spins_(spins), slice_ns_(slice_ns), pidfds_(pidfds, pidfds + num_ranks) {
  auto* bytes = static_cast<uint8_t*>(memory);
  header_ = reinterpret_cast<HostHeader*>(bytes);
  slots_ = reinterpret_cast<RankSlot*>(bytes + aligned(sizeof(HostHeader)));
  pipes_ = reinterpret_cast<Pipe*>(bytes + aligned(sizeof(HostHeader)) + aligned(num_ranks * sizeof(RankSlot)));
}

HostContext::~HostContext() {
  slots_[rank_].has_left.store(1, std::memory_order_release);
  notify_all();
  for (auto& [key, mapped] : segments_) munmap(mapped.first, mapped.second);
}

uint8_t* HostContext::segment(int rank, int number) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  auto found = segments_.find({rank, number});
  if (found != segments_.end()) return found->second.first;
  RankSlot& owner = slots_[rank];
  if (number < 0 || number >= static_cast<int>(owner.num_segments.load(std::memory_order_acquire))) return nullptr;
  Segment& segment = owner.segments[number];
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", owner.pid, segment.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return nullptr;
  void* address = MAP_FAILED;
  if (is_registered(fd, segment))
    address = mmap(nullptr, segment.num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (address == MAP_FAILED) return nullptr;
  segments_[{rank, number}] = {static_cast<uint8_t*>(address), segment.num_bytes};
  return static_cast<uint8_t*>(address);
}

void HostContext::notify(const std::vector<int>& ranks) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // orders the change before the read of `num_sleepers`
  for (int rank : ranks) {
    RankSlot& other = slots_[rank];
    if (rank == rank_ || other.num_sleepers.load(std::memory_order_relaxed) == 0) continue;
    other.wake_counter.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&other.wake_counter), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
}

void HostContext::notify_all() {
  std::vector<int> all_ranks(num_ranks_);
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  notify(all_ranks);
}

bool HostContext::advance() {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  bool moved = false;
  for (Group* group : groups_) moved |= group->advance();
  return moved;
}

Status HostContext::check_awaited(const std::vector<int>& awaited) {
  if (header_->stop.load(std::memory_order_acquire) == 2) return STOPPED;
  std::vector<pollfd> polled;
  for (int rank : awaited) polled.push_back({pidfds_[rank], POLLIN, 0});  // poll ignores the own fd, -1
  poll(polled.data(), polled.size(), 0);
  for (size_t i = 0; i < polled.size(); i++) {
    if (polled[i].revents != 0 || has_left(awaited[i])) {
      lost_ = awaited[i];
      return header_->stop.load(std::memory_order_acquire) == 2 ? STOPPED : LOST;
    }
  }
  return DONE;
}

Status HostContext::wait(const std::function<bool()>& is_done, const std::vector<int>& awaited, int64_t slice_ns) {
  RankSlot& own = slots_[rank_];
  int64_t end = 0;
  for (int index = 0;; index++) {
    advance();
    if (is_done()) return DONE;
    if (index < spins_) {
      relax();
      continue;
    }
    if (index < spins_ + YIELDS) {
      sched_yield();
      continue;
    }
    Status status = check_awaited(awaited);
    if (status != DONE) {
      advance();  // what it did before it ended or aborted still counts
      return is_done() ? DONE : status;
    }
    int64_t now = now_ns();
    if (end == 0) end = now + slice_ns;
    if (now >= end) return NOT_YET;
    own.num_sleepers.fetch_add(1);
    uint32_t seen_counter = own.wake_counter.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool moved = advance();
    if (!moved && !is_done()) futex_wait(own.wake_counter, seen_counter, std::min(end - now, NAP_NS));
    own.num_sleepers.fetch_sub(1);
  }
}

void HostContext::add(Group* group) {
  std::lock_guard<std::recursive_mutex> guard(lock_);  // another thread may be advancing the others
  groups_.push_back(group);
}

void HostContext::remove(Group* group) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
}

void HostContext::stop(const char* reason, size_t num_bytes) {
  uint32_t not_stopped = 0;
  if (!header_->stop.compare_exchange_strong(not_stopped, 1)) return;
  size_t length = std::min(num_bytes, REASON_BYTES - 1);
  std::memcpy(header_->reason, reason, length);
  header_->reason[length] = 0;
  header_->stopper = rank_;
  header_->stop.store(2, std::memory_order_release);
  notify_all();
}

}  // namespace cp
