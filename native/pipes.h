// Byte streams between two ranks, through a ring buffer in shared memory.
#pragma once
#include "host_context.h"

namespace cp {

// Writes to the pipe for at most a slice; returns the number of bytes written. Fewer than all if the peer does not
// read, or, with `listens`, if any rank has written to this one: two ranks that write to each other must read in
// between.
int64_t write_bytes(HostContext& host, int peer, const uint8_t* bytes, uint64_t num_bytes, bool listens);

// Reads for at most `slice_ns`; returns the number of bytes read. With a slice of 0 it reads what is there, and does
// not check whether the peer is alive.
int64_t read_bytes(HostContext& host, int peer, uint8_t* bytes, uint64_t num_bytes, int64_t slice_ns);

// Returns the index of the first of the peers that has written something, or a status.
int64_t await_any(HostContext& host, const int* peers, int num_peers, int64_t slice_ns);

}  // namespace cp
