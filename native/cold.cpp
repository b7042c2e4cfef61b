// The C ABI of dlrover._native: rows on disk. An index in memory says where the row of a key lies, when it was used
// and what its flags are; a reader fetches many records at once, by io_uring where the kernel allows it, else by threads.
//
// The index has a hash table for each slot, which grows and shrinks with the slot's keys: a server holds some slots
// only. Whoever uses it excludes others.
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#if defined(IORING_FEAT_FAST_POLL)  // headers of Linux 5.7 or later
#define DLROVER_RING 1
#else
#define DLROVER_RING 0
#endif

#include "keys.h"
#include "threads.h"

#define DLROVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace dlrover {
namespace {

constexpr uint32_t kNowhere = UINT32_MAX;
constexpr size_t kAhead = 16;        // keys whose places are fetched before their turn
constexpr unsigned kDepth = 256;     // reads that the kernel has at a time
constexpr size_t kReaders = 16;      // threads without io_uring
constexpr uint64_t kRead = kPart / 32;  // what a read costs, as if it were so many bytes of a copy

// Sizes of a slot's table; `cold_bytes` of dlrover._native.cold has the bytes that follow from them.
constexpr unsigned kLevels = 340;
struct Sizes {
  size_t at[kLevels] = {};
  constexpr Sizes() {
    for (unsigned i = 1; i < kLevels; ++i) at[i] = at[i - 1] + at[i - 1] / 16 + 4;
  }
};
constexpr Sizes kSizes;

constexpr unsigned kFlagsAt = 30;
constexpr uint32_t kRecord = (1u << kFlagsAt) - 1;

struct Entry {
  uint64_t key;
  uint32_t last;
  uint32_t where;  // number of the record plus 1, and the flags above it; 0: no key here

  uint32_t record() const { return (where & kRecord) - 1; }
  uint16_t flags() const { return static_cast<uint16_t>(where >> kFlagsAt); }
};

struct Slot {
  Entry* entries = nullptr;
  uint32_t level = 0, used = 0;

  size_t size() const { return kSizes.at[level]; }
  size_t home(uint64_t key) const {
    return static_cast<size_t>(static_cast<unsigned __int128>(mixed(key) << 10) * size() >> 64);
  }
  size_t next(size_t at) const { return at + 1 == size() ? 0 : at + 1; }

  size_t find(uint64_t key) const {  // where the key is, or would be, in a table that has places
    size_t at = home(key);
    while (entries[at].where && entries[at].key != key) at = next(at);
    return at;
  }

  Entry* entry(uint64_t key) const {
    Entry* found = used ? &entries[find(key)] : nullptr;
    return found && found->where ? found : nullptr;
  }

  bool resize(uint32_t wanted) {
    Entry* old = entries;
    const size_t count = size(), bytes = kSizes.at[wanted] * sizeof(Entry);
    auto* made = bytes ? static_cast<Entry*>(calloc(bytes, 1)) : nullptr;
    if (bytes && !made) return false;
    entries = made, level = wanted;
    for (size_t i = 0; i < count; ++i)
      if (old[i].where) entries[find(old[i].key)] = old[i];
    free(old);
    return true;
  }

  bool reserve(size_t keys) {
    uint32_t wanted = level;
    while (keys * 10 > kSizes.at[wanted] * 9) ++wanted;
    return wanted == level || resize(wanted);
  }

  void erase(size_t hole) {  // close the gap: move back whatever may lie there
    entries[hole].where = 0;
    --used;
    for (size_t at = next(hole); entries[at].where; at = next(at)) {
      const size_t from_home = (at + size() - home(entries[at].key)) % size();
      if (from_home < (at + size() - hole) % size()) continue;
      entries[hole] = entries[at];
      entries[at].where = 0;
      hole = at;
    }
    if (used * 100ull <= kSizes.at[level - 1] * 87) resize(level - 1);  // without memory it stays as it is
  }
};

struct Cold {
  Slot slots[kShards];

  Slot& of(uint64_t key) { return slots[mixed(key) >> 54]; }

  void fetch(const uint64_t* keys, size_t i, size_t count) {
    if (i >= count) return;
    const Slot& slot = of(keys[i]);
    if (slot.entries) __builtin_prefetch(&slot.entries[slot.home(keys[i])]);
  }
};

struct Reader {
  int ring = -1;
#if DLROVER_RING
  char* queues = nullptr;
  size_t queues_size = 0;
  io_uring_sqe* entries = nullptr;
  size_t entries_size = 0;
  io_uring_params params = {};

  std::atomic<unsigned>* word(uint32_t offset) const { return reinterpret_cast<std::atomic<unsigned>*>(queues + offset); }

  bool open() {
    ring = static_cast<int>(syscall(SYS_io_uring_setup, kDepth, &params));
    if (ring < 0) return false;
    queues_size = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t other = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (other > queues_size) queues_size = other;
    entries_size = params.sq_entries * sizeof(io_uring_sqe);
    if (!(params.features & IORING_FEAT_SINGLE_MMAP)) return false;
    const int flags = MAP_SHARED | MAP_POPULATE;
    void* memory = mmap(nullptr, queues_size, PROT_READ | PROT_WRITE, flags, ring, IORING_OFF_SQ_RING);
    if (memory == MAP_FAILED) return false;
    queues = static_cast<char*>(memory);
    memory = mmap(nullptr, entries_size, PROT_READ | PROT_WRITE, flags, ring, IORING_OFF_SQES);
    if (memory == MAP_FAILED) return false;
    entries = static_cast<io_uring_sqe*>(memory);
    return true;
  }

  void close() {
    if (entries) munmap(entries, entries_size);
    if (queues) munmap(queues, queues_size);
    if (ring >= 0) ::close(ring);
    entries = nullptr, queues = nullptr, ring = -1;
  }
#else
  bool open() { return false; }
  void close() {}
#endif
};

struct Reads {
  size_t count;
  const int32_t* files;
  const uint64_t* offsets;
  uint64_t size;
  char* out;
};

// Read one record from byte `done` on; 0 or an error.
int read_one(const Reads& ask, size_t i, uint64_t done) {
  while (done < ask.size) {
    const ssize_t got =
        pread(ask.files[i], ask.out + i * ask.size + done, ask.size - done, static_cast<off_t>(ask.offsets[i] + done));
    if (got > 0) done += static_cast<uint64_t>(got);
    if (got == 0) return EIO;  // the file ends before the record does
    if (got < 0 && errno != EINTR) return errno;
  }
  return 0;
}

int read_by_threads(const Reads& ask) {
  std::atomic<int> status{0};
  const uint64_t total = ask.count * kRead;
  auto* sizes = static_cast<uint64_t*>(malloc(ask.count * sizeof(uint64_t) + 1));
  if (!sizes) return ENOMEM;
  for (size_t i = 0; i < ask.count; ++i) sizes[i] = kRead - kPiece;
  handle(ask.count, sizes, false, kReaders, total, [&](const Run& run) {
    for (size_t i = run.first; i < run.last; ++i) {
      const int error = read_one(ask, i, 0);
      if (error) status.store(error);
    }
  });
  free(sizes);
  return status.load();
}

#if DLROVER_RING
// Returns 0, an error, or -1 if the kernel cannot do it this way: then the ring is to be closed.
int read_by_ring(const Reader& reader, const Reads& ask) {
  const auto& sq = reader.params.sq_off;
  const auto& cq = reader.params.cq_off;
  auto* array = reinterpret_cast<unsigned*>(reader.queues + sq.array);
  const auto* ends = reinterpret_cast<const io_uring_cqe*>(reader.queues + cq.cqes);
  const unsigned mask = reader.word(sq.ring_mask)->load(), end_mask = reader.word(cq.ring_mask)->load();
  size_t begun = 0, ended = 0, waiting = 0;  // waiting: entered in the queue, but not taken by the kernel yet
  int status = 0;
  while (ended + (status < 0 ? waiting : 0) < (status ? begun : ask.count)) {  // the kernel may still write to `out`
    unsigned tail = reader.word(sq.tail)->load(std::memory_order_relaxed);
    for (; status == 0 && begun < ask.count && begun - ended < kDepth; ++begun, ++waiting, ++tail) {
      io_uring_sqe* entry = &reader.entries[tail & mask];
      memset(entry, 0, sizeof *entry);
      entry->opcode = IORING_OP_READ;
      entry->fd = ask.files[begun];
      entry->addr = reinterpret_cast<uint64_t>(ask.out + begun * ask.size);
      entry->len = static_cast<uint32_t>(ask.size);
      entry->off = ask.offsets[begun];
      entry->user_data = begun;
      array[tail & mask] = tail & mask;
    }
    reader.word(sq.tail)->store(tail, std::memory_order_release);
    const auto took = syscall(SYS_io_uring_enter, reader.ring, waiting, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (took > 0) waiting -= static_cast<size_t>(took);
    if (took < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) status = -1;
    if (took < 0) sched_yield();
    unsigned head = reader.word(cq.head)->load(std::memory_order_relaxed);
    for (; head != reader.word(cq.tail)->load(std::memory_order_acquire); ++head, ++ended) {
      const io_uring_cqe& end = ends[head & end_mask];
      if (end.res == static_cast<int32_t>(ask.size)) continue;
      const bool other = end.res == -EINVAL || end.res == -EOPNOTSUPP || end.res == -EAGAIN || end.res == -EINTR;
      int error = end.res < 0 && !other ? -end.res : 0;  // what is short, or not possible so, is read another way
      if (!error) error = read_one(ask, end.user_data, end.res > 0 ? static_cast<uint64_t>(end.res) : 0);
      if (error && status == 0) status = error;
    }
    reader.word(cq.head)->store(head, std::memory_order_release);
  }
  return status;
}
#endif

}  // namespace

DLROVER_EXPORT void dlrover_cold_free(Cold* cold) {
  for (Slot& slot : cold->slots) free(slot.entries);
  free(cold);
}

// A new index; null without memory.
DLROVER_EXPORT Cold* dlrover_cold_new() {
  void* own = malloc(sizeof(Cold));
  return own ? new (own) Cold() : nullptr;
}

// Headers of rows and where they lie; what is known of these keys is replaced. Returns 0, or ENOMEM: then nothing has
// changed.
DLROVER_EXPORT int dlrover_cold_put(Cold* cold, size_t count, const uint64_t* keys, const uint32_t* last,
                                    const uint16_t* flags, const uint32_t* places) {
  size_t more[kShards] = {};
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    more[mixed(keys[i]) >> 54] += !cold->of(keys[i]).entry(keys[i]);
  }
  for (size_t slot = 0; slot < kShards; ++slot)
    if (more[slot] && !cold->slots[slot].reserve(cold->slots[slot].used + more[slot])) return ENOMEM;
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    Slot& slot = cold->of(keys[i]);
    Entry& entry = slot.entries[slot.find(keys[i])];
    slot.used += !entry.where;
    entry = {keys[i], last[i], (places[i] + 1) | static_cast<uint32_t>(flags[i]) << kFlagsAt};
  }
  return 0;
}

// Where the rows of keys lie, UINT32_MAX for those that are not here; with `headers` set, their headers as well.
DLROVER_EXPORT void dlrover_cold_find(Cold* cold, size_t count, const uint64_t* keys, uint32_t* places,
                                      uint32_t headers, uint32_t* last, uint16_t* flags) {
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    const Entry* entry = cold->of(keys[i]).entry(keys[i]);
    places[i] = entry ? entry->record() : kNowhere;
    if (headers && entry) last[i] = entry->last, flags[i] = entry->flags();
  }
}

DLROVER_EXPORT void dlrover_cold_remove(Cold* cold, size_t count, const uint64_t* keys) {
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    Slot& slot = cold->of(keys[i]);
    const Entry* entry = slot.entry(keys[i]);
    if (entry) slot.erase(static_cast<size_t>(entry - slot.entries));
  }
}

// Say that rows lie elsewhere now.
DLROVER_EXPORT void dlrover_cold_move(Cold* cold, size_t count, const uint64_t* keys, const uint32_t* places) {
  for (size_t i = 0; i < count; ++i) {
    Entry* entry = cold->of(keys[i]).entry(keys[i]);
    if (entry) entry->where = (entry->where & ~kRecord) | (places[i] + 1);
  }
}

// Keys of a slot with any of these flags, or all with 0. Returns their number; what there is no room for is left out.
DLROVER_EXPORT size_t dlrover_cold_list(Cold* cold, size_t slot, uint32_t flagged, size_t room, uint64_t* keys,
                                        uint32_t* last, uint16_t* flags, uint32_t* places) {
  const Slot& listed = cold->slots[slot];
  size_t found = 0;
  for (size_t at = 0; at < listed.size(); ++at) {
    const Entry& entry = listed.entries[at];
    if (!entry.where || (flagged && !(entry.flags() & flagged))) continue;
    if (found < room) {
      keys[found] = entry.key, last[found] = entry.last, flags[found] = entry.flags(), places[found] = entry.record();
    }
    ++found;
  }
  return found;
}

// Remove some flags of all keys of a slot.
DLROVER_EXPORT void dlrover_cold_unflag(Cold* cold, size_t slot, uint32_t flags) {
  const Slot& changed = cold->slots[slot];
  for (size_t at = 0; at < changed.size(); ++at) changed.entries[at].where &= ~(flags << kFlagsAt);
}

// The number of keys of each slot.
DLROVER_EXPORT void dlrover_cold_used(Cold* cold, uint64_t* out) {
  for (const Slot& slot : cold->slots) *out++ = slot.used;
}

// Bytes of the index.
DLROVER_EXPORT uint64_t dlrover_cold_bytes(Cold* cold) {
  uint64_t bytes = 0;
  for (const Slot& slot : cold->slots) bytes += slot.size() * sizeof(Entry);
  return bytes;
}

DLROVER_EXPORT void dlrover_reader_free(Reader* reader) {
  reader->close();
  free(reader);
}

// A reader, with io_uring if it is wanted and the kernel allows it; null without memory.
DLROVER_EXPORT Reader* dlrover_reader_new(uint32_t ring) {
  void* own = malloc(sizeof(Reader));
  if (!own) return nullptr;
  auto* reader = new (own) Reader();
  if (ring && !reader->open()) reader->close();
  return reader;
}

DLROVER_EXPORT uint32_t dlrover_reader_has_ring(Reader* reader) { return reader->ring >= 0; }

// Read records of one size, each from a place of a file. Returns 0 or an error: EIO if a file ends before.
DLROVER_EXPORT int dlrover_reader_read(Reader* reader, size_t count, const int32_t* files, const uint64_t* offsets,
                                       uint64_t size, char* out) {
  const Reads ask{count, files, offsets, size, out};
#if DLROVER_RING
  if (reader->ring >= 0) {
    const int status = read_by_ring(*reader, ask);
    if (status >= 0) return status;
    reader->close();
  }
#endif
  return read_by_threads(ask);
}

}  // namespace dlrover
