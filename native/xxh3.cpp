#include "xxh3.h"

#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "This code needs a little-endian machine with 64-bit addresses."
#endif

namespace dlrover {
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kMix_1 = 0x165667919E3779F9, kMix_2 = 0x9FB21C651E98DF25;

constexpr size_t kStripe = 64;     // bytes that are taken at once
constexpr size_t kLanes = 8;       // sums of a hash, as large together as a stripe
constexpr size_t kSecret = 192;    // bytes of the secret
constexpr size_t kSecretStep = 8;  // the secret of a stripe begins this much after that of the one before
constexpr size_t kBlock = 16;      // stripes after which the lanes are scrambled
constexpr size_t kShort = 240;     // bytes up to which an input is short
constexpr size_t kInCache = 1024;  // stripes (64 KiB) that stay in the cache between copy and hash

alignas(64) constexpr uint8_t kKey[kSecret] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint32_t read32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t read64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t rotate_left(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

// The two halves of the 128-bit product, folded into one.
uint64_t multiply_fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t avalanche(uint64_t value) {
  value = (value ^ value >> 37) * kMix_1;
  return value ^ value >> 32;
}

uint64_t avalanche_xxh64(uint64_t value) {
  value = (value ^ value >> 33) * kPrime64_2;
  value = (value ^ value >> 29) * kPrime64_3;
  return value ^ value >> 32;
}

uint64_t mix16(const uint8_t* data, const uint8_t* key) {
  return multiply_fold(read64(data) ^ read64(key), read64(data + 8) ^ read64(key + 8));
}

uint64_t hash_up_to_16(const uint8_t* data, size_t size) {
  if (size > 8) {
    const uint64_t low = read64(data) ^ (read64(kKey + 24) ^ read64(kKey + 32));
    const uint64_t high = read64(data + size - 8) ^ (read64(kKey + 40) ^ read64(kKey + 48));
    return avalanche(size + __builtin_bswap64(low) + high + multiply_fold(low, high));
  }
  if (size >= 4) {
    uint64_t value = read32(data + size - 4) + (static_cast<uint64_t>(read32(data)) << 32);
    value ^= read64(kKey + 8) ^ read64(kKey + 16);
    value ^= rotate_left(value, 49) ^ rotate_left(value, 24);
    value *= kMix_2;
    value ^= (value >> 35) + size;
    value *= kMix_2;
    return value ^ value >> 28;
  }
  if (size > 0) {
    const uint32_t combined = static_cast<uint32_t>(data[0]) << 16 | static_cast<uint32_t>(data[size >> 1]) << 24 |
                              data[size - 1] | static_cast<uint32_t>(size) << 8;
    return avalanche_xxh64(combined ^ static_cast<uint64_t>(read32(kKey) ^ read32(kKey + 4)));
  }
  return avalanche_xxh64(read64(kKey + 56) ^ read64(kKey + 64));
}

uint64_t hash_17_to_128(const uint8_t* data, size_t size) {
  uint64_t sum = size * kPrime64_1;
  for (size_t pair = (size - 1) / 32 + 1; pair-- > 0;) {
    sum += mix16(data + 16 * pair, kKey + 32 * pair);
    sum += mix16(data + size - 16 * (pair + 1), kKey + 32 * pair + 16);
  }
  return avalanche(sum);
}

uint64_t hash_129_to_240(const uint8_t* data, size_t size) {
  uint64_t sum = size * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) sum += mix16(data + 16 * i, kKey + 16 * i);
  sum = avalanche(sum);
  for (size_t i = 8; i < size / 16; ++i) sum += mix16(data + 16 * i, kKey + 16 * (i - 8) + 3);
  return avalanche(sum + mix16(data + size - 16, kKey + 136 - 17));
}

uint64_t hash_short(const uint8_t* data, size_t size) {
  if (size <= 16) return hash_up_to_16(data, size);
  return size <= 128 ? hash_17_to_128(data, size) : hash_129_to_240(data, size);
}

void take_stripe(uint64_t* lanes, const uint8_t* data, const uint8_t* key) {
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t value = read64(data + 8 * i), keyed = value ^ read64(key + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += static_cast<uint64_t>(static_cast<uint32_t>(keyed)) * (keyed >> 32);
  }
}

alignas(64) constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                            kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

// What differs between instruction sets. `take` reads all stripes of an input into lanes that begin as kStart,
// scrambles these after each block and, unless nothing is to be stored, copies the stripes to `to`. It reads each
// stripe once, as another process may write to it, and leaves the last one behind the lanes.
struct Variant {
  const char* name;
  void (*take[3])(uint64_t* lanes, const uint8_t* from, uint8_t* to, size_t stripes);
  void (*stream)(const uint8_t* from, uint8_t* to, size_t stripes);
};

void go_on_plain(uint64_t* lanes, const uint8_t* from, size_t stripes) {
  for (size_t n = 0; n < stripes; ++n, from += kStripe) {
    take_stripe(lanes, from, kKey + n % kBlock * kSecretStep);
    if (n % kBlock != kBlock - 1) continue;
    for (size_t i = 0; i < 8; ++i) {
      lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ read64(kKey + kSecret - kStripe + 8 * i)) * kPrime32_1;
    }
  }
}

void take_plain(uint64_t* lanes, const uint8_t* from, uint8_t*, size_t stripes) {
  std::memcpy(lanes, kStart, sizeof kStart);
  go_on_plain(lanes, from, stripes);
  std::memcpy(lanes + kLanes, from + (stripes - 1) * kStripe, kStripe);
}

// Copy and take in parts that stay in the cache in between.
void copy_and_take_plain(uint64_t* lanes, const uint8_t* from, uint8_t* to, size_t stripes) {
  std::memcpy(lanes, kStart, sizeof kStart);
  while (stripes > 0) {
    const size_t part = stripes < kInCache ? stripes : kInCache;
    std::memcpy(to, from, part * kStripe);
    go_on_plain(lanes, to, part);
    from += part * kStripe, to += part * kStripe, stripes -= part;
  }
  std::memcpy(lanes + kLanes, to - kStripe, kStripe);
}

void stream_plain(const uint8_t* from, uint8_t* to, size_t stripes) { std::memcpy(to, from, stripes * kStripe); }

constexpr Variant kPlain = {"plain", {take_plain, copy_and_take_plain, copy_and_take_plain}, stream_plain};

#if defined(__x86_64__)
constexpr size_t kAhead = 4096;  // bytes between what is taken and what is fetched: a page, for its address

// Fetch what is taken later, up to the end; beyond it other pieces would lose time.
__attribute__((always_inline)) inline void fetch(const uint8_t* from, const uint8_t* end) {
  _mm_prefetch(reinterpret_cast<const char*>(from + kAhead < end ? from + kAhead : end), _MM_HINT_T0);
}

#define DLROVER_AVX2 __attribute__((target("avx2")))
#define DLROVER_AVX512 __attribute__((target("avx512f")))

const __m256i* wide(const uint8_t* at) { return reinterpret_cast<const __m256i*>(at); }
__m256i* wide(uint8_t* at) { return reinterpret_cast<__m256i*>(at); }

template <Store store>
DLROVER_AVX2 void take_avx2(uint64_t* lanes, const uint8_t* from, uint8_t* to, size_t stripes) {
  const uint8_t* const last = from + stripes * kStripe;
  const auto* start = reinterpret_cast<const __m256i*>(kStart);
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
  __m256i sums[2] = {_mm256_load_si256(start), _mm256_load_si256(start + 1)}, values[2] = {};
  for (size_t n = 0; n < stripes;) {
    const size_t end = n + kBlock < stripes ? n + kBlock : stripes;
    for (const uint8_t* key = kKey; n < end; ++n, key += kSecretStep, from += kStripe) {
      fetch(from, last);
      for (int i = 0; i < 2; ++i) {
        const __m256i value = values[i] = _mm256_loadu_si256(wide(from) + i);
        if (store == Store::cached) _mm256_storeu_si256(wide(to + n * kStripe) + i, value);
        if (store == Store::streamed) _mm256_stream_si256(wide(to + n * kStripe) + i, value);
        const __m256i keyed = _mm256_xor_si256(value, _mm256_loadu_si256(wide(key) + i));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        sums[i] = _mm256_add_epi64(sums[i], _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)));
        sums[i] = _mm256_add_epi64(sums[i], product);
      }
    }
    if (n % kBlock != 0) break;
    for (int i = 0; i < 2; ++i) {
      const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums[i], _mm256_srli_epi64(sums[i], 47)),
                                             _mm256_loadu_si256(wide(kKey + kSecret - kStripe) + i));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      sums[i] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
  }
  for (int i = 0; i < 2; ++i) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes) + i, sums[i]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + kLanes) + i, values[i]);
  }
}

DLROVER_AVX2 void stream_avx2(const uint8_t* from, uint8_t* to, size_t stripes) {
  const uint8_t* const last = from + stripes * kStripe;
  for (; stripes > 0; --stripes, from += kStripe, to += kStripe) {
    fetch(from, last);
    for (int i = 0; i < 2; ++i) _mm256_stream_si256(wide(to) + i, _mm256_loadu_si256(wide(from) + i));
  }
}

template <Store store>
DLROVER_AVX512 void take_avx512(uint64_t* lanes, const uint8_t* from, uint8_t* to, size_t stripes) {
  const uint8_t* const last = from + stripes * kStripe;
  const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32_1));
  const __m512i last_key = _mm512_loadu_si512(kKey + kSecret - kStripe);
  __m512i sum = _mm512_load_si512(kStart), value = sum;
  for (size_t n = 0; n < stripes;) {
    const size_t end = n + kBlock < stripes ? n + kBlock : stripes;
    for (const uint8_t* key = kKey; n < end; ++n, key += kSecretStep, from += kStripe) {
      fetch(from, last);
      value = _mm512_loadu_si512(from);
      if (store == Store::cached) _mm512_storeu_si512(to + n * kStripe, value);
      if (store == Store::streamed) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + n * kStripe), value);
      const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(key));
      const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
      sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 3, 2))));
      sum = _mm512_add_epi64(sum, product);
    }
    if (n % kBlock != 0) break;
    const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), last_key);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
  }
  _mm512_store_si512(lanes, sum);
  _mm512_store_si512(lanes + kLanes, value);
}

DLROVER_AVX512 void stream_avx512(const uint8_t* from, uint8_t* to, size_t stripes) {
  const uint8_t* const last = from + stripes * kStripe;
  for (; stripes > 0; --stripes, from += kStripe, to += kStripe) {
    fetch(from, last);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
}

constexpr Variant kAvx2 = {
    "avx2", {take_avx2<Store::none>, take_avx2<Store::cached>, take_avx2<Store::streamed>}, stream_avx2};
constexpr Variant kAvx512 = {
    "avx512", {take_avx512<Store::none>, take_avx512<Store::cached>, take_avx512<Store::streamed>}, stream_avx512};
#endif

const Variant* usable(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (std::strcmp(name, "avx512") == 0) return __builtin_cpu_supports("avx512f") ? &kAvx512 : nullptr;
  if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") ? &kAvx2 : nullptr;
#endif
  return std::strcmp(name, "plain") == 0 ? &kPlain : nullptr;
}

const Variant* best() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const Variant* found = usable(name)) return found;
  }
  return &kPlain;
}

const Variant* used = best();

Store fitting(const uint8_t* to, uint64_t size, Store store) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % kStripe == 0;
  return store == Store::streamed && (!aligned || size < kStreamWorth) ? Store::cached : store;
}

uint64_t hash_long(const uint8_t* from, uint8_t* to, uint64_t size, Store store) {
  alignas(64) uint64_t lanes[3 * kLanes];  // behind the sums: the last stripe that `take` reads, and the rest
  const uint64_t stripes = (size - 1) / kStripe, rest = size - stripes * kStripe;
  used->take[static_cast<int>(store)](lanes, from, to, stripes);
  std::memcpy(lanes + 2 * kLanes, from + stripes * kStripe, rest);
  if (store != Store::none) std::memcpy(to + stripes * kStripe, lanes + 2 * kLanes, rest);
  // The last stripe ends with the input and mostly lies half in the one before; its key is no multiple of the step.
  take_stripe(lanes, reinterpret_cast<const uint8_t*>(lanes + kLanes) + rest, kKey + kSecret - kStripe - 7);
  uint64_t sum = size * kPrime64_1;
  for (size_t i = 0; i < 4; ++i) {
    const uint8_t* key = kKey + 11 + 16 * i;
    sum += multiply_fold(lanes[2 * i] ^ read64(key), lanes[2 * i + 1] ^ read64(key + 8));
  }
  return avalanche(sum);
}

}  // namespace

uint64_t xxh3(const uint8_t* data, uint64_t size) {
  return size <= kShort ? hash_short(data, size) : hash_long(data, nullptr, size, Store::none);
}

uint64_t xxh3_copy(const uint8_t* from, uint8_t* to, uint64_t size, Store store) {
  if (size > kShort) return hash_long(from, to, size, fitting(to, size, store));
  if (size > 0) std::memcpy(to, from, size);
  return hash_short(to, size);
}

void copy(const uint8_t* from, uint8_t* to, uint64_t size, Store store) {
  if (size == 0) return;
  if (store != Store::streamed || size < kStreamWorth) {
    std::memcpy(to, from, size);
    return;
  }
  const uint64_t head = -reinterpret_cast<uintptr_t>(to) % kStripe, stripes = (size - head) / kStripe;
  const uint64_t end = head + stripes * kStripe;
  std::memcpy(to, from, head);
  used->stream(from + head, to + head, stripes);
  std::memcpy(to + end, from + end, size - end);
}

void finish_streamed() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

const char* variant() { return used->name; }

bool use_variant(const char* name) {
  const Variant* found = usable(name);
  if (found != nullptr) used = found;
  return found != nullptr;
}

}  // namespace dlrover
