// What the index in memory and the one of rows on disk share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlrover {

constexpr size_t kShards = 1024;

__attribute__((always_inline)) inline uint64_t mixed(uint64_t key) {
  // the finalizer of MurmurHash3, which maps keys one to one
  key = (key ^ key >> 33) * 0xff51afd7ed558ccdull;
  key = (key ^ key >> 33) * 0xc4ceb9fe1a85ec53ull;
  return key ^ key >> 33;
}

}  // namespace dlrover
