#include "collectives.h"

#include <algorithm>
#include <cstring>

namespace cp {
namespace {

constexpr int MOST_READERS = 3;             // so many members each add up everything; more share the work
constexpr uint64_t SMALL_BYTES = 32 << 10;  // as they do with little, where a second round costs more than it saves
constexpr uint64_t TINY_BYTES = 4 << 10;    // are laid out wherever the tensor is: one round instead of two

// These bytes will soon be written: other cores give them up meanwhile.
void claim(const uint8_t* bytes, uint64_t num_bytes) {
  for (uint64_t at = 0; at < num_bytes; at += 64) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(bytes[at]));
#else
    __builtin_prefetch(bytes + at, 1);
#endif
  }
}

}  // namespace

Group::Group(World& world, void* memory, const int* ranks, int num_members)
    : world_(world), ranks_(ranks, ranks + num_members), num_members_(num_members) {
  auto* bytes = static_cast<uint8_t*>(memory);
  header_ = reinterpret_cast<GroupHeader*>(bytes);
  places_ = reinterpret_cast<Place*>(bytes + aligned(sizeof(GroupHeader)));
  buffers_ = bytes + aligned(sizeof(GroupHeader)) + aligned(num_members * sizeof(Place));
  piece_bytes_ = header_->piece_bytes;
  own_ = static_cast<int>(std::find(ranks_.begin(), ranks_.end(), world.rank()) - ranks_.begin());
  world_.add(this);
}

Group::~Group() { world_.remove(this); }

int64_t Group::start(const Request& request) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  Task& task = tasks_.emplace_back();
  task.request = request;
  if (request.bounds != nullptr) task.bounds.assign(request.bounds, request.bounds + num_members_ + 1);
  if (request.out_bounds != nullptr) task.out_bounds.assign(request.out_bounds, request.out_bounds + num_members_ + 1);
  plan(task);
  task.turn = num_started_++;
  task.first_piece = num_pieces_;
  num_pieces_ += task.num_pieces;
  int64_t turn = static_cast<int64_t>(task.turn);
  bool is_small = task.is_small;
  advance();  // the task may be gone now
  bool is_urgent = is_small && tasks_.size() == 1;  // a second call from Python would cost as much
  for (int look = 0; is_urgent && look < world_.looks() && !is_done(turn); look++) {
    relax();
    advance();
  }
  return num_done() > turn ? COMPLETE : turn;
}

// How the collective is cut into pieces: the same on all members, wherever their tensors are.
void Group::plan(Task& task) {
  const Request& request = task.request;
  uint64_t size = size_of(request.dtype), longest = request.count;
  bool has_slots = request.kind == Kind::reduce_scatter || request.kind == Kind::all_to_all;
  if (request.kind == Kind::reduce_scatter || request.kind == Kind::all_gather) {
    longest = 0;
    for (int i = 0; i < num_members_; i++) longest = std::max(longest, task.bounds[i + 1] - task.bounds[i]);
  }
  if (request.kind == Kind::all_to_all) longest = request.longest;
  if (request.kind == Kind::barrier) longest = 0;
  task.window = (has_slots ? piece_bytes_ / num_members_ / 64 * 64 : piece_bytes_) / size;
  task.num_pieces = (longest + task.window - 1) / task.window;
  uint64_t num_bytes = request.count * size;
  task.two_phases = request.kind == Kind::all_reduce && num_members_ > MOST_READERS && num_bytes > SMALL_BYTES;
  task.is_small = request.kind == Kind::all_reduce && num_bytes <= SMALL_BYTES;
  task.is_tiny = request.kind == Kind::all_reduce && num_bytes <= TINY_BYTES;
}

bool Group::advance() {
  std::unique_lock<std::recursive_mutex> guard(lock_, std::try_to_lock);
  if (!guard.owns_lock() || has_failed()) return false;  // another thread is at it
  bool moved = announce_all();
  for (bool again = true; again && !tasks_.empty() && !has_failed();) {
    again = check_all();
    if (has_failed()) return true;
    for (Task& task : tasks_) {  // laid out ahead, as long as there are buffers
      bool went = task.announced && lay_out(task);
      again |= went;
      if (task.laid_out < task.num_pieces) break;
    }
    Task& oldest = tasks_.front();
    again |= take(oldest);
    if (oldest.checked && oldest.taken == oldest.num_pieces) {
      num_done_.store(static_cast<int64_t>(oldest.turn) + 1, std::memory_order_release);
      tasks_.pop_front();
      announce_all();
      again = true;
    }
    moved |= again;
  }
  ring();
  return moved;
}

bool Group::announce_all() {
  bool moved = false;
  uint64_t first = tasks_.empty() ? num_announced_ : tasks_.front().turn;
  while (num_announced_ < num_started_ && announce(tasks_[num_announced_ - first])) {
    num_announced_++;
    moved = true;
  }
  return moved;
}

bool Group::announce(Task& task) {
  if (task.turn >= NOTICES && !all_have(&Place::checked, task.turn - NOTICES + 1)) return false;
  Notice& notice = places_[own_].notices[task.turn % NOTICES];
  std::memcpy(notice.fingerprint, task.request.fingerprint, sizeof(notice.fingerprint));
  notice.segment = task.request.segment;
  notice.offset = task.request.offset;
  notice.reading_bytes = static_cast<uint32_t>(std::min<size_t>(task.request.reading_bytes, READING_BYTES));
  std::memcpy(notice.reading, task.request.reading, notice.reading_bytes);
  task.announced = true;
  bool is_next = places_[own_].laid_out.load(std::memory_order_relaxed) == task.first_piece;  // all before are there
  bool is_early = task.is_small && is_next && (task.is_tiny || task.request.segment < 0);
  if (is_early) lay_out(task);  // then the others see both at once
  tell(&Place::announced, task.turn + 1);
  if (is_early) claim(buffer(own_, task.first_piece + 1), task.request.count * size_of(task.request.dtype));
  return true;
}

// In the order of their turns: who has told that it has checked one looks at none of the notices before it any more.
bool Group::check_all() {
  bool moved = false;
  while (num_checked_ < num_announced_ && check(tasks_[num_checked_ - tasks_.front().turn])) {
    num_checked_++;
    moved = true;
  }
  return moved;
}

// All members have announced the same; false where some have not announced yet. A group fails only when all before it
// is complete.
bool Group::check(Task& task) {
  if (!all_have(&Place::announced, task.turn + 1)) return false;
  bool is_oldest = task.turn == tasks_.front().turn;
  task.is_direct = task.request.kind != Kind::all_to_all && !task.is_tiny;
  for (int place = 0; place < num_members_; place++) {
    const Notice& theirs = notice(place, task.turn);
    if (std::memcmp(theirs.fingerprint, task.request.fingerprint, sizeof(theirs.fingerprint)) != 0) {
      if (is_oldest) failed_.store(DISAGREE, std::memory_order_release);
      return false;
    }
    task.is_direct &= theirs.segment >= 0;
  }
  if (task.is_direct && !find_directly(task)) {
    if (is_oldest) failed_.store(BROKEN, std::memory_order_release);
    return false;
  }
  task.checked = true;
  tell(&Place::checked, task.turn + 1);
  return true;
}

// Where everybody's tensor is in this process; false where one cannot be had.
bool Group::find_directly(Task& task) {
  task.direct.resize(num_members_);
  for (int place = 0; place < num_members_; place++) {
    const Notice& theirs = notice(place, task.turn);
    uint8_t* start = place == own_ ? nullptr : world_.segment(ranks_[place], theirs.segment);
    if (place != own_ && start == nullptr) return false;
    task.direct[place] = place == own_ ? task.request.data : start + theirs.offset;
  }
  return true;
}

bool Group::lay_out(Task& task) {
  if (task.laid_out == task.num_pieces) return false;
  if (task.request.segment >= 0 && task.request.kind != Kind::all_to_all && !task.is_tiny) {
    if (!task.checked) return false;  // it may not have to be laid out at all
    if (task.is_direct) {
      task.laid_out = task.num_pieces;
      return true;
    }
  }
  bool moved = false;
  while (task.laid_out < task.num_pieces) {
    uint64_t number = task.first_piece + task.laid_out;
    if (number >= BUFFERS && !all_have(&Place::taken, number - BUFFERS + 1)) break;
    if (!task.is_small) ring();
    copy_in(task, task.laid_out++);
    tell(&Place::laid_out, number + 1);
    moved = true;
    if (task.announced && task.laid_out > task.taken + 1) break;  // others wait for what can be taken meanwhile
  }
  return moved;
}

bool Group::take(Task& task) {
  if (!task.checked) return false;
  if (task.is_direct) return take_directly(task);
  bool moved = false;
  while (task.taken < task.laid_out) {
    uint64_t number = task.first_piece + task.taken;
    if (!all_have(&Place::laid_out, number + 1)) break;
    if (task.two_phases) {
      if (task.combined == task.taken) {
        ring();
        combine(task, task.combined++);
        tell(&Place::combined, number + 1);
        moved = true;
      }
      if (!all_have(&Place::combined, number + 1)) break;
    }
    if (!task.is_small) ring();
    copy_out(task, task.taken++);
    tell(&Place::taken, number + 1);
    moved = true;
  }
  return moved;
}

// Every member works on its share in everybody's tensor; the tensors are theirs again when all have.
bool Group::take_directly(Task& task) {
  uint64_t end = task.first_piece + task.num_pieces;
  if (task.taken == task.num_pieces) return false;
  bool moved = false;
  if (task.combined == 0 && task.num_pieces > 0) {
    ring();
    share_directly(task);
    task.combined = task.laid_out = task.num_pieces;
    tell(&Place::laid_out, end);
    tell(&Place::combined, end);
    moved = true;
  }
  if (!all_have(&Place::combined, end)) return moved;
  task.taken = task.num_pieces;
  tell(&Place::taken, end);
  return true;
}

bool Group::all_have(Counter Place::* counter, uint64_t least) const {
  for (int place = 0; place < num_members_; place++)
    if ((places_[place].*counter).load(std::memory_order_acquire) < least) return false;
  return true;
}

// A counter never falls: pieces of a later collective may have been laid out before.
void Group::tell(Counter Place::* counter, uint64_t value) {
  Counter& own = places_[own_].*counter;
  if (own.load(std::memory_order_relaxed) < value) own.store(value, std::memory_order_release);
  has_told_ = true;
}

// Those who sleep hear what has been told: before anything that takes long, and before this rank looks no further.
void Group::ring() {
  if (has_told_) world_.ring(ranks_);
  has_told_ = false;
}

uint8_t* Group::buffer(int place, uint64_t piece) const {
  return buffers_ + (place * BUFFERS + piece % BUFFERS) * piece_bytes_;
}

}  // namespace cp
