// Functions called from Python through ctypes. A plain C interface, so that one library serves every Python and torch.
#include <sys/stat.h>

#include <cstring>

#include "embedding_bag.h"
#include "unique.h"
#include "collectives.h"
#include "copies.h"
#include "cross_entropy.h"
#include "linear.h"
#include "magnitudes.h"
#include "philox.h"
#include "pipes.h"
#include "reduce.h"
#include "sparse_rows.h"
#include "optimizers.h"
#include "tensor_addresses.h"

#define CP_API extern "C" __attribute__((visibility("default")))

CP_API uint32_t cp_layout_version() { return cp::LAYOUT_VERSION; }
CP_API const char* cp_instruction_set() { return cp::instruction_set(); }
CP_API uint64_t cp_host_bytes(uint32_t num_ranks) { return cp::host_bytes(num_ranks); }
CP_API uint64_t cp_group_bytes(uint32_t num_members, uint64_t chunk_bytes) {
  return cp::group_bytes(num_members, chunk_bytes);
}

// The memory must be zeroed.
CP_API void cp_format_host(void* memory, uint32_t num_ranks, const uint8_t* cookie) {
  auto* header = static_cast<cp::HostHeader*>(memory);
  header->version = cp::LAYOUT_VERSION;
  header->num_ranks = num_ranks;
  std::memcpy(header->cookie, cookie, sizeof(header->cookie));
  header->magic = cp::HOST_MAGIC;
}

CP_API void cp_format_group(void* memory, uint32_t num_members, uint64_t chunk_bytes) {
  auto* header = static_cast<cp::GroupHeader*>(memory);
  header->version = cp::LAYOUT_VERSION;
  header->num_members = num_members;
  header->chunk_bytes = chunk_bytes;
  header->magic = cp::GROUP_MAGIC;
}

// Returns 1 if the memory is the host memory with this cookie.
CP_API int32_t cp_is_host(const void* memory, uint32_t num_ranks, const uint8_t* cookie) {
  auto* header = static_cast<const cp::HostHeader*>(memory);
  return header->magic == cp::HOST_MAGIC && header->version == cp::LAYOUT_VERSION && header->num_ranks == num_ranks &&
         std::memcmp(header->cookie, cookie, sizeof(header->cookie)) == 0;
}

CP_API cp::HostContext* cp_open_host(void* memory, int32_t rank, int32_t num_ranks, int32_t pid, const int32_t* pidfds,
                                     int32_t spins, int64_t slice_ns) {
  auto* host = new cp::HostContext(memory, rank, num_ranks, pidfds, spins, slice_ns);
  host->slot(rank).pid = pid;
  return host;
}

CP_API void cp_close_host(cp::HostContext* host) { delete host; }
CP_API int32_t cp_lost(cp::HostContext* host) { return host->lost(); }
CP_API int32_t cp_has_left(cp::HostContext* host, int32_t rank) { return host->has_left(rank); }
CP_API void cp_stop(cp::HostContext* host, const char* reason, uint64_t num_bytes) { host->stop(reason, num_bytes); }

// Returns the rank that aborted, with its reason; -1 if none has.
CP_API int32_t cp_stopped(cp::HostContext* host, char* reason, uint64_t capacity) {
  cp::HostHeader& header = host->header();
  if (header.stop.load(std::memory_order_acquire) != 2) return -1;
  std::strncpy(reason, header.reason, capacity - 1);
  reason[capacity - 1] = 0;
  return header.stopper;
}

// Registers a segment of this rank; returns its number, or BROKEN if there are too many or it is not open.
CP_API int64_t cp_register_segment(cp::HostContext* host, int32_t fd, uint64_t num_bytes, uint64_t tag) {
  cp::RankSlot& own = host->slot(host->rank());
  uint32_t number = own.num_segments.load(std::memory_order_relaxed);
  struct stat status;
  if (number >= cp::MAX_SEGMENTS || fstat(fd, &status) != 0) return cp::BROKEN;
  own.segments[number] = {fd, status.st_ino, num_bytes, tag};
  own.num_segments.store(number + 1, std::memory_order_release);
  host->notify_all();
  return number;
}

// Waits until a rank has registered a segment with this tag; returns the number of the newest.
CP_API int64_t cp_await_segment(cp::HostContext* host, int32_t rank, uint64_t tag) {
  int64_t found = cp::NOT_YET;
  cp::RankSlot& owner = host->slot(rank);
  auto poll_once = [&] {
    uint32_t count = owner.num_segments.load(std::memory_order_acquire);
    for (uint32_t number = count; number-- > 0;)
      if (owner.segments[number].tag == tag) {
        found = number;
        return true;
      }
    return false;
  };
  cp::Status status = host->wait(poll_once, {rank});
  return status == cp::DONE ? found : status;
}

// Maps another rank's segment; returns null if that fails.
CP_API void* cp_map_segment(cp::HostContext* host, int32_t rank, int32_t number) { return host->segment(rank, number); }

// Joins the group in this memory; returns null if the memory holds another.
CP_API cp::Group* cp_open_group(cp::HostContext* host, void* memory, const int32_t* ranks, int32_t num_members) {
  auto* header = static_cast<cp::GroupHeader*>(memory);
  bool fits = header->magic == cp::GROUP_MAGIC && header->version == cp::LAYOUT_VERSION &&
              header->num_members == static_cast<uint32_t>(num_members);
  if (!fits) return nullptr;
  auto* group = new cp::Group(*host, memory, ranks, num_members);
  header->num_joined.fetch_add(1);
  host->notify_all();
  return group;
}

// Waits until all members have joined.
CP_API int64_t cp_await_members(cp::Group* group, void* memory) {
  auto* header = static_cast<cp::GroupHeader*>(memory);
  return group->host().wait([&] { return header->num_joined.load() == header->num_members; }, group->ranks());
}

CP_API void cp_close_group(cp::Group* group) { delete group; }

// The request is copied, so the caller may reuse it at once.
CP_API int64_t cp_start(const cp::CollectiveRequest* request) { return request->group->start(*request); }

CP_API int64_t cp_wait(cp::Group* group, int64_t index) {
  if (!group->is_done(index)) {
    cp::Status status = group->host().wait([&] { return group->is_done(index); }, group->ranks());
    if (status != cp::DONE) return status;
  }
  return group->num_done() > index ? cp::DONE : group->status();
}

// Waits until the collective ends, well or not, for at most `slice_ns`.
CP_API int64_t cp_wait_for(cp::Group* group, int64_t index, int64_t slice_ns) {
  if (group->is_done(index)) return cp::DONE;
  return group->host().wait([&] { return group->is_done(index); }, group->ranks(), slice_ns);
}

CP_API int64_t cp_num_done(cp::Group* group) { return group->num_done(); }
CP_API int64_t cp_status(cp::Group* group) { return group->status(); }  // DONE unless the group has failed
CP_API int32_t cp_advance(cp::HostContext* host) { return host->advance(); }

// Copies the fingerprint and the description that a member announced; returns the description's length.
CP_API int64_t cp_announcement(cp::Group* group, int32_t member, int64_t index, uint8_t* fingerprint,
                               char* description) {
  const cp::Announcement& announcement = group->announcement(member, index);
  std::memcpy(fingerprint, announcement.fingerprint, sizeof(announcement.fingerprint));
  std::memcpy(description, announcement.description, announcement.description_bytes);
  return announcement.description_bytes;
}

CP_API int64_t cp_send(cp::HostContext* host, int32_t peer, const uint8_t* bytes, uint64_t num_bytes, int32_t listens) {
  return cp::write_bytes(*host, peer, bytes, num_bytes, listens != 0);
}

CP_API int64_t cp_recv(cp::HostContext* host, int32_t peer, uint8_t* bytes, uint64_t num_bytes, int64_t slice_ns) {
  return cp::read_bytes(*host, peer, bytes, num_bytes, slice_ns);
}

CP_API int64_t cp_await_any(cp::HostContext* host, const int32_t* peers, int32_t num_peers, int64_t slice_ns) {
  return cp::await_any(*host, peers, num_peers, slice_ns);
}

CP_API void cp_reduce(void* const* outs, int32_t num_outs, const void* const* ins, int32_t num_ins, uint64_t count,
                      uint32_t dtype, uint32_t op, double scale) {
  cp::reduce(outs, num_outs, ins, num_ins, count, static_cast<cp::Dtype>(dtype), static_cast<cp::ReduceOp>(op), scale);
}

CP_API void cp_optimizer_step(const cp::OptimizerStep* step) { cp::optimizer_step(*step); }
CP_API void cp_copy_tensors(const void* const* tensors, const uint64_t* counts, const uint64_t* starts,
                            uint64_t num_tensors, uint64_t element_size, void* into) {
  cp::copy_tensors(tensors, counts, starts, num_tensors, element_size, into);
}
// Called with Python's lock held.
CP_API uint64_t cp_read_addresses(const cp::DLPackExchangeAPI* api, void* const* objects, uint64_t num_tensors,
                                  const uint64_t* counts, uint32_t dtype, void** addresses) {
  return cp::read_addresses(api, objects, num_tensors, counts, static_cast<cp::Dtype>(dtype), addresses);
}
CP_API double cp_find_magnitudes(const void* const* tensors, const uint64_t* counts, uint64_t num_tensors,
                                 uint32_t dtype, int32_t max_threads, double* largest) {
  return cp::find_magnitudes(tensors, counts, num_tensors, static_cast<cp::Dtype>(dtype), max_threads, largest);
}
CP_API void cp_find_edge_magnitudes(const void* const* matrices, const uint64_t* rows, const uint64_t* columns,
                                    uint64_t num_matrices, uint32_t dtype, double* largest) {
  cp::find_edge_magnitudes(matrices, rows, columns, num_matrices, static_cast<cp::Dtype>(dtype), largest);
}
CP_API int32_t cp_linear(const cp::LinearArgs* layer) { return cp::linear(*layer); }
CP_API int32_t cp_cross_entropy(const cp::CrossEntropyArgs* given, cp::LossSum* lost) {
  return cp::cross_entropy(*given, *lost);
}
CP_API void cp_cross_entropy_backward(const cp::CrossEntropyArgs* given) { cp::cross_entropy_backward(*given); }
CP_API void cp_philox_fill(const cp::PhiloxArgs* given) { cp::philox_fill(*given); }
CP_API void cp_add_rows(const cp::SparseRowsArgs* rows) { cp::add_rows(*rows); }
CP_API void cp_add_embedding_bags(const cp::EmbeddingBagArgs* bags) { cp::add_embedding_bags(*bags); }
CP_API int64_t cp_unique(const int64_t* numbers, uint64_t count, int64_t* found, uint64_t* scratch) {
  return cp::unique(numbers, count, found, scratch);
}
