#include "pipes.h"

#include <algorithm>
#include <cstring>

namespace cp {
namespace {

constexpr uint64_t MAX_COPY_BYTES = PIPE_BYTES / 4;  // publish in between, so that the reader can start

bool has_written(HostContext& host, int peer) {
  Pipe& pipe = host.pipe(peer, host.rank());
  return pipe.written.load(std::memory_order_acquire) != pipe.read.load(std::memory_order_relaxed);
}

bool any_peer_has_written(HostContext& host) {
  for (int peer = 0; peer < host.num_ranks(); peer++)
    if (has_written(host, peer)) return true;
  return false;
}

}  // namespace

int64_t write_bytes(HostContext& host, int peer, const uint8_t* bytes, uint64_t num_bytes, bool listens) {
  Pipe& pipe = host.pipe(host.rank(), peer);
  uint64_t num_moved = 0, written = pipe.written.load(std::memory_order_relaxed);
  auto free_bytes = [&] { return PIPE_BYTES - (written - pipe.read.load(std::memory_order_acquire)); };
  while (num_moved < num_bytes) {
    if (free_bytes() == 0) {
      auto can_continue = [&] { return free_bytes() > 0 || (listens && any_peer_has_written(host)); };
      Status status = host.wait(can_continue, {peer});
      if (status == NOT_YET || (status == DONE && free_bytes() == 0)) return static_cast<int64_t>(num_moved);
      if (status != DONE) return status;
    }
    uint64_t at = written % PIPE_BYTES;
    uint64_t count = std::min({num_bytes - num_moved, free_bytes(), PIPE_BYTES - at, MAX_COPY_BYTES});
    std::memcpy(pipe.bytes + at, bytes + num_moved, count);
    num_moved += count;
    written += count;
    pipe.written.store(written, std::memory_order_release);
    host.notify({peer});
  }
  return static_cast<int64_t>(num_moved);
}

int64_t read_bytes(HostContext& host, int peer, uint8_t* bytes, uint64_t num_bytes, int64_t slice_ns) {
  Pipe& pipe = host.pipe(peer, host.rank());
  uint64_t num_moved = 0, read = pipe.read.load(std::memory_order_relaxed);
  auto available = [&] { return pipe.written.load(std::memory_order_acquire) - read; };
  while (num_moved < num_bytes) {
    if (available() == 0) {
      if (slice_ns == 0) return static_cast<int64_t>(num_moved);
      Status status = host.wait([&] { return available() > 0; }, {peer}, slice_ns);
      if (status == NOT_YET) return static_cast<int64_t>(num_moved);
      if (status != DONE) return status;
    }
    uint64_t at = read % PIPE_BYTES;
    uint64_t count = std::min({num_bytes - num_moved, available(), PIPE_BYTES - at, MAX_COPY_BYTES});
    std::memcpy(bytes + num_moved, pipe.bytes + at, count);
    num_moved += count;
    read += count;
    pipe.read.store(read, std::memory_order_release);
    host.notify({peer});
  }
  return static_cast<int64_t>(num_moved);
}

int64_t await_any(HostContext& host, const int* peers, int num_peers, int64_t slice_ns) {
  int64_t found = NOT_YET;
  auto poll_once = [&] {
    for (int i = 0; i < num_peers; i++) {
      if (has_written(host, peers[i])) {
        found = i;
        return true;
      }
    }
    return false;
  };
  Status status = host.wait(poll_once, std::vector<int>(peers, peers + num_peers), slice_ns);
  return status == DONE ? found : status;
}

}  // namespace cp
