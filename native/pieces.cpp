// What a member does with the numbers of one piece, or of a whole tensor that all members see.
#include <algorithm>
#include <cstring>

#include "collectives.h"

namespace cp {
namespace {

// The part of `count` numbers that member `place` of `num_members` works on, its ends on cache lines.
std::pair<uint64_t, uint64_t> share(uint64_t count, int place, int num_members) {
  constexpr uint64_t line = 64;
  auto edge = [&](int at) { return at == num_members ? count : count * at / num_members / line * line; };
  return {edge(place), edge(place + 1)};
}

}  // namespace

void Group::share_directly(Task& task) {
  const Request& request = task.request;
  uint64_t size = size_of(request.dtype);
  const std::vector<uint8_t*>& data = task.direct;
  std::vector<const void*> ins(num_members_);
  std::vector<void*> outs(num_members_);
  if (request.kind == Kind::all_reduce) {
    auto [low, high] = share(request.count, own_, num_members_);
    for (int place = 0; place < num_members_; place++) ins[place] = outs[place] = data[place] + low * size;
    reduce(outs.data(), num_members_, ins.data(), num_members_, high - low, request.dtype, request.verb, request.scale);
  } else if (request.kind == Kind::reduce_scatter) {
    uint64_t low = task.bounds[own_], high = task.bounds[own_ + 1];
    for (int place = 0; place < num_members_; place++) ins[place] = data[place] + low * size;
    outs[0] = data[own_] + low * size;
    reduce(outs.data(), 1, ins.data(), num_members_, high - low, request.dtype, request.verb, request.scale);
  } else if (request.kind == Kind::all_gather) {
    for (int place = 0; place < num_members_; place++) {
      uint64_t low = task.bounds[place], high = task.bounds[place + 1];
      if (place != own_ && low < high) std::memcpy(data[own_] + low * size, data[place] + low * size, (high - low) * size);
    }
  } else if (request.kind == Kind::broadcast && own_ != request.root) {
    std::memcpy(data[own_], data[request.root], request.count * size);
  }
}

void Group::copy_in(Task& task, uint64_t piece) {
  const Request& request = task.request;
  uint64_t size = size_of(request.dtype), low = piece * task.window;
  uint8_t* to = buffer(own_, task.first_piece + piece);
  auto copy = [&](uint8_t* target, uint64_t start, uint64_t stop) {
    uint64_t first = start + low, last = std::min(stop, first + task.window);
    if (first < last) std::memcpy(target, request.data + first * size, (last - first) * size);
  };
  switch (request.kind) {
    case Kind::all_reduce: return copy(to, 0, request.count);
    case Kind::broadcast: return own_ == request.root ? copy(to, 0, request.count) : void();
    case Kind::all_gather: return copy(to, task.bounds[own_], task.bounds[own_ + 1]);
    case Kind::reduce_scatter:
    case Kind::all_to_all:
      for (int place = 0; place < num_members_; place++)
        if (place != own_) copy(to + place * task.window * size, task.bounds[place], task.bounds[place + 1]);
      return;
    case Kind::barrier: return;
  }
}

void Group::combine(Task& task, uint64_t piece) {
  const Request& request = task.request;
  uint64_t size = size_of(request.dtype), number = task.first_piece + piece;
  uint64_t count = std::min(task.window, request.count - piece * task.window);
  auto [low, high] = share(count, own_, num_members_);
  std::vector<const void*> ins(num_members_);
  for (int place = 0; place < num_members_; place++) ins[place] = buffer(place, number) + low * size;
  void* out = buffer(own_, number) + low * size;
  reduce(&out, 1, ins.data(), num_members_, high - low, request.dtype, request.verb, request.scale);
}

void Group::copy_out(Task& task, uint64_t piece) {
  const Request& request = task.request;
  uint64_t size = size_of(request.dtype), low = piece * task.window, number = task.first_piece + piece;
  std::vector<const void*> ins(num_members_);
  void* out;
  switch (request.kind) {
    case Kind::all_reduce: {
      uint64_t count = std::min(task.window, request.count - low);
      uint8_t* own = request.data + low * size;
      if (task.two_phases) {
        for (int place = 0; place < num_members_; place++) {
          auto [first, last] = share(count, place, num_members_);
          std::memcpy(own + first * size, buffer(place, number) + first * size, (last - first) * size);
        }
        return;
      }
      for (int place = 0; place < num_members_; place++) ins[place] = place == own_ ? own : buffer(place, number);
      out = own;
      return reduce(&out, 1, ins.data(), num_members_, count, request.dtype, request.verb, request.scale);
    }
    case Kind::broadcast: {
      uint64_t count = std::min(task.window, request.count - low);
      if (own_ != request.root) std::memcpy(request.data + low * size, buffer(request.root, number), count * size);
      return;
    }
    case Kind::all_gather:
      for (int place = 0; place < num_members_; place++) {
        uint64_t first = task.bounds[place] + low, last = std::min(task.bounds[place + 1], first + task.window);
        if (place != own_ && first < last)
          std::memcpy(request.data + first * size, buffer(place, number), (last - first) * size);
      }
      return;
    case Kind::reduce_scatter: {
      uint64_t first = task.bounds[own_] + low, last = std::min(task.bounds[own_ + 1], first + task.window);
      if (first >= last) return;
      for (int place = 0; place < num_members_; place++)
        ins[place] = place == own_ ? request.data + first * size : buffer(place, number) + own_ * task.window * size;
      out = request.data + first * size;
      return reduce(&out, 1, ins.data(), num_members_, last - first, request.dtype, request.verb, request.scale);
    }
    case Kind::all_to_all:
      for (int place = 0; place < num_members_; place++) {
        uint64_t first = task.out_bounds[place] + low, last = std::min(task.out_bounds[place + 1], first + task.window);
        const uint8_t* from = place == own_ ? request.data + (task.bounds[own_] + low) * size
                                            : buffer(place, number) + own_ * task.window * size;
        if (first < last) std::memcpy(request.out + first * size, from, (last - first) * size);
      }
      return;
    case Kind::barrier: return;
  }
}

}  // namespace cp
