// What Python calls: plain C, so that one library serves every Python and every torch.
#include <cstring>

#include "bags.h"
#include "distinct.h"
#include "collectives.h"
#include "entropy.h"
#include "linear.h"
#include "pipes.h"
#include "reduce.h"
#include "rows.h"
#include "update.h"

#define CP_API extern "C" __attribute__((visibility("default")))

CP_API uint32_t cp_layout_version() { return cp::LAYOUT_VERSION; }
CP_API const char* cp_instruction_set() { return cp::instruction_set(); }
CP_API uint64_t cp_world_bytes(uint32_t num_ranks) { return cp::world_bytes(num_ranks); }
CP_API uint64_t cp_group_bytes(uint32_t num_members, uint64_t piece_bytes) {
  return cp::group_bytes(num_members, piece_bytes);
}

// The memory is new and all zeros.
CP_API void cp_format_world(void* memory, uint32_t num_ranks, const uint8_t* cookie) {
  auto* header = static_cast<cp::WorldHeader*>(memory);
  header->version = cp::LAYOUT_VERSION;
  header->num_ranks = num_ranks;
  std::memcpy(header->cookie, cookie, sizeof(header->cookie));
  header->magic = cp::WORLD_MAGIC;
}

CP_API void cp_format_group(void* memory, uint32_t num_members, uint64_t piece_bytes) {
  auto* header = static_cast<cp::GroupHeader*>(memory);
  header->version = cp::LAYOUT_VERSION;
  header->num_members = num_members;
  header->piece_bytes = piece_bytes;
  header->magic = cp::GROUP_MAGIC;
}

// Whether the memory is what its address promised: 1 where it is.
CP_API int32_t cp_is_world(const void* memory, uint32_t num_ranks, const uint8_t* cookie) {
  auto* header = static_cast<const cp::WorldHeader*>(memory);
  return header->magic == cp::WORLD_MAGIC && header->version == cp::LAYOUT_VERSION && header->num_ranks == num_ranks &&
         std::memcmp(header->cookie, cookie, sizeof(header->cookie)) == 0;
}

CP_API cp::World* cp_open_world(void* memory, int32_t rank, int32_t num_ranks, int32_t pid, const int32_t* pidfds,
                                int32_t spins, int64_t slice_ns) {
  auto* world = new cp::World(memory, rank, num_ranks, pidfds, spins, slice_ns);
  world->seat(rank).pid = pid;
  return world;
}

CP_API void cp_close_world(cp::World* world) { delete world; }
CP_API int32_t cp_lost(cp::World* world) { return world->lost(); }
CP_API int32_t cp_has_left(cp::World* world, int32_t rank) { return world->has_left(rank); }
CP_API void cp_stop(cp::World* world, const char* reason, uint64_t num_bytes) { world->stop(reason, num_bytes); }

// Who stopped, and why, into `reason`; -1 where nobody has.
CP_API int32_t cp_stopped(cp::World* world, char* reason, uint64_t room) {
  cp::WorldHeader& header = world->header();
  if (header.stop.load(std::memory_order_acquire) != 2) return -1;
  std::strncpy(reason, header.reason, room - 1);
  reason[room - 1] = 0;
  return header.stopper;
}

// The number of a new segment of this rank, or BROKEN where there are too many.
CP_API int64_t cp_register_segment(cp::World* world, int32_t fd, uint64_t num_bytes, uint64_t tag) {
  cp::Seat& own = world->seat(world->rank());
  uint32_t number = own.num_segments.load(std::memory_order_relaxed);
  if (number >= cp::MAX_SEGMENTS) return cp::BROKEN;
  own.segments[number] = {fd, num_bytes, tag};
  own.num_segments.store(number + 1, std::memory_order_release);
  world->ring_all();
  return number;
}

// The number of the newest segment that a rank shares for this, as soon as it does.
CP_API int64_t cp_await_segment(cp::World* world, int32_t rank, uint64_t tag) {
  int64_t found = cp::NOT_YET;
  cp::Seat& owner = world->seat(rank);
  auto look = [&] {
    uint32_t count = owner.num_segments.load(std::memory_order_acquire);
    for (uint32_t number = count; number-- > 0;)
      if (owner.segments[number].tag == tag) {
        found = number;
        return true;
      }
    return false;
  };
  cp::Status status = world->wait(look, {rank});
  return status == cp::DONE ? found : status;
}

// The address of another rank's segment in this process; null where it cannot be opened.
CP_API void* cp_map_segment(cp::World* world, int32_t rank, int32_t number) { return world->segment(rank, number); }

// The group in this memory, which this rank has joined; null where the memory holds another.
CP_API cp::Group* cp_open_group(cp::World* world, void* memory, const int32_t* ranks, int32_t num_members) {
  auto* header = static_cast<cp::GroupHeader*>(memory);
  bool fits = header->magic == cp::GROUP_MAGIC && header->version == cp::LAYOUT_VERSION &&
              header->num_members == static_cast<uint32_t>(num_members);
  if (!fits) return nullptr;
  auto* group = new cp::Group(*world, memory, ranks, num_members);
  header->num_joined.fetch_add(1);
  world->ring_all();
  return group;
}

// DONE when all members have joined.
CP_API int64_t cp_await_members(cp::Group* group, void* memory) {
  auto* header = static_cast<cp::GroupHeader*>(memory);
  return group->world().wait([&] { return header->num_joined.load() == header->num_members; }, group->ranks());
}

CP_API void cp_close_group(cp::Group* group) { delete group; }

// The request is copied: it may serve again at once, with the tensor at another place.
CP_API int64_t cp_start(const cp::Request* request) { return request->group->start(*request); }

CP_API int64_t cp_wait(cp::Group* group, int64_t turn) {
  if (!group->is_done(turn)) {
    cp::Status status = group->world().wait([&] { return group->is_done(turn); }, group->ranks());
    if (status != cp::DONE) return status;
  }
  return group->num_done() > turn ? cp::DONE : group->status();
}

// DONE when it is over, in whatever way; otherwise NOT_YET after so much time, or why it will not be.
CP_API int64_t cp_pause(cp::Group* group, int64_t turn, int64_t slice_ns) {
  if (group->is_done(turn)) return cp::DONE;
  return group->world().wait([&] { return group->is_done(turn); }, group->ranks(), slice_ns);
}

CP_API int64_t cp_num_done(cp::Group* group) { return group->num_done(); }
CP_API int64_t cp_status(cp::Group* group) { return group->status(); }  // DONE while nothing has gone wrong
CP_API int32_t cp_advance(cp::World* world) { return world->advance(); }

// What a member announced as its collective number `turn`, into `fingerprint` and `reading`; the reading's length.
CP_API int64_t cp_notice(cp::Group* group, int32_t place, int64_t turn, uint8_t* fingerprint, char* reading) {
  const cp::Notice& notice = group->notice(place, turn);
  std::memcpy(fingerprint, notice.fingerprint, sizeof(notice.fingerprint));
  std::memcpy(reading, notice.reading, notice.reading_bytes);
  return notice.reading_bytes;
}

CP_API int64_t cp_send(cp::World* world, int32_t peer, const uint8_t* bytes, uint64_t num_bytes, int32_t listens) {
  return cp::write_bytes(*world, peer, bytes, num_bytes, listens != 0);
}

CP_API int64_t cp_recv(cp::World* world, int32_t peer, uint8_t* bytes, uint64_t num_bytes, int64_t slice_ns) {
  return cp::read_bytes(*world, peer, bytes, num_bytes, slice_ns);
}

CP_API int64_t cp_await_any(cp::World* world, const int32_t* peers, int32_t num_peers, int64_t slice_ns) {
  return cp::await_any(*world, peers, num_peers, slice_ns);
}

CP_API void cp_reduce(void* const* outs, int32_t num_outs, const void* const* ins, int32_t num_ins, uint64_t count,
                      uint32_t dtype, uint32_t verb, double scale) {
  cp::reduce(outs, num_outs, ins, num_ins, count, static_cast<cp::Dtype>(dtype), static_cast<cp::Verb>(verb), scale);
}

CP_API void cp_update(const cp::Step* step) { cp::update(*step); }
CP_API int32_t cp_linear(const cp::Layer* layer) { return cp::linear(*layer); }
CP_API int32_t cp_entropy(const cp::Scores* given, cp::Lost* lost) { return cp::entropy(*given, *lost); }
CP_API void cp_entropy_gradient(const cp::Scores* given) { cp::entropy_gradient(*given); }
CP_API void cp_add_rows(const cp::Rows* rows) { cp::add_rows(*rows); }
CP_API void cp_add_sums(const cp::Bags* bags) { cp::add_sums(*bags); }
CP_API int64_t cp_distinct(const int64_t* numbers, uint64_t count, int64_t* found, uint64_t* scratch) {
  return cp::distinct(numbers, count, found, scratch);
}
