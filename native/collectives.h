// The collectives of one group of ranks of one host, in memory that all of them see.
#pragma once
#include <deque>
#include <vector>

#include "world.h"

namespace cp {

class Group;

enum class Kind : uint32_t { all_reduce = 0, reduce_scatter = 1, all_gather = 2, broadcast = 3, all_to_all = 4, barrier = 5 };

// A collective as a rank asks for it; Python fills it in. Bounds count numbers, not bytes.
struct Request {
  Group* group;
  Kind kind;
  Dtype dtype;
  Verb verb;
  int32_t root;               // a place in the group
  double scale;               // what a sum is multiplied with
  uint8_t* data;              // the tensor, contiguous
  uint8_t* out;               // where all_to_all puts what it gets
  uint64_t count;             // numbers in data
  const uint64_t* bounds;     // one more than members: whose range is where in data
  const uint64_t* out_bounds; // of all_to_all: whose range is where in out
  uint64_t longest;           // numbers in the longest range that any member sends to any other
  int32_t segment;            // data lies in this segment of the rank, or -1
  uint32_t reading_bytes;
  uint64_t offset;            // and at this byte of it
  const uint8_t* fingerprint; // 16 bytes, the same on all members
  const char* reading;        // the same in words, for errors
};

class Group {
 public:
  Group(World& world, void* memory, const int* ranks, int num_members);
  ~Group();

  // Returns the collective's number, or COMPLETE; it has been announced, or will be as soon as there is room to.
  int64_t start(const Request& request);

  // Whatever can go on without waiting has gone on; true where anything has.
  bool advance();

  bool is_done(int64_t turn) const { return has_failed() || num_done_.load(std::memory_order_acquire) > turn; }
  bool has_failed() const { return failed_.load(std::memory_order_acquire) != DONE; }
  Status status() const { return static_cast<Status>(failed_.load(std::memory_order_acquire)); }
  int64_t num_done() const { return num_done_.load(std::memory_order_acquire); }
  const std::vector<int>& ranks() const { return ranks_; }
  World& world() { return world_; }
  const Notice& notice(int place, int64_t turn) const { return places_[place].notices[turn % NOTICES]; }
  std::recursive_mutex& lock() { return lock_; }

 private:
  struct Task {
    Request request;
    std::vector<uint64_t> bounds, out_bounds;
    std::vector<uint8_t*> direct;  // everybody's tensor, by place, where all are in shared memory
    uint64_t turn, first_piece, num_pieces, window;  // a piece is so many numbers of a range
    bool announced = false, checked = false, is_direct = false, two_phases = false, is_small = false, is_tiny = false;
    uint64_t laid_out = 0, combined = 0, taken = 0;
  };

  bool announce_all();
  bool announce(Task& task);
  bool check_all();
  bool check(Task& task);
  bool lay_out(Task& task);
  bool take(Task& task);
  bool take_directly(Task& task);
  void plan(Task& task);
  void copy_in(Task& task, uint64_t piece);
  void combine(Task& task, uint64_t piece);
  void copy_out(Task& task, uint64_t piece);
  void share_directly(Task& task);
  bool all_have(Counter Place::* counter, uint64_t least) const;
  void tell(Counter Place::* counter, uint64_t value);
  void ring();
  uint8_t* buffer(int place, uint64_t piece) const;
  bool find_directly(Task& task);

  World& world_;
  GroupHeader* header_;
  Place* places_;
  uint8_t* buffers_;
  std::vector<int> ranks_;
  int num_members_, own_ = 0;
  uint64_t num_started_ = 0, num_announced_ = 0, num_checked_ = 0, num_pieces_ = 0, piece_bytes_;
  bool has_told_ = false;
  std::atomic<int64_t> num_done_{0}, failed_{DONE};
  std::deque<Task> tasks_;
  std::recursive_mutex lock_;
};

}  // namespace cp
