// XXH3 with 64 bits, seed 0 and the default secret, written from the published specification of the algorithm
// (xxHash, doc/xxhash_spec.md), alone or together with a copy of the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlrover {

// How copied bytes are written.
enum class Store {
  none,      // not at all: the bytes are only read
  cached,    // through the cache: for what is read again soon, and for little
  streamed,  // past the cache, which saves reading the old contents first: for much
};

// Bytes of a piece below which streamed stores bring nothing.
constexpr uint64_t kStreamWorth = 4096;

// The hash of [data, data + size).
uint64_t xxh3(const uint8_t* data, uint64_t size);

// Copy [from, from + size) to `to` and return the hash of the bytes that were written, whoever writes to the source
// meanwhile. The two must not overlap.
uint64_t xxh3_copy(const uint8_t* from, uint8_t* to, uint64_t size, Store store);

// Copy without a hash. The two must not overlap.
void copy(const uint8_t* from, uint8_t* to, uint64_t size, Store store);

// Make streamed stores of this thread visible to others.
void finish_streamed();

// The instructions in use: "avx512", "avx2" or "plain".
const char* variant();

// Use the instructions of this name; false if this machine lacks them. For tests and benchmarks.
bool use_variant(const char* name);

}  // namespace dlrover
