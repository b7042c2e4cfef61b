// The C ABI of dlrover._native: a hash table of rows, for embeddings.
//
// The table has 1,024 shards, the hash slots of `dlrover.spec.requests.placement`: the shard of a key is the top
// 10 bits of its hash. A shard has an index with open addressing, of 8 bytes for each place: 32 bits of the hash and
// the number of a row. Rows lie in one reserved range of addresses, so that a row's number gives its address.
//
// A shard's version is odd while somebody changes the shard, who holds it then. Readers take nothing: they copy a row
// and look at the version again (a sequence lock). The keys of a batch go through three stages in groups of 8: places
// of the index are fetched, then rows, then rows are copied. Each group is one stage behind the next one, so that
// misses of the caches overlap all the time.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>

#include "keys.h"
#include "rules.h"
#include "xxh3.h"

#define DLROVER_EXPORT extern "C" __attribute__((visibility("default")))
#define DLROVER_INLINE __attribute__((always_inline)) inline

namespace dlrover {
namespace {

constexpr size_t kGroup = 8, kBlock = 8;
constexpr uint64_t kLog = 63;             // low bits of an index's address: the binary logarithm of its places
constexpr uint64_t kStep = 2ull << 20;    // memory is made usable in multiples of this: a huge page
constexpr uint64_t kPage = 4096;           // bytes of a page, at least
constexpr uint64_t kMostAhead = 4ull << 20;   // bytes of new rows' memory that the system is asked for ahead, at most
constexpr uint64_t kMostAddresses = 1ull << 42;
constexpr uint64_t kFewestBits = 3, kMostBits = 22;  // binary logarithms of an index's places
constexpr uint32_t kNothing = 0;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14; older headers lack it
#if defined(__SANITIZE_THREAD__)
constexpr bool kPeaceful = true;  // readers hold shards, too: the tool knows no sequence locks
#else
constexpr bool kPeaceful = false;
#endif

constexpr uint16_t kChanged = 1, kBlocked = 2;

enum Kind : uint32_t { kFloat32, kBfloat16, kFloat16 };
enum Initial : uint32_t { kConstant, kUniform, kNormal };
enum Admission : uint32_t { kAll, kCounted, kBloom, kChance };

// What the twin knows as well: fields are in the order of `dlrover._native.tables.Options`.
struct Options {
  uint64_t dim, kind, rule, states, steps, memory_bytes, row_bytes, seed, initial, admission, threshold, counters;
  float scale, chance;
  Hyper hyper;
};

struct Header {
  uint64_t key;
  uint32_t last;
  uint16_t count, flags;
};

struct Waiting {
  uint64_t key;
  uint32_t count, used;
};

struct alignas(64) Shard {
  std::atomic<uint64_t> version{0};
  std::atomic<uint64_t> index{0};  // address of the places, and in its low bits their number
  uint32_t used = 0, free = kNothing, fresh = kBlock, free_count = 0;
  uint32_t block_count = 0, block_room = 0, removed_count = 0, removed_room = 0;
  uint32_t* blocks = nullptr;
  uint64_t* removed = nullptr;
  // keys that wait for admission
  Waiting* waiting = nullptr;
  uint32_t waiting_used = 0, waiting_room = 0;
  uint64_t draws = 0;
  bool clean = false;             // rows of the last block are zeros until they are used
  std::atomic<uint32_t> next{0};  // the row that a new key probably gets
};

struct Table {
  Options options;
  size_t stride, width;  // bytes of a row with and without its header
  char* rows = nullptr;
  uint64_t reserved = 0, usable = 0;
  std::atomic<uint32_t> next_row{0};
  uint64_t touched = 0;  // bytes of the range whose pages are there, or are being made
  std::atomic<bool> touching{false};
  pid_t process = 0;
  uint32_t pool = kNothing;  // blocks that shards gave back, linked by the keys of their first rows
  std::atomic<uint64_t> lock{0}, memory{0};
  char* indices[kMostBits + 1] = {};  // indices of one size: one for each shard, all beside each other
  uint32_t users[kMostBits + 1] = {};
  uint8_t* counters = nullptr;  // of the Bloom filter
  Shard shards[kShards];

  DLROVER_INLINE Header* row(uint32_t number) const {
    return reinterpret_cast<Header*>(rows + static_cast<uint64_t>(number - 1) * stride);
  }
};

DLROVER_INLINE size_t shard_of(uint64_t hash) { return hash >> 54; }
DLROVER_INLINE uint32_t mark_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 22); }
// A place says by itself where a key belongs, so that no row is read when the index grows.
DLROVER_INLINE uint64_t home_of(uint64_t place) { return place >> 32; }
DLROVER_INLINE uint64_t place_of(uint32_t mark, uint32_t row) { return static_cast<uint64_t>(mark) << 32 | row; }

DLROVER_INLINE std::atomic<uint64_t>* places_of(uint64_t index) {
  return reinterpret_cast<std::atomic<uint64_t>*>(index & ~kLog);
}
DLROVER_INLINE uint64_t mask_of(uint64_t index) { return (1ull << (index & kLog)) - 1; }

DLROVER_INLINE uint32_t draw(uint32_t key, uint32_t index) {  // lowbias32 of C. Wellons's hash-prospector
  uint32_t value = key ^ index;
  value = (value ^ value >> 16) * 0x7feb352d;
  value = (value ^ value >> 15) * 0x846ca68b;
  return value ^ value >> 16;
}

// ---- values of 2 or 4 bytes

template <class To, class From>
DLROVER_INLINE To as(From value) {
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

DLROVER_INLINE float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float value = as<float>(rest << 13) * as<float>(0x77800000u);  // 2^112: also of subnormal numbers
  return as<float>(as<uint32_t>(value) | sign);
}

DLROVER_INLINE uint16_t to_half(float value) {  // to the nearest, ties to even; what is too large becomes infinity
  const uint32_t word = as<uint32_t>(value), sign = word >> 16 & 0x8000;
  const uint32_t size = word & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 0x38800000) {  // subnormal: the addition rounds
    const float shifted = as<float>(size) + 0.5f;
    return static_cast<uint16_t>(sign | (as<uint32_t>(shifted) - 0x3f000000));
  }
  const uint32_t odd = size >> 13 & 1;
  return static_cast<uint16_t>(sign | (size - 0x38000000 + 0xfff + odd) >> 13);
}

DLROVER_INLINE uint16_t to_brain(float value) {
  const uint32_t word = as<uint32_t>(value);
  if ((word & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(word >> 16 | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

DLROVER_INLINE void load_values(const Table& table, const char* values, float* out) {
  const size_t dim = table.options.dim;
  const auto* halves = reinterpret_cast<const uint16_t*>(values);
  switch (table.options.kind) {
    case kFloat32: memcpy(out, values, 4 * dim); break;
    case kBfloat16: for (size_t i = 0; i < dim; ++i) out[i] = as<float>(static_cast<uint32_t>(halves[i]) << 16); break;
    default: for (size_t i = 0; i < dim; ++i) out[i] = from_half(halves[i]);
  }
}

DLROVER_INLINE void store_values(const Table& table, char* values, const float* from) {
  const size_t dim = table.options.dim;
  auto* halves = reinterpret_cast<uint16_t*>(values);
  switch (table.options.kind) {
    case kFloat32: memcpy(values, from, 4 * dim); break;
    case kBfloat16: for (size_t i = 0; i < dim; ++i) halves[i] = to_brain(from[i]); break;
    default: for (size_t i = 0; i < dim; ++i) halves[i] = to_half(from[i]);
  }
}

// ---- locks

DLROVER_INLINE void fence(std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(order);
#else
  static_cast<void>(order);
#endif
}

DLROVER_INLINE void hold(std::atomic<uint64_t>* version) {
  for (size_t tries = 0;; ++tries) {
    uint64_t known = version->load(std::memory_order_relaxed);
    if (!(known & 1) && version->compare_exchange_weak(known, known + 1, std::memory_order_acquire)) break;
    if (tries > 64) sched_yield();
  }
  fence(std::memory_order_release);  // nobody sees a change before the odd version
}

DLROVER_INLINE void release(std::atomic<uint64_t>* version) {
  version->store(version->load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// ---- memory

bool charge(Table* table, uint64_t bytes) {
  const uint64_t most = table->options.memory_bytes;
  if (table->memory.fetch_add(bytes) + bytes <= most || !most) return true;
  table->memory.fetch_sub(bytes);
  return false;
}

// A thread that makes pages for rows to come: where the system has to find the memory first, the touch of a new huge
// page takes milliseconds, which a lookup would wait for.
struct Touch {
  Table* table;
  uint64_t begin, end;

  static void* run(void* given) {
    const Touch touch = *static_cast<Touch*>(given);
    free(given);
    for (uint64_t at = touch.begin; at < touch.end; at += kStep)  // a failure means that a lookup does it
      madvise(touch.table->rows + at, kStep, kPopulateWrite);
    touch.table->touching.store(false, std::memory_order_release);
    return nullptr;
  }
};

// Ask for pages ahead, for an eighth of the memory in use. The caller holds the table.
void touch_ahead(Table* table, uint64_t used) {
  const uint64_t most = table->options.row_bytes ? table->options.row_bytes : table->reserved;
  const uint64_t ahead = std::min(used / 8, kMostAhead);
  const uint64_t begin = std::max(table->touched, (used + kStep - 1) / kStep * kStep);
  const uint64_t end = std::min({used + ahead, table->usable, most}) / kStep * kStep;
  if (begin + ahead / 2 > end || table->touching.exchange(true)) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  auto* touch = static_cast<Touch*>(malloc(sizeof(Touch)));
  if (touch) *touch = {table, begin, end};
  if (touch && pthread_create(&thread, nullptr, &Touch::run, touch) == 0) {
    pthread_detach(thread);
    table->touched = end;
  } else {
    free(touch);
    table->touching.store(false);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Number of the first of kBlock new rows; 0 if there is no memory for them. `clean` is whether they are zeros.
uint32_t new_block(Table* table, bool* clean) {
  *clean = false;
  hold(&table->lock);
  const uint32_t given = table->pool;
  if (given) table->pool = static_cast<uint32_t>(table->row(given)->key);
  release(&table->lock);
  if (given) return given;
  if (!charge(table, kBlock * table->stride)) return 0;
  hold(&table->lock);
  const uint32_t first = table->next_row.load(std::memory_order_relaxed);
  const uint64_t end = (static_cast<uint64_t>(first) + kBlock) * table->stride;
  const uint64_t most = table->options.row_bytes;
  bool room = end <= table->reserved && (!most || end <= most) && first < UINT32_MAX - 2 * kBlock;
  if (room && end > table->usable) {
    uint64_t more = table->usable / 8 > 64 * kStep ? table->usable / 8 / kStep * kStep : 64 * kStep;
    if (more > table->reserved - table->usable) more = table->reserved - table->usable;
    room = mprotect(table->rows + table->usable, more, PROT_READ | PROT_WRITE) == 0;
    if (room) {
      madvise(table->rows + table->usable, more, MADV_HUGEPAGE);
      table->usable += more;
    }
  }
  if (room) table->next_row.store(first + kBlock, std::memory_order_relaxed);
  if (room) touch_ahead(table, end);
  release(&table->lock);
  if (!room) table->memory.fetch_sub(kBlock * table->stride);
  *clean = room;
  return room ? first + 1 : 0;
}

// Blocks of the pool stay in use of memory, for any shard.
void give_block(Table* table, uint32_t first) {
  hold(&table->lock);
  table->row(first)->key = table->pool;
  table->pool = first;
  release(&table->lock);
}

template <class Item>
bool grow(Item** items, uint32_t count, uint32_t* room) {
  if (count < *room) return true;
  const uint32_t more = *room ? 2 * *room : 8;
  auto* larger = static_cast<Item*>(realloc(*items, more * sizeof(Item)));
  if (!larger) return false;
  *items = larger, *room = more;
  return true;
}

DLROVER_INLINE uint64_t index_bytes(uint64_t bits) { return 8ull << bits; }

// Memory for a shard's index of a size, empty; 0 if there is none. A size has a range of addresses of its own, which
// stays reserved: whoever reads an index that is given up finds nothing there, and sees that the version has changed.
uint64_t begin_index(Table* table, size_t shard, uint64_t bits) {
  const uint64_t all = kShards * index_bytes(bits);
  hold(&table->lock);
  char* memory = table->indices[bits];
  if (!memory) {
    void* made = mmap(nullptr, all + kStep, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made != MAP_FAILED) {
      const uint64_t first = reinterpret_cast<uint64_t>(made), start = (first + kStep - 1) / kStep * kStep;
      memory = table->indices[bits] = reinterpret_cast<char*>(start);
      if (start > first) munmap(made, start - first);
      munmap(memory + all, first + kStep - start);
      if (all >= kStep) madvise(memory, all, MADV_HUGEPAGE);
    }
  }
  if (memory) ++table->users[bits];
  release(&table->lock);
  if (!memory) return 0;
  const uint64_t index = reinterpret_cast<uint64_t>(memory + shard * index_bytes(bits)) | bits;
  for (uint64_t i = 0; i <= mask_of(index); ++i) places_of(index)[i].store(0, std::memory_order_relaxed);
  return index;
}

// Give the pages of an index to the system; those that several share, when no shard has one of its size.
void end_index(Table* table, uint64_t index) {
  const uint64_t bits = index & kLog;
  hold(&table->lock);
  if (!--table->users[bits]) madvise(table->indices[bits], kShards * index_bytes(bits), MADV_DONTNEED);
  else if (index_bytes(bits) >= kPage) madvise(places_of(index), index_bytes(bits), MADV_DONTNEED);
  release(&table->lock);
}

uint64_t take_index(Table* table, size_t shard, uint64_t bits) {
  if (bits > kMostBits || !charge(table, index_bytes(bits))) return 0;
  const uint64_t index = begin_index(table, shard, bits);
  if (!index) table->memory.fetch_sub(index_bytes(bits));
  return index;
}

// Give up a shard's index for another one, or for none.
void change_index(Table* table, Shard* shard, uint64_t index) {
  const uint64_t old = shard->index.load(std::memory_order_relaxed);
  for (uint64_t i = 0; index && old && i <= mask_of(old); ++i) {
    const uint64_t place = places_of(old)[i].load(std::memory_order_relaxed);
    if (!place) continue;
    uint64_t at = home_of(place) & mask_of(index);
    while (places_of(index)[at].load(std::memory_order_relaxed)) at = (at + 1) & mask_of(index);
    places_of(index)[at].store(place, std::memory_order_relaxed);
  }
  shard->index.store(index, std::memory_order_release);
  if (old) end_index(table, old);
}

DLROVER_INLINE bool has_places(uint64_t keys, uint64_t bits) { return keys * 8 <= 7ull << bits; }

// Make room for more keys in a shard's index.
bool reserve_index(Table* table, Shard* shard, uint32_t more = 1) {
  const uint64_t old = shard->index.load(std::memory_order_relaxed);
  uint64_t bits = old ? old & kLog : kFewestBits;
  while (!has_places(static_cast<uint64_t>(shard->used) + more, bits)) ++bits;
  if (old && bits == (old & kLog)) return true;
  const uint64_t index = take_index(table, static_cast<size_t>(shard - table->shards), bits);
  if (!index) return false;
  change_index(table, shard, index);
  if (old) table->memory.fetch_sub(index_bytes(old & kLog));
  return true;
}

// Give up a shard's index for the smallest one that its keys have places in. That takes no memory that others might
// have taken meanwhile: the smaller one is a part of what was charged.
void shrink_index(Table* table, Shard* shard) {
  const uint64_t old = shard->index.load(std::memory_order_relaxed);
  if (!old) return;
  uint64_t bits = kFewestBits, index = 0;
  while (!has_places(shard->used, bits)) ++bits;
  if (shard->used && bits >= (old & kLog)) return;
  if (shard->used) index = begin_index(table, static_cast<size_t>(shard - table->shards), bits);
  if (shard->used && !index) return;
  change_index(table, shard, index);
  table->memory.fetch_sub(index_bytes(old & kLog) - (index ? index_bytes(bits) : 0));
}

// ---- one key, with its shard held

struct Found {
  Header* header;
  uint64_t at;
};

Found find(const Table& table, const Shard& shard, uint64_t key, uint64_t hash) {
  const uint64_t index = shard.index.load(std::memory_order_relaxed);
  if (!index) return {nullptr, 0};
  const uint64_t mask = mask_of(index);
  for (uint64_t at = mark_of(hash) & mask;; at = (at + 1) & mask) {
    const uint64_t place = places_of(index)[at].load(std::memory_order_relaxed);
    if (!place) return {nullptr, at};
    if (place >> 32 != mark_of(hash)) continue;
    Header* header = table.row(static_cast<uint32_t>(place));
    if (header->key == key) return {header, at};
  }
}

DLROVER_INLINE void initialize(const Table& table, uint64_t key, float* values) {
  const Options& o = table.options;
  const uint64_t hash = mixed(key ^ mixed(o.seed));
  const uint32_t low = static_cast<uint32_t>(hash), high = static_cast<uint32_t>(hash >> 32);
  switch (o.initial) {
    case kConstant:
      for (size_t i = 0; i < o.dim; ++i) values[i] = o.scale;
      break;
    case kUniform:
      for (size_t i = 0; i < o.dim; ++i) {
        const uint32_t bits = draw(low ^ draw(high, static_cast<uint32_t>(i)), static_cast<uint32_t>(i)) >> 8;
        values[i] = (static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-23f - 1.0f) * o.scale;
      }
      break;
    default:  // the sum of 4 uniform numbers of 16 bits each, with the variance 1
      for (size_t i = 0; i < o.dim; ++i) {
        const uint32_t one = draw(low ^ draw(high, static_cast<uint32_t>(i)), static_cast<uint32_t>(i));
        const uint32_t two = draw(one, high);
        const int32_t total = static_cast<int32_t>((one & 0xffff) + (one >> 16) + (two & 0xffff) + (two >> 16));
        values[i] = static_cast<float>(total - 131070) * 2.6429e-5f * o.scale;
      }
  }
}

void free_row(Table* table, Shard* shard, uint32_t number) {
  Header* header = table->row(number);
  header->key = shard->free;
  header->flags = 0;
  shard->free = number;
  ++shard->free_count;
}

bool take_block(Table* table, Shard* shard) {
  if (!grow(&shard->blocks, shard->block_count, &shard->block_room)) return false;
  const uint32_t first = new_block(table, &shard->clean);
  if (!first) return false;
  shard->blocks[shard->block_count++] = first;
  shard->fresh = 0;
  return true;
}

// Number of a row; 0 if there is no memory for one. `clean` is whether it is zeros.
uint32_t take_row(Table* table, Shard* shard, bool* clean) {
  *clean = false;
  if (shard->free) {
    const uint32_t number = shard->free;
    shard->free = static_cast<uint32_t>(table->row(number)->key);
    --shard->free_count;
    return number;
  }
  if (shard->fresh == kBlock && !take_block(table, shard)) return 0;
  const uint32_t number = shard->blocks[shard->block_count - 1] + shard->fresh++;
  shard->next.store(shard->fresh < kBlock ? number + 1 : kNothing, std::memory_order_relaxed);
  *clean = shard->clean;
  return number;
}

// Make room for more rows of a shard.
bool reserve_rows(Table* table, Shard* shard, uint32_t more) {
  if (shard->free_count + (kBlock - shard->fresh) >= more) return true;
  while (shard->fresh < kBlock) free_row(table, shard, shard->blocks[shard->block_count - 1] + shard->fresh++);
  while (shard->free_count + kBlock < more) {
    if (!take_block(table, shard)) return false;
    while (shard->fresh < kBlock) free_row(table, shard, shard->blocks[shard->block_count - 1] + shard->fresh++);
  }
  return take_block(table, shard);
}

// Move the rows of a shard together, and give blocks without rows and places of the index to all shards.
void pack(Table* table, Shard* shard) {
  shrink_index(table, shard);
  const uint32_t kept = (shard->used + kBlock - 1) / kBlock, count = shard->block_count;
  if (kept >= count) return;
  auto* taken = static_cast<uint8_t*>(calloc(kept * kBlock + 1, 1));
  if (!taken) return;
  uint32_t* blocks = shard->blocks;
  std::sort(blocks, blocks + count);
  const auto at_of = [&](uint32_t number) {  // place of a row among those of all blocks
    const uint32_t first = (number - 1) / kBlock * kBlock + 1;
    return static_cast<uint32_t>(std::lower_bound(blocks, blocks + count, first) - blocks) * kBlock + (number - first);
  };
  const uint64_t index = shard->index.load(std::memory_order_relaxed);
  const uint64_t places = index ? mask_of(index) + 1 : 0;
  for (uint64_t i = 0; i < places; ++i) {
    const uint64_t place = places_of(index)[i].load(std::memory_order_relaxed);
    if (place && at_of(static_cast<uint32_t>(place)) < kept * kBlock) taken[at_of(static_cast<uint32_t>(place))] = 1;
  }
  uint32_t hole = 0;
  for (uint64_t i = 0; i < places; ++i) {
    const uint64_t place = places_of(index)[i].load(std::memory_order_relaxed);
    if (!place || at_of(static_cast<uint32_t>(place)) < kept * kBlock) continue;
    while (taken[hole]) ++hole;
    taken[hole] = 1;
    const uint32_t number = blocks[hole / kBlock] + hole % kBlock;
    memcpy(table->row(number), table->row(static_cast<uint32_t>(place)), table->stride);
    places_of(index)[i].store(place >> 32 << 32 | number, std::memory_order_relaxed);
  }
  shard->free = kNothing, shard->free_count = 0, shard->fresh = kBlock, shard->block_count = kept;
  for (uint32_t at = kept * kBlock; at--;)
    if (!taken[at]) free_row(table, shard, blocks[at / kBlock] + at % kBlock);
  for (uint32_t i = kept; i < count; ++i) give_block(table, blocks[i]);
  free(taken);
}

// A new row for a key: the header and zeros; null without memory.
Header* insert(Table* table, Shard* shard, uint64_t key, uint64_t hash) {
  if (!reserve_index(table, shard)) return nullptr;
  bool clean;
  const uint32_t number = take_row(table, shard, &clean);
  if (!number) return nullptr;
  Header* header = table->row(number);
  *header = {key, 0, 0, kChanged};
  if (!clean) memset(header + 1, 0, table->width);
  const uint64_t index = shard->index.load(std::memory_order_relaxed), mask = mask_of(index);
  uint64_t at = mark_of(hash) & mask;
  while (places_of(index)[at].load(std::memory_order_relaxed)) at = (at + 1) & mask;
  places_of(index)[at].store(place_of(mark_of(hash), number), std::memory_order_relaxed);
  ++shard->used;
  return header;
}

void erase(Table* table, Shard* shard, const Found& found, bool remember) {
  const uint64_t index = shard->index.load(std::memory_order_relaxed), mask = mask_of(index);
  auto* places = places_of(index);
  const uint32_t number = static_cast<uint32_t>(places[found.at].load(std::memory_order_relaxed));
  if (remember && grow(&shard->removed, shard->removed_count, &shard->removed_room))
    shard->removed[shard->removed_count++] = found.header->key;
  free_row(table, shard, number);
  --shard->used;
  uint64_t hole = found.at;  // close the gap: move back whatever may lie there
  for (uint64_t at = (hole + 1) & mask;; at = (at + 1) & mask) {
    const uint64_t place = places[at].load(std::memory_order_relaxed);
    if (!place) break;
    const uint64_t home = home_of(place) & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    places[hole].store(place, std::memory_order_relaxed);
    hole = at;
  }
  places[hole].store(0, std::memory_order_relaxed);
}

// Whether a key that is looked up gets a row now.
bool admitted(Table* table, Shard* shard, uint64_t key, uint64_t hash) {
  const Options& o = table->options;
  switch (o.admission) {
    case kAll: return true;
    case kChance: {
      const uint64_t drawn = mixed(hash ^ mixed(o.seed + ++shard->draws));
      return static_cast<float>(static_cast<int32_t>(drawn >> 40)) * 0x1p-24f < o.chance;
    }
    case kBloom: {
      uint32_t least = UINT32_MAX;
      const uint64_t each = o.counters / kShards;
      uint8_t* own = table->counters + shard_of(hash) * each;
      for (uint64_t i = 0, next = hash; i < 4; ++i) {
        next = mixed(next + 0x9e3779b97f4a7c15ull);
        uint8_t* counter = own + next % each;
        if (*counter < 255) ++*counter;
        if (*counter < least) least = *counter;
      }
      return least >= o.threshold;
    }
    default: break;
  }
  if (2 * shard->waiting_used >= shard->waiting_room) {
    const uint32_t room = shard->waiting_room ? 2 * shard->waiting_room : 16;
    auto* larger = static_cast<Waiting*>(calloc(room, sizeof(Waiting)));
    if (!larger) return false;
    for (uint32_t i = 0; i < shard->waiting_room; ++i) {
      const Waiting& one = shard->waiting[i];
      if (!one.used) continue;
      uint64_t at = mixed(one.key) & (room - 1);
      while (larger[at].used) at = (at + 1) & (room - 1);
      larger[at] = one;
    }
    free(shard->waiting);
    shard->waiting = larger, shard->waiting_room = room;
  }
  uint64_t at = hash & (shard->waiting_room - 1);
  while (shard->waiting[at].used && shard->waiting[at].key != key) at = (at + 1) & (shard->waiting_room - 1);
  Waiting* one = &shard->waiting[at];
  if (!one->used) *one = {key, 0, 1}, ++shard->waiting_used;
  return ++one->count >= o.threshold;
}

DLROVER_INLINE void touch(Header* header, uint32_t now, uint32_t times) {
  header->last = now;
  header->count = static_cast<uint16_t>(header->count + times < 65535 ? header->count + times : 65535);
}

// ---- lookups

struct Lookup {
  Table* table;
  const uint64_t* keys;
  float* out;
  uint32_t now;
  bool insert, count;
  uint8_t* missing;  // if not null, gets 1 for each key without a row
};

// One key with its shard held: what is new, and what a reader could not copy in peace. False without memory.
DLROVER_INLINE bool look_held(const Lookup& ask, size_t i, uint64_t hash) {
  Table* table = ask.table;
  Shard* shard = &table->shards[shard_of(hash)];
  const uint64_t key = ask.keys[i];
  float* out = ask.out + i * table->options.dim;
  hold(&shard->version);
  Header* header = find(*table, *shard, key, hash).header;
  bool made = true;
  if (!header && ask.insert && admitted(table, shard, key, hash)) {
    header = insert(table, shard, key, hash);
    made = header != nullptr;
    if (made) {
      initialize(*table, key, out);
      store_values(*table, reinterpret_cast<char*>(header + 1), out);
    }
  }
  if (header) {
    if (ask.count) touch(header, ask.now, 1);
    load_values(*table, reinterpret_cast<char*>(header + 1), out);
  } else {
    memset(out, 0, 4 * table->options.dim);
    if (ask.missing) ask.missing[i] = 1;
  }
  release(&shard->version);
  return made;
}

// What is known of a group of keys on its way through the stages.
struct Group {
  uint64_t hashes[kGroup], versions[kGroup], indices[kGroup];
  Header* found[kGroup];
};

// First stage: fetch the places of the index.
DLROVER_INLINE void locate(const Table& table, const uint64_t* keys, size_t count, Group* group) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = group->hashes[i] = mixed(keys[i]);
    const Shard& shard = table.shards[shard_of(hash)];
    group->versions[i] = shard.version.load(std::memory_order_acquire);
    const uint64_t index = group->indices[i] = shard.index.load(std::memory_order_acquire);
    if (index) __builtin_prefetch(&places_of(index)[mark_of(hash) & mask_of(index)]);
  }
}

// Second stage: fetch the first `bytes` of the rows that the index names, and with `insert` of those that other keys
// probably get.
template <int kWrite>
DLROVER_INLINE void fetch_rows(const Table& table, size_t count, size_t bytes, bool insert, Group* group) {
  for (size_t i = 0; i < count; ++i) {
    group->found[i] = nullptr;
    const uint64_t index = group->indices[i];
    if (!index) continue;
    const uint64_t mask = mask_of(index), mark = mark_of(group->hashes[i]);
    for (uint64_t at = mark & mask, tries = 0; tries <= mask; at = (at + 1) & mask, ++tries) {
      const uint64_t place = places_of(index)[at].load(std::memory_order_relaxed);
      if (!place) break;
      if (place >> 32 != mark) continue;
      group->found[i] = table.row(static_cast<uint32_t>(place));
      const char* row = reinterpret_cast<const char*>(group->found[i]);
      for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line, kWrite);
      break;
    }
    if (group->found[i] || !insert) continue;
    const uint32_t next = table.shards[shard_of(group->hashes[i])].next.load(std::memory_order_relaxed);
    const char* row = next ? reinterpret_cast<const char*>(table.row(next)) : nullptr;
    for (size_t line = 0; row && line < bytes; line += 64) __builtin_prefetch(row + line, 1);
  }
}

// Third stage: copy rows. Bit i of the result is set if key i has to be looked up again with its shard held.
template <bool kWhole>
DLROVER_INLINE uint32_t copy_rows(const Lookup& ask, size_t first, size_t count, const Group& group) {
  const Table& table = *ask.table;
  const size_t dim = table.options.dim;
  uint32_t again = 0;
  for (size_t i = 0; i < count; ++i) {
    float* out = ask.out + (first + i) * dim;
    const Shard& shard = table.shards[shard_of(group.hashes[i])];
    Header* header = group.found[i];
    if (kPeaceful) {
      again |= 1u << i;
      continue;
    }
    const bool right = header && header->key == ask.keys[first + i];
    if (right) {
      if (kWhole) {
        memcpy(out, header + 1, 4 * dim);
      } else {
        load_values(table, reinterpret_cast<const char*>(header + 1), out);
      }
    } else if (!header && !ask.insert) {
      memset(out, 0, 4 * dim);
    } else {
      again |= 1u << i;
      continue;
    }
    fence(std::memory_order_acquire);
    const uint64_t version = group.versions[i];
    if ((version & 1) || shard.version.load(std::memory_order_relaxed) != version) {
      again |= 1u << i;
    } else if (right && ask.count) {
      touch(header, ask.now, 1);  // another reader may do the same: then one of the two counts
    } else if (!right && ask.missing) {
      ask.missing[first + i] = 1;
    }
  }
  return again;
}

DLROVER_INLINE size_t size_of(size_t group, size_t count) {
  const size_t first = group * kGroup;
  return first >= count ? 0 : count - first < kGroup ? count - first : kGroup;
}

using Held = bool (*)(const Lookup&, size_t, uint64_t);

template <bool kWhole, Held held>
DLROVER_INLINE int look(const Lookup& ask, size_t count) {
  int status = 0;
  Group groups[3];
  const size_t last = (count + kGroup - 1) / kGroup;
  const size_t bytes = sizeof(Header) + ask.table->options.dim * (kWhole ? 4 : 2);
  for (size_t turn = 0; turn < last + 2; ++turn) {
    if (turn < last) locate(*ask.table, ask.keys + turn * kGroup, size_of(turn, count), &groups[turn % 3]);
    if (turn >= 1) fetch_rows<0>(*ask.table, size_of(turn - 1, count), bytes, ask.insert, &groups[(turn - 1) % 3]);
    if (turn < 2) continue;
    const size_t first = (turn - 2) * kGroup;
    uint32_t again = copy_rows<kWhole>(ask, first, size_of(turn - 2, count), groups[(turn - 2) % 3]);
    for (; again; again &= again - 1) {
      const size_t i = first + static_cast<size_t>(__builtin_ctz(again));
      if (!held(ask, i, mixed(ask.keys[i]))) status = ENOMEM;
    }
  }
  return status;
}

// ---- updates

struct Update {
  Table* table;
  const uint64_t* keys;
  const float* gradients;
  uint8_t* missing;  // as in Lookup
};

template <class Rule>
DLROVER_INLINE void update_row(Table* table, Header* header, const float* gradients) {
  const Options& o = table->options;
  char* values = reinterpret_cast<char*>(header + 1);
  float wide[4096];
  const bool whole = o.kind == kFloat32;
  float* states = reinterpret_cast<float*>(values + o.dim * (whole ? 4 : 2) + (whole ? 0 : o.dim % 2 * 2));
  float* own = whole ? reinterpret_cast<float*>(values) : wide;
  float* steps = states + o.dim * Rule::kStates;
  const float step = o.steps ? *steps + 1 : 1;
  if (o.steps) *steps = step;
  if (!whole) load_values(*table, values, wide);
  const bool nothing = Rule::update(o.hyper, {own, states, gradients, o.dim, step});
  if (!whole) store_values(*table, values, wide);
  header->flags = static_cast<uint16_t>((header->flags | kChanged) & ~kBlocked);
  if (nothing) header->flags |= kBlocked;
}

template <class Rule>
DLROVER_INLINE void update_all(const Update& ask, size_t count) {
  Table* table = ask.table;
  const size_t dim = table->options.dim, last = (count + kGroup - 1) / kGroup;
  Group groups[3];
  for (size_t turn = 0; turn < last + 2; ++turn) {
    if (turn < last) locate(*table, ask.keys + turn * kGroup, size_of(turn, count), &groups[turn % 3]);
    if (turn >= 1) fetch_rows<1>(*table, size_of(turn - 1, count), table->stride, false, &groups[(turn - 1) % 3]);
    if (turn < 2) continue;
    const size_t first = (turn - 2) * kGroup, size = size_of(turn - 2, count);
    for (size_t i = 0; i < size; ++i) {
      const uint64_t hash = groups[(turn - 2) % 3].hashes[i];
      Shard* shard = &table->shards[shard_of(hash)];
      hold(&shard->version);
      Header* header = find(*table, *shard, ask.keys[first + i], hash).header;
      if (header) update_row<Rule>(table, header, ask.gradients + (first + i) * dim);
      if (!header && ask.missing) ask.missing[first + i] = 1;
      release(&shard->version);
    }
  }
}

// ---- instruction sets

using Look = int (*)(const Lookup&, size_t);
using Apply = void (*)(const Update&, size_t);

__attribute__((noinline)) bool held(const Lookup& ask, size_t i, uint64_t hash) { return look_held(ask, i, hash); }
int look_whole(const Lookup& ask, size_t count) { return look<true, held>(ask, count); }
int look_half(const Lookup& ask, size_t count) { return look<false, held>(ask, count); }
template <class Rule>
void apply(const Update& ask, size_t count) { update_all<Rule>(ask, count); }

#if defined(__x86_64__)
bool wide() { return strcmp(variant(), "plain") != 0; }
#define DLROVER_AVX2 __attribute__((target("avx2")))
DLROVER_AVX2 __attribute__((noinline)) bool held_avx2(const Lookup& ask, size_t i, uint64_t hash) {
  return look_held(ask, i, hash);
}
DLROVER_AVX2 int look_whole_avx2(const Lookup& ask, size_t count) { return look<true, held_avx2>(ask, count); }
DLROVER_AVX2 int look_half_avx2(const Lookup& ask, size_t count) { return look<false, held_avx2>(ask, count); }
template <class Rule>
DLROVER_AVX2 void apply_avx2(const Update& ask, size_t count) { update_all<Rule>(ask, count); }
#endif

template <class Rule>
Apply chosen() {
#if defined(__x86_64__)
  if (wide()) return apply_avx2<Rule>;
#endif
  return apply<Rule>;
}

Apply rule_of(uint64_t rule) {  // in the order of `dlrover._native.tables.RULES`
  switch (rule) {
    case 0: return chosen<Sgd>();
    case 1: return chosen<Momentum>();
    case 2: return chosen<AdagradRow>();
    case 3: return chosen<Adadelta>();
    case 4: return chosen<Adam>();
    case 5: return chosen<Amsgrad>();
    case 6: return chosen<RectifiedAdam>();
    case 7: return chosen<Adabelief>();
    case 8: return chosen<Lamb>();
    case 9: return chosen<AgdRow>();
    case 10: return chosen<Ftrl>();
    case 11: return chosen<GroupAdam>();
    default: return nullptr;
  }
}

}  // namespace

// ---- the interface

DLROVER_EXPORT void dlrover_table_free(Table* table) {
  while (table->process == getpid() && table->touching.load(std::memory_order_acquire)) sched_yield();
  for (Shard& shard : table->shards) {
    free(shard.blocks);
    free(shard.removed);
    free(shard.waiting);
  }
  for (uint64_t bits = 0; bits <= kMostBits; ++bits)
    if (table->indices[bits]) munmap(table->indices[bits], kShards * index_bytes(bits));
  if (table->rows) munmap(table->rows, table->reserved);
  free(table->counters);
  table->~Table();
  free(table);
}

// A new table; null without memory.
DLROVER_EXPORT Table* dlrover_table_new(const Options* options) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, sizeof(Table))) return nullptr;
  auto* table = new (memory) Table();
  table->options = *options;
  table->process = getpid();
  const Options& o = *options;
  const uint64_t values = o.kind == kFloat32 ? 4 * o.dim : (o.dim + o.dim % 2) * 2;
  table->width = values + 4 * (o.dim * o.states + o.steps);
  table->stride = (sizeof(Header) + table->width + 7) / 8 * 8;
  uint64_t wanted = o.memory_bytes ? o.memory_bytes : kMostAddresses;
  if (wanted > (UINT32_MAX - 1) * table->stride) wanted = (UINT32_MAX - 1) * table->stride;
  for (wanted = (wanted + kStep) / kStep * kStep; wanted >= 64 * kStep || o.memory_bytes; wanted /= 2) {
    void* rows = mmap(nullptr, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (rows != MAP_FAILED) {
      table->rows = static_cast<char*>(rows), table->reserved = wanted;
      break;
    }
    if (wanted < kStep) break;
    wanted = wanted / kStep * kStep;
  }
  if (o.admission == kBloom) table->counters = static_cast<uint8_t*>(calloc(o.counters, 1));
  if (!table->rows || (o.admission == kBloom && !table->counters)) {
    dlrover_table_free(table);
    return nullptr;
  }
  return table;
}

// Rows of keys, in float32. Missing ones are inserted if `insert` is set, else zeros. `count` is whether the lookup
// counts as a use at the time `now`; `missing`, unless it is null, gets 1 for each key that has no row afterwards.
// Returns 0, or ENOMEM if some keys found no room; their rows are zeros.
DLROVER_EXPORT int dlrover_table_look(Table* table, size_t count, const uint64_t* keys, float* out, uint32_t now,
                                      uint32_t insert, uint32_t uses, uint8_t* missing) {
  const Lookup ask{table, keys, out, now, insert != 0, uses != 0, missing};
  const bool whole = table->options.kind == kFloat32;
#if defined(__x86_64__)
  if (wide()) return whole ? look_whole_avx2(ask, count) : look_half_avx2(ask, count);
#endif
  return whole ? look_whole(ask, count) : look_half(ask, count);
}

// One update of each key's row; keys without a row are left out, and `missing`, unless it is null, gets 1 for them.
DLROVER_EXPORT void dlrover_table_update(Table* table, size_t count, const uint64_t* keys, const float* gradients,
                                         uint8_t* missing) {
  rule_of(table->options.rule)({table, keys, gradients, missing}, count);
}

// Make room for so many more rows of each of some shards; `failed` gets 1 for those that there is no memory for.
DLROVER_EXPORT void dlrover_table_prepare(Table* table, size_t count, const uint64_t* slots, const uint64_t* numbers,
                                          uint8_t* failed) {
  for (size_t i = 0; i < count; ++i) {
    Shard* shard = &table->shards[slots[i]];
    const auto more = static_cast<uint32_t>(numbers[i]);
    hold(&shard->version);
    failed[i] = more && !(reserve_rows(table, shard, more) && reserve_index(table, shard, more));
    release(&shard->version);
  }
}

// Give memory that a shard does not need to all shards.
DLROVER_EXPORT void dlrover_table_pack(Table* table, size_t slot) {
  Shard* shard = &table->shards[slot];
  hold(&shard->version);
  pack(table, shard);
  release(&shard->version);
}

// Copy the coldest rows of some shards, at most so many of each, and remove them. Uses count half after each `half`
// of time without one. Returns the number of rows; SIZE_MAX without memory, then nothing has changed.
DLROVER_EXPORT size_t dlrover_table_take(Table* table, size_t count, const uint64_t* slots, const uint64_t* numbers,
                                         uint32_t half, uint64_t* keys, uint32_t* last, uint16_t* counts,
                                         uint16_t* flags, char* rows) {
  struct Scored {
    uint64_t score, key;
    bool operator<(const Scored& other) const { return score != other.score ? score < other.score : key < other.key; }
  };
  size_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    Shard* shard = &table->shards[slots[i]];
    hold(&shard->version);
    most = std::max<size_t>(most, shard->used);
    release(&shard->version);
  }
  auto* scored = static_cast<Scored*>(malloc((most + 1) * sizeof(Scored)));
  if (!scored) return SIZE_MAX;
  size_t made = 0;
  for (size_t i = 0; i < count; ++i) {
    Shard* shard = &table->shards[slots[i]];
    hold(&shard->version);
    const uint64_t index = shard->index.load(std::memory_order_relaxed);
    size_t found = 0;
    for (uint64_t at = 0; index && at <= mask_of(index) && found < most; ++at) {
      const uint64_t place = places_of(index)[at].load(std::memory_order_relaxed);
      if (!place) continue;
      const Header* header = table->row(static_cast<uint32_t>(place));
      const auto bits = static_cast<uint64_t>(header->count ? 32 - __builtin_clz(header->count) : 0);
      scored[found++] = {bits * half + header->last, header->key};
    }
    const size_t number = std::min<size_t>(found, numbers[i]);
    if (number < found) std::nth_element(scored, scored + number, scored + found);
    for (size_t j = 0; j < number; ++j, ++made) {
      const Found one = find(*table, *shard, scored[j].key, mixed(scored[j].key));
      keys[made] = scored[j].key, last[made] = one.header->last;
      counts[made] = one.header->count, flags[made] = one.header->flags;
      memcpy(rows + made * table->width, one.header + 1, table->width);
      erase(table, shard, one, false);
    }
    release(&shard->version);
  }
  free(scored);
  return made;
}

// Rows as they are: each header field in an array, values and states as bytes. Existing rows are overwritten. Returns
// the number of rows that found room, from the first.
DLROVER_EXPORT size_t dlrover_table_restore(Table* table, size_t count, const uint64_t* keys, const uint32_t* last,
                                            const uint16_t* counts, const uint16_t* flags, const char* rows) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = mixed(keys[i]);
    Shard* shard = &table->shards[shard_of(hash)];
    hold(&shard->version);
    Header* header = find(*table, *shard, keys[i], hash).header;
    if (!header) header = insert(table, shard, keys[i], hash);
    if (header) {
      *header = {keys[i], last[i], counts[i], flags[i]};
      memcpy(header + 1, rows + i * table->width, table->width);
    }
    release(&shard->version);
    if (!header) return i;
  }
  return count;
}

// Remove keys; `remember` adds them to what the next export of changes calls removed. Returns the number removed.
DLROVER_EXPORT size_t dlrover_table_remove(Table* table, size_t count, const uint64_t* keys, uint32_t remember) {
  size_t removed = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = mixed(keys[i]);
    Shard* shard = &table->shards[shard_of(hash)];
    hold(&shard->version);
    const Found found = find(*table, *shard, keys[i], hash);
    if (found.header) erase(table, shard, found, remember != 0), ++removed;
    release(&shard->version);
  }
  return removed;
}

// Remember keys as removed, for the next export of changes.
DLROVER_EXPORT void dlrover_table_note_removed(Table* table, size_t count, const uint64_t* keys) {
  for (size_t i = 0; i < count; ++i) {
    Shard* shard = &table->shards[shard_of(mixed(keys[i]))];
    hold(&shard->version);
    if (grow(&shard->removed, shard->removed_count, &shard->removed_room))
      shard->removed[shard->removed_count++] = keys[i];
    release(&shard->version);
  }
}

// Remove all rows of a shard, and what it remembers.
DLROVER_EXPORT void dlrover_table_clear(Table* table, size_t slot) {
  Shard* shard = &table->shards[slot];
  hold(&shard->version);
  const uint64_t index = shard->index.load(std::memory_order_relaxed);
  for (uint64_t at = 0; index && at <= mask_of(index); ++at) {
    const uint64_t place = places_of(index)[at].exchange(0, std::memory_order_relaxed);
    if (!place) continue;
    free_row(table, shard, static_cast<uint32_t>(place));
  }
  shard->used = shard->removed_count = shard->waiting_used = 0;
  pack(table, shard);
  if (shard->waiting) memset(shard->waiting, 0, shard->waiting_room * sizeof(Waiting));
  release(&shard->version);
}

// Which rows `dlrover_table_evict` removes: all that any of the conditions holds for.
struct Eviction {
  uint32_t before;   // last use before this time; 0: none
  float norm;        // Euclidean norm below this; 0: none
  uint32_t blocked;  // rows that penalties have set to zero
};

DLROVER_EXPORT size_t dlrover_table_evict(Table* table, size_t slot, const Eviction* eviction) {
  Shard* shard = &table->shards[slot];
  size_t removed = 0;
  float values[4096];
  hold(&shard->version);
  const uint64_t index = shard->index.load(std::memory_order_relaxed);
  for (uint64_t at = 0; index && at <= mask_of(index);) {
    const uint64_t place = places_of(index)[at].load(std::memory_order_relaxed);
    Header* header = place ? table->row(static_cast<uint32_t>(place)) : nullptr;
    bool out = header && header->last < eviction->before;
    out = out || (header && eviction->blocked && (header->flags & kBlocked));
    if (header && !out && eviction->norm > 0) {
      float norm = 0;
      load_values(*table, reinterpret_cast<const char*>(header + 1), values);
      for (size_t i = 0; i < table->options.dim; ++i) norm = norm + values[i] * values[i];
      out = std::sqrt(norm) < eviction->norm;
    }
    if (out) {
      erase(table, shard, {header, at}, true);  // another row may lie at this place now
      ++removed;
    } else {
      ++at;
    }
  }
  release(&shard->version);
  return removed;
}

// Copy rows of some shards: all, or with `changed` those changed since the last call with it. Rows do not count as
// changed afterwards unless `keep` is set. `sizes` holds the rows and the removed keys that there is room for, and gets
// the numbers copied, then those of the shard that found no room. Returns the number of shards copied, from the first.
DLROVER_EXPORT size_t dlrover_table_export(Table* table, size_t count, const uint64_t* slots, uint32_t changed,
                                           uint32_t keep, size_t* sizes, uint64_t* keys, uint32_t* last,
                                           uint16_t* counts, uint16_t* flags, char* rows, uint64_t* removed) {
  size_t made = 0, gone = 0, done = 0;
  for (bool room = true; room && done < count; done += room) {
    Shard* shard = &table->shards[slots[done]];
    hold(&shard->version);
    size_t found = 0;
    const uint64_t index = shard->index.load(std::memory_order_relaxed);
    const uint64_t places = index ? mask_of(index) + 1 : 0;
    for (uint64_t at = 0; changed && at < places; ++at) {
      const uint64_t place = places_of(index)[at].load(std::memory_order_relaxed);
      found += place && (table->row(static_cast<uint32_t>(place))->flags & kChanged);
    }
    if (!changed) found = shard->used;
    room = made + found <= sizes[0] && gone + shard->removed_count <= sizes[1];
    if (!room) sizes[2] = found, sizes[3] = shard->removed_count;
    for (uint64_t at = 0; room && found && at < places; ++at) {
      const uint64_t place = places_of(index)[at].load(std::memory_order_relaxed);
      if (!place) continue;
      Header* header = table->row(static_cast<uint32_t>(place));
      if (changed && !(header->flags & kChanged)) continue;
      keys[made] = header->key, last[made] = header->last, counts[made] = header->count, flags[made] = header->flags;
      memcpy(rows + made * table->width, header + 1, table->width);
      if (!keep) header->flags &= static_cast<uint16_t>(~kChanged);
      ++made;
    }
    if (room && shard->removed_count) {
      memcpy(removed + gone, shard->removed, 8 * shard->removed_count);
      gone += shard->removed_count;
    }
    if (room && !keep) shard->removed_count = 0;
    release(&shard->version);
  }
  sizes[0] = made, sizes[1] = gone;
  return done;
}

// The number of rows of each shard.
DLROVER_EXPORT void dlrover_table_used(Table* table, uint64_t* out) {
  for (size_t slot = 0; slot < kShards; ++slot) {
    Shard* shard = &table->shards[slot];
    hold(&shard->version);
    out[slot] = shard->used;
    release(&shard->version);
  }
}

// Bytes in use.
DLROVER_EXPORT uint64_t dlrover_table_memory(Table* table) { return table->memory.load() + sizeof(Table); }

// Hold all shards, so that a process can be forked: none is changed in the child for ever.
DLROVER_EXPORT void dlrover_table_acquire(Table* table) {
  for (Shard& shard : table->shards) hold(&shard.version);
  hold(&table->lock);  // which a thread takes after its shard's
}

DLROVER_EXPORT void dlrover_table_release(Table* table) {
  release(&table->lock);
  for (Shard& shard : table->shards) release(&shard.version);
}

// Sum the gradients of equal keys, in the order in which they come; keys stay in the order of their first place.
// Returns the number of distinct keys. If it is `count`, nothing was written; if it is SIZE_MAX, there is no memory.
DLROVER_EXPORT size_t dlrover_table_sum(size_t count, size_t dim, const uint64_t* keys, const float* gradients,
                                        uint64_t* distinct, float* sums) {
  size_t room = 16;
  while (room < 2 * count) room *= 2;
  auto* firsts = static_cast<uint32_t*>(calloc(room, sizeof(uint32_t)));  // place + 1 of each key's first
  auto* targets = static_cast<uint32_t*>(malloc(count * sizeof(uint32_t) + 1));
  size_t number = 0;
  if (!firsts || !targets) number = SIZE_MAX;
  for (size_t i = 0; i < count && number != SIZE_MAX; ++i) {
    size_t at = mixed(keys[i]) & (room - 1);
    while (firsts[at] && keys[firsts[at] - 1] != keys[i]) at = (at + 1) & (room - 1);
    if (!firsts[at]) {
      firsts[at] = static_cast<uint32_t>(i + 1);
      targets[i] = static_cast<uint32_t>(number++);
    } else {
      targets[i] = targets[firsts[at] - 1];
    }
  }
  if (number < count) {
    size_t made = 0;
    for (size_t i = 0; i < count; ++i) {
      float* sum = sums + targets[i] * dim;
      const float* gradient = gradients + i * dim;
      if (targets[i] == made) {
        distinct[made++] = keys[i];
        memcpy(sum, gradient, 4 * dim);
      } else {
        for (size_t j = 0; j < dim; ++j) sum[j] = sum[j] + gradient[j];
      }
    }
  }
  free(firsts);
  free(targets);
  return number;
}

}  // namespace dlrover
