// One rank's view of the memory it shares with the others, and how it waits for them.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "layout.h"

namespace cp {

// What a call returns to Python: 0 or more is a result, less than 0 one of these.
enum Status : int64_t { DONE = 0, NOT_YET = -1, STOPPED = -2, LOST = -3, DISAGREE = -4, BROKEN = -5, COMPLETE = -6 };

// Lets a moment pass between two looks at memory that another core writes.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Group;

class World {
 public:
  World(void* memory, int rank, int num_ranks, const int* pidfds, int spins, int64_t slice_ns);
  ~World();

  Seat& seat(int rank) { return seats_[rank]; }
  Pipe& pipe(int from, int to) { return pipes_[from * num_ranks_ + to]; }
  WorldHeader& header() { return *header_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  int lost() const { return lost_; }
  bool has_left(int rank) const { return seats_[rank].has_left.load(std::memory_order_acquire) != 0; }
  int looks() const { return spins_ / 800; }  // a microsecond or two; none where ranks take turns on a core

  // The address of another rank's segment in this process; nullptr where it cannot be had.
  uint8_t* segment(int rank, int number);

  // Others may have waited for what has just happened.
  void ring(const std::vector<int>& ranks);
  void ring_all();

  // Advances all groups until `is_done`, or for so long. NOT_YET is no error: signals can be served in between.
  // LOST says that one of `awaited` has ended or left; that others have is none of this wait's business.
  Status wait(const std::function<bool()>& is_done, const std::vector<int>& awaited, int64_t slice_ns);
  Status wait(const std::function<bool()>& is_done, const std::vector<int>& awaited) {
    return wait(is_done, awaited, slice_ns_);
  }

  // Whatever of the groups' collectives can go on without waiting has gone on; true where anything has.
  bool advance();

  void add(Group* group);
  void remove(Group* group);
  void stop(const char* reason, size_t num_bytes);

 private:
  Status trouble(const std::vector<int>& awaited);

  WorldHeader* header_;
  Seat* seats_;
  Pipe* pipes_;
  int rank_, num_ranks_, spins_;
  int64_t slice_ns_;  // the longest that a wait lasts where nothing else is said
  std::atomic<int> lost_{-1};
  std::vector<int> pidfds_;
  std::vector<Group*> groups_;
  std::map<std::pair<int, int>, std::pair<uint8_t*, size_t>> segments_;
  std::recursive_mutex lock_;
};

}  // namespace cp
