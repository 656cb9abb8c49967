// One rank's view of the shared memory of its host, and how it waits for the others.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "layout.h"

namespace cp {

// What a call returns to Python: a result if it is not negative, else one of these.
enum Status : int64_t { DONE = 0, NOT_YET = -1, STOPPED = -2, LOST = -3, DISAGREE = -4, BROKEN = -5, COMPLETE = -6 };

// Pauses between two reads of memory that another core writes.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Group;

class HostContext {
 public:
  HostContext(void* memory, int rank, int num_ranks, const int* pidfds, int spins, int64_t slice_ns);
  ~HostContext();

  RankSlot& slot(int rank) { return slots_[rank]; }
  Pipe& pipe(int from, int to) { return pipes_[from * num_ranks_ + to]; }
  HostHeader& header() { return *header_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  int lost() const { return lost_; }
  bool has_left(int rank) const { return slots_[rank].has_left.load(std::memory_order_acquire) != 0; }
  int num_polls() const { return spins_ / 800; }  // a microsecond or two; none if ranks outnumber cores

  // Maps another rank's segment, once; nullptr if that fails.
  uint8_t* segment(int rank, int number);

  // Wakes these ranks if they sleep: something has changed that they may wait for.
  void notify(const std::vector<int>& ranks);
  void notify_all();

  // Advances all groups until `is_done`, or for `slice_ns`; then returns NOT_YET, so that Python can serve signals.
  // Returns LOST if one of `awaited` has ended or left; other ranks are ignored.
  Status wait(const std::function<bool()>& is_done, const std::vector<int>& awaited, int64_t slice_ns);
  Status wait(const std::function<bool()>& is_done, const std::vector<int>& awaited) {
    return wait(is_done, awaited, slice_ns_);
  }

  // Advances the collectives of all groups without waiting; returns whether any has progressed.
  bool advance();

  void add(Group* group);
  void remove(Group* group);
  void stop(const char* reason, size_t num_bytes);

 private:
  Status check_awaited(const std::vector<int>& awaited);

  HostHeader* header_;
  RankSlot* slots_;
  Pipe* pipes_;
  int rank_, num_ranks_, spins_;
  int64_t slice_ns_;  // default duration of a wait
  std::atomic<int> lost_{-1};
  std::vector<int> pidfds_;
  std::vector<Group*> groups_;
  std::map<std::pair<int, int>, std::pair<uint8_t*, size_t>> segments_;
  std::recursive_mutex lock_;
};

}  // namespace cp
