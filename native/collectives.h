// The collectives of one group of ranks of one host, in shared memory.
//
// Every member runs the same code; none serves the others. The state of a collective is five counters per member:
//
//   announced   its signature and the location of its tensor are in its announcement
//   checked     it has compared all members' announcements; a difference is DISAGREE on all
//   staged      so many chunks of its tensor can be read by others
//   reduced     it has reduced its part of so many chunks (see below)
//   consumed    it will not read so many chunks again, so their buffers can be reused
//
// 1. Direct: all tensors are in shared memory. Member i reduces part i of all members' tensors, in place, in all:
//
//      tensors        part 0     part 1     part 2
//      member 0      [ a0 ]     [ b0 ]     [ c0 ]        member 0 writes a0+a1+a2 to all three a's,
//      member 1      [ a1 ]     [ b1 ]     [ c1 ]        member 1 the b's, member 2 the c's; the tensors
//      member 2      [ a2 ]     [ b2 ]     [ c2 ]        may be used when all have `reduced`.
//
// 2. Staged: a tensor is in private memory. All are copied, by chunks of chunk_bytes, to NUM_BUFFERS buffers per member:
//
//      stage chunk 2 -> | chunk 0 | chunk 1 | chunk 2 |    |   while the others read chunk 0 and 1
//
//    With up to MAX_FULL_READERS members each reduces whole chunks for itself. More members take two phases: each
//    reduces its part of a chunk in its own buffer, then all copy the parts together.
//
// 3. Small (SMALL_BYTES): as 2., announced together with the staged chunk, so that one round suffices.
#pragma once
#include <deque>
#include <vector>

#include "host_context.h"

namespace cp {

class Group;

enum class CollectiveKind : uint32_t {
  all_reduce = 0,
  reduce_scatter = 1,
  all_gather = 2,
  broadcast = 3,
  all_to_all = 4,
  barrier = 5
};

// A collective; Python fills it in. Bounds and counts are in elements, not bytes.
struct CollectiveRequest {
  Group* group;
  CollectiveKind kind;
  Dtype dtype;
  ReduceOp op;
  int32_t root;                // index in the group
  double scale;                // factor of the result: 1 / members for a mean
  uint8_t* data;               // the tensor, contiguous
  uint8_t* out;                // receive buffer of all_to_all
  uint64_t count;              // elements in data
  const uint64_t* bounds;      // num_members + 1 offsets: the members' ranges of data
  const uint64_t* out_bounds;  // of all_to_all: the members' ranges of out
  uint64_t max_range;          // elements of the longest range between any two members
  int32_t segment;             // of the rank that contains data, or -1
  uint32_t description_bytes;
  uint64_t offset;             // of data in the segment, in bytes
  const uint8_t* fingerprint;  // 16 bytes, the same on all members
  const char* description;     // text of the signature, for errors
};

class Group {
 public:
  Group(HostContext& host, void* memory, const int* ranks, int num_members);
  ~Group();

  // Starts a collective; returns its index in the group, or COMPLETE.
  int64_t start(const CollectiveRequest& request);

  // Advances without waiting; returns whether anything has progressed.
  bool advance();

  bool is_done(int64_t index) const { return has_failed() || num_done_.load(std::memory_order_acquire) > index; }
  bool has_failed() const { return failed_.load(std::memory_order_acquire) != DONE; }
  Status status() const { return static_cast<Status>(failed_.load(std::memory_order_acquire)); }
  int64_t num_done() const { return num_done_.load(std::memory_order_acquire); }
  const std::vector<int>& ranks() const { return ranks_; }
  HostContext& host() { return host_; }
  const Announcement& announcement(int member, int64_t index) const {
    return members_[member].announcements[index % MAX_ANNOUNCEMENTS];
  }
  std::recursive_mutex& lock() { return lock_; }

 private:
  struct Task {
    CollectiveRequest request;
    std::vector<uint64_t> bounds, out_bounds;
    std::vector<uint8_t*> direct;  // all members' tensors, if all are in shared memory
    uint64_t index, first_chunk, num_chunks, chunk_elements;
    bool announced = false, checked = false, is_direct = false, two_phases = false, is_small = false, is_tiny = false;
    uint64_t staged = 0, reduced = 0, consumed = 0;
  };

  bool announce_all();
  bool announce(Task& task);
  bool check_all();
  bool check(Task& task);
  bool stage(Task& task);
  bool consume(Task& task);
  bool consume_direct(Task& task);
  void plan(Task& task);
  void copy_in(Task& task, uint64_t chunk);
  void reduce_chunk(Task& task, uint64_t chunk);
  void copy_out(Task& task, uint64_t chunk);
  void reduce_direct(Task& task);
  bool all_have(Counter MemberCounters::*counter, uint64_t least) const;
  void publish(Counter MemberCounters::*counter, uint64_t value);
  void notify();
  uint8_t* buffer(int member, uint64_t chunk) const;
  bool map_tensors(Task& task);

  HostContext& host_;
  GroupHeader* header_;
  MemberCounters* members_;
  uint8_t* buffers_;
  std::vector<int> ranks_;
  int num_members_, own_ = 0;
  uint64_t num_started_ = 0, num_announced_ = 0, num_checked_ = 0, num_chunks_ = 0, chunk_bytes_;
  bool has_published_ = false;
  std::atomic<int64_t> num_done_{0}, failed_{DONE};
  std::deque<Task> tasks_;
  std::recursive_mutex lock_;
};

}  // namespace cp
