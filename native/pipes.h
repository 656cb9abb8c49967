// Messages between two ranks: bytes in order, through a ring in shared memory.
#pragma once
#include "world.h"

namespace cp {

// How many of the bytes have been put into the pipe within the slice; less than all where the peer does not read.
int64_t write_bytes(World& world, int peer, const uint8_t* bytes, uint64_t num_bytes);

// How many bytes have come out of it within the slice; less than asked for where the peer does not write.
int64_t read_bytes(World& world, int peer, uint8_t* bytes, uint64_t num_bytes);

// The index of the first of the peers that has written something, or a status.
int64_t await_any(World& world, const int* peers, int num_peers);

}  // namespace cp
