// Layout of the memory that the ranks of one host share. Every field is written by one rank only, or is atomic.
//
//   host memory:   HostHeader | RankSlot per rank | Pipe per ordered pair of ranks
//   group memory:  GroupHeader | MemberCounters per member | NUM_BUFFERS chunk buffers per member
//   tensor memory: segments that a rank registers in its slot; others map them through /proc/<pid>/fd
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

constexpr uint32_t LAYOUT_VERSION = 5;
constexpr uint64_t HOST_MAGIC = 0x31444c524f575043;   // "CPWORLD1"
constexpr uint64_t GROUP_MAGIC = 0x3150554f52475043;  // "CPGROUP1"

constexpr int MAX_SEGMENTS = 1024;          // of one rank
constexpr uint64_t PIPE_BYTES = 1 << 20;    // capacity for messages in flight from one rank to another
constexpr uint64_t MAX_ANNOUNCEMENTS = 64;  // announced collectives that a member need not have compared yet
constexpr uint64_t NUM_BUFFERS = 4;         // staged chunks that a member need not have read yet
constexpr size_t DESCRIPTION_BYTES = 256;
constexpr size_t REASON_BYTES = 1024;

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free, "counters in shared memory must not need a lock");

// A shared file of a rank; tag 0 is for tensors, any other for one group.
struct Segment {
  int32_t fd;
  uint64_t inode;
  uint64_t num_bytes;
  uint64_t tag;
};

// State of one rank. It sleeps on `wake_counter` (a futex), which others increment after any change it may wait for.
struct alignas(64) RankSlot {
  std::atomic<uint32_t> wake_counter;
  std::atomic<uint32_t> num_sleepers;
  std::atomic<uint32_t> has_left;  // 1: it has closed its context, though its process may live
  int32_t pid;
  alignas(64) std::atomic<uint32_t> num_segments;
  Segment segments[MAX_SEGMENTS];
};

// Ring buffer of bytes from one rank to another; the counters never wrap.
struct alignas(64) Pipe {
  Counter written;
  alignas(64) Counter read;
  alignas(64) uint8_t bytes[PIPE_BYTES];
};

struct alignas(64) HostHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t num_ranks;
  uint8_t cookie[16];
  std::atomic<uint32_t> stop;  // 0: none, 1: a rank is writing the reason, 2: the reason can be read
  int32_t stopper;
  char reason[REASON_BYTES];
};

// A member's description of a collective before it starts: equal on all members, except for where the tensor is.
struct Announcement {
  uint8_t fingerprint[16];
  int32_t segment;  // of the tensor; -1: it is in private memory
  uint32_t description_bytes;
  uint64_t offset;
  char description[DESCRIPTION_BYTES];
};

// Progress of one member of a group. Counters only rise, and count the same things on all members.
struct alignas(64) MemberCounters {
  Counter announced;  // collectives announced
  Counter checked;    // collectives whose announcements it has compared
  Counter staged;     // chunks readable by others, in its buffers or its own segment
  Counter reduced;    // chunks of which it has reduced its part
  Counter consumed;   // chunks it will not read again
  alignas(64) Announcement announcements[MAX_ANNOUNCEMENTS];
};

struct alignas(64) GroupHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t num_members;
  uint64_t chunk_bytes;
  std::atomic<uint32_t> num_joined;
};

constexpr size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

inline size_t host_bytes(size_t num_ranks) {
  return aligned(sizeof(HostHeader)) + aligned(num_ranks * sizeof(RankSlot)) + num_ranks * num_ranks * sizeof(Pipe);
}

inline size_t group_bytes(size_t num_members, size_t chunk_bytes) {
  return aligned(sizeof(GroupHeader)) + aligned(num_members * sizeof(MemberCounters)) +
         num_members * NUM_BUFFERS * chunk_bytes;
}

}  // namespace cp
