// Data movement and arithmetic of the collectives: of one chunk, or of whole tensors in shared memory.
#include <algorithm>
#include <cstring>

#include "collectives.h"

namespace cp {
namespace {

// Returns the part of `count` elements that a member reduces, aligned to cache lines.
std::pair<uint64_t, uint64_t> member_range(uint64_t count, int member, int num_members) {
  constexpr uint64_t line = 64;
  auto edge = [&](int at) { return at == num_members ? count : count * at / num_members / line * line; };
  return {edge(member), edge(member + 1)};
}

}  // namespace

void Group::reduce_direct(Task& task) {
  const CollectiveRequest& request = task.request;
  uint64_t size = size_of(request.dtype);
  const std::vector<uint8_t*>& data = task.direct;
  std::vector<const void*> ins(num_members_);
  std::vector<void*> outs(num_members_);
  if (request.kind == CollectiveKind::all_reduce) {
    auto [low, high] = member_range(request.count, own_, num_members_);
    for (int member = 0; member < num_members_; member++) ins[member] = outs[member] = data[member] + low * size;
    reduce(outs.data(), num_members_, ins.data(), num_members_, high - low, request.dtype, request.op, request.scale);
  } else if (request.kind == CollectiveKind::reduce_scatter) {
    uint64_t low = task.bounds[own_], high = task.bounds[own_ + 1];
    for (int member = 0; member < num_members_; member++) ins[member] = data[member] + low * size;
    outs[0] = data[own_] + low * size;
    reduce(outs.data(), 1, ins.data(), num_members_, high - low, request.dtype, request.op, request.scale);
  } else if (request.kind == CollectiveKind::all_gather) {
    for (int member = 0; member < num_members_; member++) {
      uint64_t low = task.bounds[member], high = task.bounds[member + 1];
      if (member != own_ && low < high)
        std::memcpy(data[own_] + low * size, data[member] + low * size, (high - low) * size);
    }
  } else if (request.kind == CollectiveKind::broadcast && own_ != request.root) {
    std::memcpy(data[own_], data[request.root], request.count * size);
  }
}

void Group::copy_in(Task& task, uint64_t chunk) {
  const CollectiveRequest& request = task.request;
  uint64_t size = size_of(request.dtype), low = chunk * task.chunk_elements;
  uint8_t* to = buffer(own_, task.first_chunk + chunk);
  auto copy = [&](uint8_t* target, uint64_t start, uint64_t stop) {
    uint64_t first = start + low, last = std::min(stop, first + task.chunk_elements);
    if (first < last) std::memcpy(target, request.data + first * size, (last - first) * size);
  };
  switch (request.kind) {
    case CollectiveKind::all_reduce:
      return copy(to, 0, request.count);
    case CollectiveKind::broadcast:
      return own_ == request.root ? copy(to, 0, request.count) : void();
    case CollectiveKind::all_gather:
      return copy(to, task.bounds[own_], task.bounds[own_ + 1]);
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::all_to_all:
      for (int member = 0; member < num_members_; member++)
        if (member != own_)
          copy(to + member * task.chunk_elements * size, task.bounds[member], task.bounds[member + 1]);
      return;
    case CollectiveKind::barrier:
      return;
  }
}

void Group::reduce_chunk(Task& task, uint64_t chunk) {
  const CollectiveRequest& request = task.request;
  uint64_t size = size_of(request.dtype), number = task.first_chunk + chunk;
  uint64_t count = std::min(task.chunk_elements, request.count - chunk * task.chunk_elements);
  auto [low, high] = member_range(count, own_, num_members_);
  std::vector<const void*> ins(num_members_);
  for (int member = 0; member < num_members_; member++) ins[member] = buffer(member, number) + low * size;
  void* out = buffer(own_, number) + low * size;
  reduce(&out, 1, ins.data(), num_members_, high - low, request.dtype, request.op, request.scale);
}

void Group::copy_out(Task& task, uint64_t chunk) {
  const CollectiveRequest& request = task.request;
  uint64_t size = size_of(request.dtype), low = chunk * task.chunk_elements, number = task.first_chunk + chunk;
  std::vector<const void*> ins(num_members_);
  void* out;
  switch (request.kind) {
    case CollectiveKind::all_reduce: {
      uint64_t count = std::min(task.chunk_elements, request.count - low);
      uint8_t* own = request.data + low * size;
      if (task.two_phases) {
        for (int member = 0; member < num_members_; member++) {
          auto [first, last] = member_range(count, member, num_members_);
          std::memcpy(own + first * size, buffer(member, number) + first * size, (last - first) * size);
        }
        return;
      }
      for (int member = 0; member < num_members_; member++) ins[member] = member == own_ ? own : buffer(member, number);
      out = own;
      return reduce(&out, 1, ins.data(), num_members_, count, request.dtype, request.op, request.scale);
    }
    case CollectiveKind::broadcast: {
      uint64_t count = std::min(task.chunk_elements, request.count - low);
      if (own_ != request.root) std::memcpy(request.data + low * size, buffer(request.root, number), count * size);
      return;
    }
    case CollectiveKind::all_gather:
      for (int member = 0; member < num_members_; member++) {
        uint64_t first = task.bounds[member] + low,
                 last = std::min(task.bounds[member + 1], first + task.chunk_elements);
        if (member != own_ && first < last)
          std::memcpy(request.data + first * size, buffer(member, number), (last - first) * size);
      }
      return;
    case CollectiveKind::reduce_scatter: {
      uint64_t first = task.bounds[own_] + low, last = std::min(task.bounds[own_ + 1], first + task.chunk_elements);
      if (first >= last) return;
      for (int member = 0; member < num_members_; member++)
        ins[member] =
            member == own_ ? request.data + first * size : buffer(member, number) + own_ * task.chunk_elements * size;
      out = request.data + first * size;
      return reduce(&out, 1, ins.data(), num_members_, last - first, request.dtype, request.op, request.scale);
    }
    case CollectiveKind::all_to_all:
      for (int member = 0; member < num_members_; member++) {
        uint64_t first = task.out_bounds[member] + low,
                 last = std::min(task.out_bounds[member + 1], first + task.chunk_elements);
        const uint8_t* from = member == own_ ? request.data + (task.bounds[own_] + low) * size
                                             : buffer(member, number) + own_ * task.chunk_elements * size;
        if (first < last) std::memcpy(request.out + first * size, from, (last - first) * size);
      }
      return;
    case CollectiveKind::barrier:
      return;
  }
}

}  // namespace cp
