// The C ABI of dlrover._native: rows on disk. An index in memory says where the row of a key lies, and holds the rest
// of its header; a reader fetches many records at once, by io_uring where the kernel allows it, else by threads.
//
// The index has a fixed number of places. A key's place is its hash scaled to that number, so that keys of one hash
// slot lie together, in the order of the slots. Whoever uses it excludes others.
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

struct Cold {
  size_t capacity = 0;
  Header* headers = nullptr;
  uint32_t* places = nullptr;  // of records, plus 1; 0: no key here
  uint64_t used[kShards] = {};

  size_t home(uint64_t key) const { return scaled(mixed(key)); }
  size_t scaled(uint64_t hash) const {
    return static_cast<size_t>(static_cast<unsigned __int128>(hash) * capacity >> 64);
  }
  size_t next(size_t at) const { return at + 1 == capacity ? 0 : at + 1; }
  size_t bytes() const { return capacity * (sizeof(Header) + sizeof(uint32_t)); }

  size_t find(uint64_t key) const {  // where the key is, or would be
    size_t at = home(key);
    while (places[at] && headers[at].key != key) at = next(at);
    return at;
  }

  void fetch(const uint64_t* keys, size_t i, size_t count) const {
    if (i >= count) return;
    const size_t at = home(keys[i]);
    __builtin_prefetch(&places[at]);
    __builtin_prefetch(&headers[at]);
  }

  void erase(size_t hole) {  // close the gap: move back whatever may lie there
    places[hole] = 0;
    --used[mixed(headers[hole].key) >> 54];
    for (size_t at = next(hole); places[at]; at = next(at)) {
      const size_t from_home = (at + capacity - home(headers[at].key)) % capacity;
      if (from_home < (at + capacity - hole) % capacity) continue;
      headers[hole] = headers[at], places[hole] = places[at];
      places[at] = 0;
      hole = at;
    }
  }

  template <class Work>
  void each(size_t slot, const Work& work) const {  // all keys of a slot: from its first place to an empty one after it
    const size_t first = scaled(static_cast<uint64_t>(slot) << 54);
    const size_t last = slot + 1 == kShards ? capacity : scaled(static_cast<uint64_t>(slot + 1) << 54);
    for (size_t i = first; i < first + capacity; ++i) {
      const size_t at = i < capacity ? i : i - capacity;
      if (i >= last && !places[at]) break;
      if (places[at] && mixed(headers[at].key) >> 54 == slot) work(at);
    }
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
  if (cold->headers) munmap(cold->headers, cold->bytes());
  free(cold);
}

// A new index with so many places; null without memory. Pages of it become memory when they are written.
DLROVER_EXPORT Cold* dlrover_cold_new(size_t capacity) {
  void* own = malloc(sizeof(Cold));
  if (!own) return nullptr;
  auto* cold = new (own) Cold();
  cold->capacity = capacity;
  void* memory =
      mmap(nullptr, cold->bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    free(own);
    return nullptr;
  }
  cold->headers = static_cast<Header*>(memory);
  cold->places = reinterpret_cast<uint32_t*>(cold->headers + capacity);
  return cold;
}

// Headers of rows and where they lie; what is known of these keys is replaced. At least one place must stay empty.
DLROVER_EXPORT void dlrover_cold_put(Cold* cold, size_t count, const uint64_t* keys, const uint32_t* last,
                                     const uint16_t* counts, const uint16_t* flags, const uint32_t* places) {
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    const size_t at = cold->find(keys[i]);
    cold->used[mixed(keys[i]) >> 54] += !cold->places[at];
    cold->headers[at] = {keys[i], last[i], counts[i], flags[i]};
    cold->places[at] = places[i] + 1;
  }
}

// Where the rows of keys lie, UINT32_MAX for those that are not here; with `headers` set, their headers as well.
DLROVER_EXPORT void dlrover_cold_find(Cold* cold, size_t count, const uint64_t* keys, uint32_t* places,
                                      uint32_t headers, uint32_t* last, uint16_t* counts, uint16_t* flags) {
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    const size_t at = cold->find(keys[i]);
    places[i] = cold->places[at] ? cold->places[at] - 1 : kNowhere;
    if (!headers || !cold->places[at]) continue;
    const Header& header = cold->headers[at];
    last[i] = header.last, counts[i] = header.count, flags[i] = header.flags;
  }
}

DLROVER_EXPORT void dlrover_cold_remove(Cold* cold, size_t count, const uint64_t* keys) {
  for (size_t i = 0; i < count; ++i) {
    cold->fetch(keys, i + kAhead, count);
    const size_t at = cold->find(keys[i]);
    if (cold->places[at]) cold->erase(at);
  }
}

// Say that rows lie elsewhere now.
DLROVER_EXPORT void dlrover_cold_move(Cold* cold, size_t count, const uint64_t* keys, const uint32_t* places) {
  for (size_t i = 0; i < count; ++i) {
    const size_t at = cold->find(keys[i]);
    if (cold->places[at]) cold->places[at] = places[i] + 1;
  }
}

// Keys of a slot with any of these flags, or all with 0. Returns their number; what there is no room for is left out.
DLROVER_EXPORT size_t dlrover_cold_list(Cold* cold, size_t slot, uint32_t flagged, size_t room, uint64_t* keys,
                                        uint32_t* last, uint16_t* counts, uint16_t* flags, uint32_t* places) {
  size_t found = 0;
  cold->each(slot, [&](size_t at) {
    const Header& header = cold->headers[at];
    if (flagged && !(header.flags & flagged)) return;
    if (found < room) {
      keys[found] = header.key, last[found] = header.last, counts[found] = header.count;
      flags[found] = header.flags, places[found] = cold->places[at] - 1;
    }
    ++found;
  });
  return found;
}

// Remove some flags of all keys of a slot.
DLROVER_EXPORT void dlrover_cold_unflag(Cold* cold, size_t slot, uint32_t flags) {
  cold->each(slot, [&](size_t at) { cold->headers[at].flags &= static_cast<uint16_t>(~flags); });
}

// The number of keys of each slot.
DLROVER_EXPORT void dlrover_cold_used(Cold* cold, uint64_t* out) {
  memcpy(out, cold->used, sizeof cold->used);
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
