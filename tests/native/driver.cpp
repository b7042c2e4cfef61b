// Calls the library's functions under sanitizers; scripts/test-native builds and runs it. Each piece is memory of its
// own that ends where the piece ends, so that the sanitizer sees an access beside it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

extern "C" {
uint32_t dlrover_abi();
const char* dlrover_build();
const char* dlrover_variant();
int dlrover_use_variant(const char* name);
void dlrover_copy(size_t count, const uint64_t* from, const uint64_t* to, const uint64_t* sizes, size_t threads);
void dlrover_hash(size_t count, const uint64_t* from, const uint64_t* sizes, uint64_t* hashes, size_t threads);
void dlrover_copy_hash(size_t count, const uint64_t* from, const uint64_t* to, const uint64_t* sizes, uint64_t* hashes,
                       size_t threads);
void dlrover_adamw(size_t count, const uint64_t* parameters, const uint64_t* gradients, const uint64_t* means,
                   const uint64_t* squares, const uint64_t* sizes, const float* scalars, uint64_t seed, uint32_t half,
                   size_t threads);
void dlrover_agd(size_t count, const uint64_t* parameters, const uint64_t* gradients, const uint64_t* means,
                 const uint64_t* squares, const uint64_t* sizes, const float* scalars, uint64_t seed, uint32_t half,
                 size_t threads);
void dlrover_adagrad(size_t count, const uint64_t* parameters, const uint64_t* gradients, const uint64_t* squares,
                     const uint64_t* sizes, const float* scalars, uint64_t seed, uint32_t half, size_t threads);

struct Options {  // as in native/table.cpp
  uint64_t dim, kind, rule, states, steps, memory_bytes, row_bytes, seed, initial, admission, threshold, counters;
  float scale, chance, hyper[8];
};
struct Table;
Table* dlrover_table_new(const Options* options);
void dlrover_table_free(Table* table);
int dlrover_table_look(Table* table, size_t count, const uint64_t* keys, float* out, uint32_t now, uint32_t insert,
                       uint32_t uses, uint8_t* missing);
void dlrover_table_prepare(Table* table, size_t count, const uint64_t* slots, const uint64_t* numbers, uint8_t* failed);
void dlrover_table_pack(Table* table, size_t slot);
size_t dlrover_table_take(Table* table, size_t count, const uint64_t* slots, const uint64_t* numbers, uint32_t half,
                          uint64_t* keys, uint32_t* last, uint16_t* counts, uint16_t* flags, char* rows);
void dlrover_table_update(Table* table, size_t count, const uint64_t* keys, const float* gradients, uint8_t* missing);
size_t dlrover_table_remove(Table* table, size_t count, const uint64_t* keys, uint32_t remember);
void dlrover_table_clear(Table* table, size_t slot);
size_t dlrover_table_export(Table* table, size_t count, const uint64_t* slots, uint32_t changed, uint32_t keep,
                            size_t* sizes, uint64_t* keys, uint32_t* last, uint16_t* counts, uint16_t* flags,
                            char* rows, uint64_t* removed);
void dlrover_table_used(Table* table, uint64_t* out);
uint64_t dlrover_table_memory(Table* table);
struct Cold;
Cold* dlrover_cold_new();
void dlrover_cold_free(Cold* cold);
int dlrover_cold_put(Cold* cold, size_t count, const uint64_t* keys, const uint32_t* last, const uint16_t* flags,
                     const uint32_t* places);
void dlrover_cold_find(Cold* cold, size_t count, const uint64_t* keys, uint32_t* places, uint32_t headers,
                       uint32_t* last, uint16_t* flags);
void dlrover_cold_remove(Cold* cold, size_t count, const uint64_t* keys);
void dlrover_cold_move(Cold* cold, size_t count, const uint64_t* keys, const uint32_t* places);
size_t dlrover_cold_list(Cold* cold, size_t slot, uint32_t flagged, size_t room, uint64_t* keys, uint32_t* last,
                         uint16_t* flags, uint32_t* places);
void dlrover_cold_unflag(Cold* cold, size_t slot, uint32_t flags);
void dlrover_cold_used(Cold* cold, uint64_t* out);
struct Reader;
Reader* dlrover_reader_new(uint32_t ring);
void dlrover_reader_free(Reader* reader);
uint32_t dlrover_reader_has_ring(Reader* reader);
int dlrover_reader_read(Reader* reader, size_t count, const int32_t* files, const uint64_t* offsets, uint64_t size,
                        char* out);
}

namespace {

using Words = std::vector<uint64_t>;

constexpr uint64_t kHashOfNothing = 0x2D06800538D394C2;
constexpr uint64_t kHashOfHashes = 5058736888828673759;  // of the first small pieces, by the xxhash package
uint64_t state = 1;

// A pseudo-random number, the same in every run.
uint64_t chance() {
  state = state * 6364136223846793005 + 1442695040888963407;
  return state ^ state >> 29;
}

void require(bool condition, const char* what, uint64_t where) {
  if (condition) return;
  std::fprintf(stderr, "%s: %s (%llu)\n", dlrover_variant(), what, static_cast<unsigned long long>(where));
  std::exit(1);
}

// Random bytes that begin `offset` bytes after a multiple of 64 and end with their memory. Nothing has no address.
class Piece {
 public:
  Piece(size_t size, size_t offset) : size_(size), offset_(offset) {
    void* memory = nullptr;
    if (size == 0) return;
    require(posix_memalign(&memory, 64, offset + size) == 0, "no memory", size);
    memory_.reset(static_cast<uint8_t*>(memory));
    for (size_t i = 0; i < size; i += 8) {
      const uint64_t word = chance();
      std::memcpy(begin() + i, &word, size - i < 8 ? size - i : 8);
    }
  }

  uint8_t* begin() const { return memory_ == nullptr ? nullptr : memory_.get() + offset_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(begin()); }
  std::vector<uint8_t> bytes() const { return {begin(), begin() + size_}; }

 private:
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_, offset_;
};

// All functions on pieces of these sizes; the hashes are returned.
Words check(const Words& sizes, size_t threads, bool aligned) {
  std::vector<Piece> sources, destinations;
  Words from, to, hashes(sizes.size()), copied(sizes.size());
  for (const uint64_t size : sizes) {
    sources.emplace_back(size, chance() % 64);
    destinations.emplace_back(size, aligned ? 0 : chance() % 64);
    from.push_back(sources.back().address());
    to.push_back(destinations.back().address());
  }
  const size_t count = sizes.size();
  dlrover_hash(count, from.data(), sizes.data(), hashes.data(), threads);
  dlrover_copy_hash(count, from.data(), to.data(), sizes.data(), copied.data(), threads);
  for (size_t i = 0; i < count; ++i) {
    require(hashes[i] == copied[i], "the hash of a copy differs", sizes[i]);
    require(sources[i].bytes() == destinations[i].bytes(), "copy_hash", sizes[i]);
    if (sizes[i] > 0) destinations[i].begin()[chance() % sizes[i]] ^= 1;
  }
  dlrover_copy(count, from.data(), to.data(), sizes.data(), threads);
  for (size_t i = 0; i < count; ++i) {
    require(sources[i].bytes() == destinations[i].bytes(), "copy", sizes[i]);
  }
  return hashes;
}

[[maybe_unused]] void check_overlap(uint64_t size, uint64_t distance) {
  for (const bool forward : {false, true}) {
    for (const bool hash : {false, true}) {
      const Piece both(size + distance, 3);
      const uint64_t low = both.address(), high = low + distance;
      const uint64_t from = forward ? low : high, to = forward ? high : low;
      const auto before = both.bytes();
      const uint8_t* moved = before.data() + (from - low);
      uint64_t made = 0, wanted = 0;
      const uint64_t other = reinterpret_cast<uint64_t>(moved);
      dlrover_hash(1, &other, &size, &wanted, 1);
      if (hash) dlrover_copy_hash(1, &from, &to, &size, &made, 2);
      if (!hash) dlrover_copy(1, &from, &to, &size, 2);
      require(std::memcmp(both.begin() + (to - low), moved, size) == 0, "overlap", size);
      require(!hash || made == wanted, "the hash of an overlap", size);
    }
  }
}

// All updates of tensors with these numbers of elements; their values are tested in Python.
void check_updates(const Words& sizes, size_t threads) {
  const float scalars[] = {0.99f, 0.1f, 0.999f, 0.001f, 1.f, 0.f, 1e-8f, 5.f, 1e-3f};
  for (const uint32_t half : {0, 1}) {
    std::vector<Piece> pieces;
    Words lists[4];
    for (const uint64_t size : sizes) {
      for (int list = 0; list < 4; ++list) {
        pieces.emplace_back(size * (list < 2 && half ? 2 : 4), 4 * (chance() % 16));
        lists[list].push_back(pieces.back().address());
      }
    }
    const size_t count = sizes.size();
    dlrover_adamw(count, lists[0].data(), lists[1].data(), lists[2].data(), lists[3].data(), sizes.data(), scalars, 1,
                  half, threads);
    dlrover_agd(count, lists[0].data(), lists[1].data(), lists[2].data(), lists[3].data(), sizes.data(), scalars, 2,
                half, threads);
    dlrover_adagrad(count, lists[0].data(), lists[1].data(), lists[3].data(), sizes.data(), scalars, 3, half, threads);
  }
}

}  // namespace

// Look up, update, remove and copy from several threads; each thread has keys of its own and some of all.
void check_table(uint64_t rule, uint64_t states, uint64_t kind, uint64_t admission, size_t dim) {
  const Options options{dim, kind, rule, states, 1, 0, 0, 7, 1, admission, 2, 1 << 14, 0.1f, 0.5f,
                        {0.1f, 0.9f, 0.99f, 1e-6f, 0, 0.01f, 0.01f, 0.01f}};
  Table* table = dlrover_table_new(&options);
  require(table != nullptr, "no memory for a table", dim);
  const auto work = [=](uint64_t thread) {
    std::vector<float> rows(300 * dim), gradients(300 * dim, 0.5f);
    Words keys(300), copied(2000), removed(2000);
    std::vector<uint32_t> last(2000);
    std::vector<uint16_t> counts(2000), flags(2000);
    std::vector<uint64_t> used(1024);
    std::vector<uint8_t> missing(300), failed(1024);
    Words slots(1024), numbers(1024);
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = i, numbers[i] = i % 3;
    std::vector<char> bytes(2000 * (4 * dim * (1 + states) + 4));
    for (uint64_t turn = 0; turn < 30; ++turn) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 2 ? thread << 32 | (turn * 97 + i) : i;
      for (uint32_t insert : {1, 1, 0}) {
        dlrover_table_look(table, keys.size(), keys.data(), rows.data(), static_cast<uint32_t>(turn), insert, 1,
                           missing.data());
      }
      dlrover_table_update(table, keys.size(), keys.data(), gradients.data(), missing.data());
      if (turn % 3 == 0) dlrover_table_remove(table, 50, keys.data(), 1);
      if (turn % 10 == 9) dlrover_table_clear(table, turn);
      if (turn % 5 == 4) {
        dlrover_table_prepare(table, slots.size(), slots.data(), numbers.data(), failed.data());
        const size_t taken = dlrover_table_take(table, slots.size(), slots.data(), numbers.data(), 600, copied.data(),
                                                last.data(), counts.data(), flags.data(), bytes.data());
        require(taken <= 1023, "more rows than were asked for", taken);
        for (size_t slot = 0; slot < 1024; slot += 3) dlrover_table_pack(table, slot);
      }
      dlrover_table_used(table, used.data());
      require(dlrover_table_memory(table) > 0, "no memory in use", dim);
      for (uint64_t slot = 0; slot + 5 < 1024; slot += 5) {
        const uint64_t slots[5] = {slot, slot + 1, slot + 2, slot + 3, slot + 4};
        size_t sizes[4] = {copied.size() / 2, removed.size() / 2, 0, 0};
        const size_t done = dlrover_table_export(table, 5, slots, turn % 2, 0, sizes, copied.data(), last.data(),
                                                 counts.data(), flags.data(), bytes.data(), removed.data());
        require(done <= 5 && sizes[0] <= copied.size() / 2, "more was copied than there is room for", dim);
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t thread = 1; thread < 4; ++thread) threads.emplace_back(work, thread);
  for (auto& thread : threads) thread.join();
  dlrover_table_free(table);
}

// An index of rows on disk beside a plain list, and records that are read by io_uring and by threads.
void check_cold() {
  constexpr size_t kKeys = 3000;
  Cold* cold = dlrover_cold_new();
  require(cold != nullptr, "no memory for an index", 0);
  std::vector<uint64_t> known(kKeys), keys, used(1024);
  std::vector<uint32_t> places(kKeys, UINT32_MAX), last, found;
  std::vector<uint16_t> flags;
  for (size_t i = 0; i < kKeys; ++i) known[i] = i % 2 ? i : chance();
  for (uint32_t turn = 0; turn < 200; ++turn) {
    keys.clear();
    std::vector<size_t> chosen;
    for (size_t i = chance() % 50; i < kKeys; i += 1 + chance() % 90) chosen.push_back(i), keys.push_back(known[i]);
    const size_t count = keys.size();
    last.assign(count, turn), flags.assign(count, turn % 2), found.assign(count, turn);
    if (turn % 4 < 2)
      require(dlrover_cold_put(cold, count, keys.data(), last.data(), flags.data(), found.data()) == 0, "put", turn);
    if (turn % 4 == 2) dlrover_cold_remove(cold, count, keys.data());
    if (turn % 4 == 3) dlrover_cold_move(cold, count, keys.data(), found.data());
    for (size_t i : chosen) {
      const bool there = places[i] != UINT32_MAX;
      if (turn % 4 < 2 || (turn % 4 == 3 && there)) places[i] = turn;
      if (turn % 4 == 2) places[i] = UINT32_MAX;
    }
    found.resize(kKeys), last.resize(kKeys), flags.resize(kKeys);
    dlrover_cold_find(cold, kKeys, known.data(), found.data(), 1, last.data(), flags.data());
    for (size_t i = 0; i < kKeys; ++i) require(found[i] == places[i], "the place of a key", i);
  }
  dlrover_cold_used(cold, used.data());
  keys.resize(kKeys);
  for (size_t slot = 0; slot < 1024; ++slot) {
    const size_t there = dlrover_cold_list(cold, slot, 0, kKeys, keys.data(), last.data(), flags.data(), found.data());
    require(there == used[slot], "the keys of a slot", slot);
    dlrover_cold_unflag(cold, slot, 1);
    require(dlrover_cold_list(cold, slot, 1, 0, nullptr, nullptr, nullptr, nullptr) == 0, "flags", slot);
  }
  dlrover_cold_free(cold);

  std::FILE* file = std::tmpfile();
  require(file != nullptr, "no file", 0);
  std::vector<uint8_t> written(1000 * 72);
  for (auto& byte : written) byte = static_cast<uint8_t>(chance());
  std::fwrite(written.data(), 1, written.size(), file);
  std::fflush(file);
  std::vector<int32_t> files(1500, fileno(file));
  Words offsets(1500);
  for (auto& offset : offsets) offset = chance() % 1000 * 72;
  for (const uint32_t ring : {1, 0}) {
    Reader* reader = dlrover_reader_new(ring);
    require(reader != nullptr && (ring || !dlrover_reader_has_ring(reader)), "no reader", ring);
    std::vector<char> out(offsets.size() * 72);
    const auto read = [&](size_t count) {
      return dlrover_reader_read(reader, count, files.data(), offsets.data(), 72, out.data());
    };
    require(read(offsets.size()) == 0 && read(0) == 0, "a read fails", ring);
    for (size_t i = 0; i < offsets.size(); ++i)
      require(std::memcmp(&out[i * 72], &written[offsets[i]], 72) == 0, "a record", i);
    const uint64_t before = offsets[700];
    offsets[700] = 999 * 72 + 1;
    require(read(offsets.size()) == 5, "a file that ends before a record", ring);
    offsets[700] = before;
    files[3] = -1;
    require(read(offsets.size()) == 9, "a file that is not open", ring);
    files[3] = files[4];
    require(read(offsets.size()) == 0, "a read after errors", ring);
    dlrover_reader_free(reader);
  }
  std::fclose(file);
}

int main() {
  Words small, large = {0, 65535, 65536, 65537, 700'001, 1, 4095, 4096, 4097, 3'000'000, 240, 241, 1'048'576, 64};
  for (uint64_t size = 0; size <= 1100; ++size) small.push_back(size);
  Words much(20, 1'000'003);  // enough to be written past the cache
  much.push_back(5'000'000);
  for (const char* name : {"plain", "avx2", "avx512"}) {
    if (!dlrover_use_variant(name)) {
      std::printf("%s: not on this machine\n", name);
      continue;
    }
    require(dlrover_abi() > 0 && std::strncmp(dlrover_build(), "dlrover-build:", 14) == 0, "identity", 0);
    dlrover_copy(0, nullptr, nullptr, nullptr, 4);
    state = 1;
    Words hashes = check(small, 3, false);
    const uint64_t address = reinterpret_cast<uint64_t>(hashes.data()), size = 8 * hashes.size();
    uint64_t all = 0;
    dlrover_hash(1, &address, &size, &all, 1);
    require(hashes[0] == kHashOfNothing && all == kHashOfHashes, "the hashes differ from those of the algorithm", all);
    check(large, 3, false);
    check(much, 2, true);
    check_updates({0, 1, 7, 64, 1000, 2'200'000, 33}, 3);
    check_table(4, 2, 0, 0, 64);
    check_table(11, 3, 1, 1, 7);
    check_table(10, 2, 2, 2, 5);
#if !defined(__SANITIZE_THREAD__)  // what follows has no new race to show
    for (const size_t threads : {1, 100}) {
      check(small, threads, false);
      check(large, threads, true);
    }
    check(much, 1, false);
    for (const uint64_t size : {1, 16, 100, 300, 5000, 2'200'000}) {
      for (const uint64_t distance : {0, 1, 63, 64, 4096}) check_overlap(size, distance);
    }
#endif
    std::printf("%s: passed\n", name);
  }
  check_cold();
  require(!dlrover_use_variant("another"), "a variant that does not exist", 0);
}
