// Threads that share the work on a list of pieces.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace dlrover {

constexpr uint64_t kPart = 1 << 20;  // work that a thread takes at once, in bytes
constexpr uint64_t kPiece = 256;     // what beginning a piece costs, as if it were so many more bytes
constexpr size_t kMostThreads = 64;

// The pieces [first, last); if `part` is set, only the bytes [begin, end) of the one piece.
struct Run {
  size_t first, last;
  bool part;
  uint64_t begin, end;
};

// Deals the pieces of a list to threads, in runs of about kPart bytes.
class Queue {
 public:
  Queue(size_t count, const uint64_t* sizes, bool divide) : count_(count), sizes_(sizes), divide_(divide) {}

  bool take(Run* run) {
    pthread_mutex_lock(&mutex_);
    const bool more = next_ < count_;
    if (more) *run = next();
    pthread_mutex_unlock(&mutex_);
    return more;
  }

 private:
  Run next() {
    if (divide_ && sizes_[next_] > 2 * kPart) {
      const uint64_t begin = begun_, end = sizes_[next_] - begin > kPart ? begin + kPart : sizes_[next_];
      const size_t piece = next_;
      begun_ = end;
      if (end == sizes_[next_]) ++next_, begun_ = 0;
      return {piece, piece + 1, true, begin, end};
    }
    const size_t first = next_;
    uint64_t work = 0;
    do {
      work += sizes_[next_++] + kPiece;
    } while (next_ < count_ && work < kPart && (!divide_ || sizes_[next_] <= 2 * kPart));
    return {first, next_, false, 0, 0};
  }

  const size_t count_;
  const uint64_t* const sizes_;
  const bool divide_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  size_t next_ = 0;
  uint64_t begun_ = 0;  // bytes of the next piece that are dealt already
};

// Handle a whole list: call `work(run)` for each of its runs, in up to `threads` threads, of which this is one.
template <class Work>
void handle(size_t count, const uint64_t* sizes, bool divide, size_t threads, uint64_t total, const Work& work) {
  struct Job {
    Queue queue;
    const Work& work;

    static void* run(void* job) {
      auto* self = static_cast<Job*>(job);
      for (Run next; self->queue.take(&next);) self->work(next);
      return nullptr;
    }
  } job{Queue(count, sizes, divide), work};
  const uint64_t useful = (total + count * kPiece) / kPart;
  for (const uint64_t most : {useful, static_cast<uint64_t>(kMostThreads)}) {
    if (threads > most) threads = most;
  }
  pthread_t others[kMostThreads];
  size_t started = 0;
  if (threads > 1) {
    // The process's signals go to its own threads. A fault in one of these ends the process as elsewhere.
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    // Without another thread, this one does more.
    while (started + 1 < threads && pthread_create(&others[started], nullptr, &Job::run, &job) == 0) ++started;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  Job::run(&job);
  for (size_t i = 0; i < started; ++i) pthread_join(others[i], nullptr);
}

inline uint64_t sum(size_t count, const uint64_t* sizes) {
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) total += sizes[i];
  return total;
}

}  // namespace dlrover
