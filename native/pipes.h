// Messages between two ranks: bytes in order, through a ring in shared memory.
#pragma once
#include "world.h"

namespace cp {

// How many of the bytes have been put into the pipe within a slice; less than all where the peer does not read, and
// where `listens`, as soon as anybody has written to this rank: two that write to each other must read, too.
int64_t write_bytes(World& world, int peer, const uint8_t* bytes, uint64_t num_bytes, bool listens);

// How many bytes have come out of it within so long; less than asked for where the peer does not write. With a slice
// of 0 it takes what is there, and does not look whether the peer lives.
int64_t read_bytes(World& world, int peer, uint8_t* bytes, uint64_t num_bytes, int64_t slice_ns);

// The index of the first of the peers that has written something, or a status.
int64_t await_any(World& world, const int* peers, int num_peers, int64_t slice_ns);

}  // namespace cp
