// What lies in the memory that the ranks of one host share. Every field is written by one rank, or is an atomic.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

constexpr uint32_t LAYOUT_VERSION = 4;
constexpr uint64_t WORLD_MAGIC = 0x31444c524f575043;  // "CPWORLD1"
constexpr uint64_t GROUP_MAGIC = 0x3150554f52475043;  // "CPGROUP1"

constexpr int MAX_SEGMENTS = 1024;      // of one rank
constexpr uint64_t PIPE_BYTES = 1 << 20;  // of messages under way between two ranks
constexpr uint64_t NOTICES = 64;        // collectives that a rank may have announced before another has looked
constexpr uint64_t BUFFERS = 4;         // pieces that a rank may have laid out before another has read them
constexpr size_t READING_BYTES = 256;
constexpr size_t REASON_BYTES = 1024;

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free, "counters in shared memory must not need a lock");

// A file that a rank shares; `tag` says what it is for, 0 for tensors.
struct Segment {
  int32_t fd;
  uint64_t num_bytes;
  uint64_t tag;
};

// One rank of the world. `bell` is what it sleeps on; it changes whenever something happened that it may wait for.
struct alignas(64) Seat {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> has_left;  // 1: it lives, but has closed its world
  int32_t pid;
  alignas(64) std::atomic<uint32_t> num_segments;
  Segment segments[MAX_SEGMENTS];
};

// The bytes under way from one rank to another, a ring.
struct alignas(64) Pipe {
  Counter written;
  alignas(64) Counter read;
  alignas(64) uint8_t bytes[PIPE_BYTES];
};

struct alignas(64) WorldHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t num_ranks;
  uint8_t cookie[16];
  std::atomic<uint32_t> stop;  // 0: nobody has, 1: somebody writes why, 2: it can be read
  int32_t stopper;
  char reason[REASON_BYTES];
};

// What a member says of a collective before it takes part: the same on all members, but for the place of its tensor.
struct Notice {
  uint8_t fingerprint[16];
  int32_t segment;  // -1: its tensor is in its own memory
  uint32_t reading_bytes;
  uint64_t offset;
  char reading[READING_BYTES];
};

// One member of a group. All counters only rise, and mean the same on all members.
struct alignas(64) Place {
  Counter announced;  // collectives
  Counter checked;    // collectives whose notices it has compared
  Counter laid_out;   // pieces, in its buffers or in its own segment
  Counter combined;   // pieces of which its share is added up
  Counter taken;      // pieces it needs nothing of any more
  alignas(64) Notice notices[NOTICES];
};

struct alignas(64) GroupHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t num_members;
  uint64_t piece_bytes;
  std::atomic<uint32_t> num_joined;
};

constexpr size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

inline size_t world_bytes(size_t num_ranks) {
  return aligned(sizeof(WorldHeader)) + aligned(num_ranks * sizeof(Seat)) + num_ranks * num_ranks * sizeof(Pipe);
}

inline size_t group_bytes(size_t num_members, size_t piece_bytes) {
  return aligned(sizeof(GroupHeader)) + aligned(num_members * sizeof(Place)) + num_members * BUFFERS * piece_bytes;
}

}  // namespace cp
