// The C ABI of dlrover._native: work on lists of pieces of memory. A piece is a source address, a destination
// address and a size; the address of an empty piece may be null. A source and a destination that overlap within one
// piece are copied as by memmove; those of different pieces must not overlap, since pieces have no order.
#include <cstdint>
#include <cstring>

#include "threads.h"
#include "xxh3.h"

#ifndef DLROVER_BUILD
#define DLROVER_BUILD ""
#endif
#define DLROVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace dlrover {
namespace {

constexpr uint64_t kStreamTotal = 16 << 20;  // bytes from which copies would only displace the cache's contents
constexpr size_t kAhead = 16;                // pieces whose first bytes are fetched before their turn
constexpr uint64_t kLine = 64;               // bytes of a cache line

const uint8_t* source_at(uint64_t address) { return reinterpret_cast<const uint8_t*>(address); }
uint8_t* destination_at(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

Store store_for(uint64_t total) { return total < kStreamTotal ? Store::cached : Store::streamed; }

bool overlap(const uint8_t* from, const uint8_t* to, uint64_t size) {
  const auto a = reinterpret_cast<uintptr_t>(from), b = reinterpret_cast<uintptr_t>(to);
  return a < b + size && b < a + size;
}

// Inline, since GCC takes a function that only fetches for one without effect, and drops the call.
__attribute__((always_inline)) inline void fetch(const uint64_t* addresses, size_t index, size_t last,
                                                 const uint64_t* sizes) {
  if (index >= last) return;
  const uint64_t size = sizes[index] < 4 * kLine ? sizes[index] : 4 * kLine;
  for (uint64_t at = 0; at < size; at += kLine) __builtin_prefetch(source_at(addresses[index]) + at);
}

void copy_part(const uint8_t* from, uint8_t* to, uint64_t size, const Run& run, Store store) {
  if (!overlap(from, to, size)) {
    const uint64_t begin = run.part ? run.begin : 0, end = run.part ? run.end : size;
    copy(from + begin, to + begin, end - begin, store);
  } else if (run.begin == 0) {  // an overlapping piece is not divided
    std::memmove(to, from, size);
  }
}

uint64_t copy_hash_piece(const uint8_t* from, uint8_t* to, uint64_t size, Store store) {
  if (!overlap(from, to, size)) return xxh3_copy(from, to, size, store);
  std::memmove(to, from, size);
  return xxh3(to, size);
}

}  // namespace

// The number of this interface; the loader refuses a library with another one.
DLROVER_EXPORT uint32_t dlrover_abi() { return 7; }

// What the build hook compares with the present sources: a hash of them and of the compiler's command.
DLROVER_EXPORT const char* dlrover_build() { return "dlrover-build:" DLROVER_BUILD; }

DLROVER_EXPORT const char* dlrover_variant() { return variant(); }

DLROVER_EXPORT int dlrover_use_variant(const char* name) { return use_variant(name); }

// Copy each piece.
DLROVER_EXPORT void dlrover_copy(size_t count, const uint64_t* from, const uint64_t* to, const uint64_t* sizes,
                                 size_t threads) {
  const uint64_t total = sum(count, sizes);
  const Store store = store_for(total);
  handle(count, sizes, true, threads, total, [=](const Run& run) {
    for (size_t i = run.first; i < run.last; ++i) {
      fetch(from, i + kAhead, run.last, sizes);
      if (sizes[i] > 0) copy_part(source_at(from[i]), destination_at(to[i]), sizes[i], run, store);
    }
    finish_streamed();
  });
}

// Write the XXH3 hash of each source to `hashes`.
DLROVER_EXPORT void dlrover_hash(size_t count, const uint64_t* from, const uint64_t* sizes, uint64_t* hashes,
                                 size_t threads) {
  handle(count, sizes, false, threads, sum(count, sizes), [=](const Run& run) {
    for (size_t i = run.first; i < run.last; ++i) {
      fetch(from, i + kAhead, run.last, sizes);
      hashes[i] = xxh3(source_at(from[i]), sizes[i]);
    }
  });
}

// Copy each piece and write the hash of the bytes that were written to `hashes`.
DLROVER_EXPORT void dlrover_copy_hash(size_t count, const uint64_t* from, const uint64_t* to, const uint64_t* sizes,
                                      uint64_t* hashes, size_t threads) {
  const uint64_t total = sum(count, sizes);
  const Store store = store_for(total);
  handle(count, sizes, false, threads, total, [=](const Run& run) {
    for (size_t i = run.first; i < run.last; ++i) {
      fetch(from, i + kAhead, run.last, sizes);
      hashes[i] = copy_hash_piece(source_at(from[i]), destination_at(to[i]), sizes[i], store);
    }
    finish_streamed();
  });
}

}  // namespace dlrover
