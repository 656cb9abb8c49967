#include "pipes.h"

#include <algorithm>
#include <cstring>

namespace cp {
namespace {

constexpr uint64_t MOST_AT_ONCE = PIPE_BYTES / 4;  // then the other side can begin

bool has_written(World& world, int peer) {
  Pipe& pipe = world.pipe(peer, world.rank());
  return pipe.written.load(std::memory_order_acquire) != pipe.read.load(std::memory_order_relaxed);
}

bool anybody_has_written(World& world) {
  for (int peer = 0; peer < world.num_ranks(); peer++)
    if (has_written(world, peer)) return true;
  return false;
}

}  // namespace

int64_t write_bytes(World& world, int peer, const uint8_t* bytes, uint64_t num_bytes, bool listens) {
  Pipe& pipe = world.pipe(world.rank(), peer);
  uint64_t done = 0, written = pipe.written.load(std::memory_order_relaxed);
  auto room = [&] { return PIPE_BYTES - (written - pipe.read.load(std::memory_order_acquire)); };
  while (done < num_bytes) {
    if (room() == 0) {
      auto can_go_on = [&] { return room() > 0 || (listens && anybody_has_written(world)); };
      Status status = world.wait(can_go_on, {peer});
      if (status == NOT_YET || (status == DONE && room() == 0)) return static_cast<int64_t>(done);
      if (status != DONE) return status;
    }
    uint64_t at = written % PIPE_BYTES;
    uint64_t count = std::min({num_bytes - done, room(), PIPE_BYTES - at, MOST_AT_ONCE});
    std::memcpy(pipe.bytes + at, bytes + done, count);
    done += count;
    written += count;
    pipe.written.store(written, std::memory_order_release);
    world.ring({peer});
  }
  return static_cast<int64_t>(done);
}

int64_t read_bytes(World& world, int peer, uint8_t* bytes, uint64_t num_bytes, int64_t slice_ns) {
  Pipe& pipe = world.pipe(peer, world.rank());
  uint64_t done = 0, read = pipe.read.load(std::memory_order_relaxed);
  auto there = [&] { return pipe.written.load(std::memory_order_acquire) - read; };
  while (done < num_bytes) {
    if (there() == 0) {
      if (slice_ns == 0) return static_cast<int64_t>(done);
      Status status = world.wait([&] { return there() > 0; }, {peer}, slice_ns);
      if (status == NOT_YET) return static_cast<int64_t>(done);
      if (status != DONE) return status;
    }
    uint64_t at = read % PIPE_BYTES;
    uint64_t count = std::min({num_bytes - done, there(), PIPE_BYTES - at, MOST_AT_ONCE});
    std::memcpy(bytes + done, pipe.bytes + at, count);
    done += count;
    read += count;
    pipe.read.store(read, std::memory_order_release);
    world.ring({peer});
  }
  return static_cast<int64_t>(done);
}

int64_t await_any(World& world, const int* peers, int num_peers, int64_t slice_ns) {
  int64_t found = NOT_YET;
  auto look = [&] {
    for (int i = 0; i < num_peers; i++) {
      if (has_written(world, peers[i])) {
        found = i;
        return true;
      }
    }
    return false;
  };
  Status status = world.wait(look, std::vector<int>(peers, peers + num_peers), slice_ns);
  return status == DONE ? found : status;
}

}  // namespace cp
