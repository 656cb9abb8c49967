#include "collectives.h"

#include <algorithm>
#include <cstring>

namespace cp {
namespace {

constexpr int MAX_FULL_READERS = 3;         // up to this many members each reduce whole chunks; more divide the work
constexpr uint64_t SMALL_BYTES = 32 << 10;  // also reduced whole: a second phase would cost more than it saves
constexpr uint64_t TINY_BYTES = 4 << 10;    // always staged, even from shared memory: one round instead of two

// Prefetches cache lines in the exclusive state, for a write that follows soon.
void prefetch_for_write(const uint8_t* bytes, uint64_t num_bytes) {
  for (uint64_t at = 0; at < num_bytes; at += 64) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(bytes[at]));
#else
    __builtin_prefetch(bytes + at, 1);
#endif
  }
}

}  // namespace

Group::Group(HostContext& host, void* memory, const int* ranks, int num_members)
    : host_(host), ranks_(ranks, ranks + num_members), num_members_(num_members) {
  auto* bytes = static_cast<uint8_t*>(memory);
  header_ = reinterpret_cast<GroupHeader*>(bytes);
  members_ = reinterpret_cast<MemberCounters*>(bytes + aligned(sizeof(GroupHeader)));
  buffers_ = bytes + aligned(sizeof(GroupHeader)) + aligned(num_members * sizeof(MemberCounters));
  chunk_bytes_ = header_->chunk_bytes;
  own_ = static_cast<int>(std::find(ranks_.begin(), ranks_.end(), host.rank()) - ranks_.begin());
  host_.add(this);
}

Group::~Group() { host_.remove(this); }

int64_t Group::start(const CollectiveRequest& request) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  Task& task = tasks_.emplace_back();
  task.request = request;
  if (request.bounds != nullptr) task.bounds.assign(request.bounds, request.bounds + num_members_ + 1);
  if (request.out_bounds != nullptr) task.out_bounds.assign(request.out_bounds, request.out_bounds + num_members_ + 1);
  plan(task);
  task.index = num_started_++;
  task.first_chunk = num_chunks_;
  num_chunks_ += task.num_chunks;
  int64_t index = static_cast<int64_t>(task.index);
  bool is_small = task.is_small;
  advance();                                        // may complete and pop the task
  bool is_urgent = is_small && tasks_.size() == 1;  // polling here is cheaper than another call from Python
  for (int poll_once = 0; is_urgent && poll_once < host_.num_polls() && !is_done(index); poll_once++) {
    relax();
    advance();
  }
  return num_done() > index ? COMPLETE : index;
}

// Divides the collective into chunks, identically on all members.
void Group::plan(Task& task) {
  const CollectiveRequest& request = task.request;
  uint64_t size = size_of(request.dtype), max_elements = request.count;
  bool has_slots = request.kind == CollectiveKind::reduce_scatter || request.kind == CollectiveKind::all_to_all;
  if (request.kind == CollectiveKind::reduce_scatter || request.kind == CollectiveKind::all_gather) {
    max_elements = 0;
    for (int i = 0; i < num_members_; i++) max_elements = std::max(max_elements, task.bounds[i + 1] - task.bounds[i]);
  }
  if (request.kind == CollectiveKind::all_to_all) max_elements = request.max_range;
  if (request.kind == CollectiveKind::barrier) max_elements = 0;
  task.chunk_elements = (has_slots ? chunk_bytes_ / num_members_ / 64 * 64 : chunk_bytes_) / size;
  task.num_chunks = (max_elements + task.chunk_elements - 1) / task.chunk_elements;
  uint64_t num_bytes = request.count * size;
  task.two_phases =
      request.kind == CollectiveKind::all_reduce && num_members_ > MAX_FULL_READERS && num_bytes > SMALL_BYTES;
  task.is_small = request.kind == CollectiveKind::all_reduce && num_bytes <= SMALL_BYTES;
  task.is_tiny = request.kind == CollectiveKind::all_reduce && num_bytes <= TINY_BYTES;
}

bool Group::advance() {
  std::unique_lock<std::recursive_mutex> guard(lock_, std::try_to_lock);
  if (!guard.owns_lock() || has_failed()) return false;  // another thread is advancing it
  bool moved = announce_all();
  for (bool again = true; again && !tasks_.empty() && !has_failed();) {
    again = check_all();
    if (has_failed()) return true;
    for (Task& task : tasks_) {  // stage later collectives, too, while buffers are free
      bool went = task.announced && stage(task);
      again |= went;
      if (task.staged < task.num_chunks) break;
    }
    Task& oldest = tasks_.front();
    again |= consume(oldest);
    if (oldest.checked && oldest.consumed == oldest.num_chunks) {
      num_done_.store(static_cast<int64_t>(oldest.index) + 1, std::memory_order_release);
      tasks_.pop_front();
      announce_all();
      again = true;
    }
    moved |= again;
  }
  notify();
  return moved;
}

bool Group::announce_all() {
  bool moved = false;
  uint64_t first = tasks_.empty() ? num_announced_ : tasks_.front().index;
  while (num_announced_ < num_started_ && announce(tasks_[num_announced_ - first])) {
    num_announced_++;
    moved = true;
  }
  return moved;
}

bool Group::announce(Task& task) {
  if (task.index >= MAX_ANNOUNCEMENTS && !all_have(&MemberCounters::checked, task.index - MAX_ANNOUNCEMENTS + 1))
    return false;
  Announcement& announcement = members_[own_].announcements[task.index % MAX_ANNOUNCEMENTS];
  std::memcpy(announcement.fingerprint, task.request.fingerprint, sizeof(announcement.fingerprint));
  announcement.segment = task.request.segment;
  announcement.offset = task.request.offset;
  announcement.description_bytes =
      static_cast<uint32_t>(std::min<size_t>(task.request.description_bytes, DESCRIPTION_BYTES));
  std::memcpy(announcement.description, task.request.description, announcement.description_bytes);
  task.announced = true;
  bool is_next =
      members_[own_].staged.load(std::memory_order_relaxed) == task.first_chunk;  // all earlier chunks are staged
  bool is_early = task.is_small && is_next && (task.is_tiny || task.request.segment < 0);
  if (is_early) stage(task);  // so that the others see announcement and data at once
  publish(&MemberCounters::announced, task.index + 1);
  if (is_early)
    prefetch_for_write(buffer(own_, task.first_chunk + 1), task.request.count * size_of(task.request.dtype));
  return true;
}

// In order: a member that has published that it checked one never reads earlier announcements again.
bool Group::check_all() {
  bool moved = false;
  while (num_checked_ < num_announced_ && check(tasks_[num_checked_ - tasks_.front().index])) {
    num_checked_++;
    moved = true;
  }
  return moved;
}

// Returns whether all members have announced, and announced the same. A difference fails the group only when all
// earlier collectives are complete.
bool Group::check(Task& task) {
  if (!all_have(&MemberCounters::announced, task.index + 1)) return false;
  bool is_oldest = task.index == tasks_.front().index;
  task.is_direct = task.request.kind != CollectiveKind::all_to_all && !task.is_tiny;
  for (int member = 0; member < num_members_; member++) {
    const Announcement& theirs = announcement(member, task.index);
    if (std::memcmp(theirs.fingerprint, task.request.fingerprint, sizeof(theirs.fingerprint)) != 0) {
      if (is_oldest) failed_.store(DISAGREE, std::memory_order_release);
      return false;
    }
    task.is_direct &= theirs.segment >= 0;
  }
  if (task.is_direct && !map_tensors(task)) {
    if (is_oldest) failed_.store(BROKEN, std::memory_order_release);
    return false;
  }
  task.checked = true;
  publish(&MemberCounters::checked, task.index + 1);
  return true;
}

// Maps all members' tensors into this process; returns false if one cannot be mapped.
bool Group::map_tensors(Task& task) {
  task.direct.resize(num_members_);
  for (int member = 0; member < num_members_; member++) {
    const Announcement& theirs = announcement(member, task.index);
    uint8_t* start = member == own_ ? nullptr : host_.segment(ranks_[member], theirs.segment);
    if (member != own_ && start == nullptr) return false;
    task.direct[member] = member == own_ ? task.request.data : start + theirs.offset;
  }
  return true;
}

bool Group::stage(Task& task) {
  if (task.staged == task.num_chunks) return false;
  if (task.request.segment >= 0 && task.request.kind != CollectiveKind::all_to_all && !task.is_tiny) {
    if (!task.checked) return false;  // if all tensors are in shared memory, nothing is staged
    if (task.is_direct) {
      task.staged = task.num_chunks;
      return true;
    }
  }
  bool moved = false;
  while (task.staged < task.num_chunks) {
    uint64_t number = task.first_chunk + task.staged;
    if (number >= NUM_BUFFERS && !all_have(&MemberCounters::consumed, number - NUM_BUFFERS + 1)) break;
    if (!task.is_small) notify();
    copy_in(task, task.staged++);
    publish(&MemberCounters::staged, number + 1);
    moved = true;
    if (task.announced && task.staged > task.consumed + 1) break;  // first consume what can be: others may wait for it
  }
  return moved;
}

bool Group::consume(Task& task) {
  if (!task.checked) return false;
  if (task.is_direct) return consume_direct(task);
  bool moved = false;
  while (task.consumed < task.staged) {
    uint64_t number = task.first_chunk + task.consumed;
    if (!all_have(&MemberCounters::staged, number + 1)) break;
    if (task.two_phases) {
      if (task.reduced == task.consumed) {
        notify();
        reduce_chunk(task, task.reduced++);
        publish(&MemberCounters::reduced, number + 1);
        moved = true;
      }
      if (!all_have(&MemberCounters::reduced, number + 1)) break;
    }
    if (!task.is_small) notify();
    copy_out(task, task.consumed++);
    publish(&MemberCounters::consumed, number + 1);
    moved = true;
  }
  return moved;
}

// Reduces this member's part of all members' tensors; returns them when all members have reduced theirs.
bool Group::consume_direct(Task& task) {
  uint64_t end = task.first_chunk + task.num_chunks;
  if (task.consumed == task.num_chunks) return false;
  bool moved = false;
  if (task.reduced == 0 && task.num_chunks > 0) {
    notify();
    reduce_direct(task);
    task.reduced = task.staged = task.num_chunks;
    publish(&MemberCounters::staged, end);
    publish(&MemberCounters::reduced, end);
    moved = true;
  }
  if (!all_have(&MemberCounters::reduced, end)) return moved;
  task.consumed = task.num_chunks;
  publish(&MemberCounters::consumed, end);
  return true;
}

bool Group::all_have(Counter MemberCounters::*counter, uint64_t least) const {
  for (int member = 0; member < num_members_; member++)
    if ((members_[member].*counter).load(std::memory_order_acquire) < least) return false;
  return true;
}

// A counter never falls: chunks of a later collective may have been staged already.
void Group::publish(Counter MemberCounters::*counter, uint64_t value) {
  Counter& own = members_[own_].*counter;
  if (own.load(std::memory_order_relaxed) < value) own.store(value, std::memory_order_release);
  has_published_ = true;
}

// Wakes sleeping members after publishing: before anything that takes long, and before returning.
void Group::notify() {
  if (has_published_) host_.notify(ranks_);
  has_published_ = false;
}

uint8_t* Group::buffer(int member, uint64_t chunk) const {
  return buffers_ + (member * NUM_BUFFERS + chunk % NUM_BUFFERS) * chunk_bytes_;
}

}  // namespace cp
