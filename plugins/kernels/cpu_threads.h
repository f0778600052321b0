// Work for several threads at once, on torch's own pool.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

namespace quire {
namespace {

constexpr int64_t WORTH_THREADS = 16384;  // floats touched below which waking threads costs more than it saves
constexpr int SPINS = 4096;               // looks at an unfinished stage before the core is offered to others

inline int64_t threads_for(int64_t floats) { return floats < WORTH_THREADS ? 1 : at::get_num_threads(); }

// Calls body(member) for members [0, members), on as many threads as torch gives.
template <class Body> void together(int64_t members, const Body& body) {
  if (members <= 1) return body(0);
  at::parallel_for(0, members, 1, [&](int64_t begin, int64_t end) {
    for (int64_t member = begin; member < end; ++member) body(member);
  });
}

// Runs work(i, next) for i in [0, count) on all threads, each taking another one when it begins with the one before (`next`,
// -1 if there is none): a thread that lost its core for a while does less, and what comes next can be fetched ahead.
template <class Work> void share(int64_t count, int64_t floats, const Work& work) {
  std::atomic<int64_t> next{0};
  together(std::min(threads_for(floats), count), [&](int64_t) {
    const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t i = take(), then; i < count; i = then) {
      then = take();
      work(i, then < count ? then : int64_t(-1));
    }
  });
}

// The pieces [0, count) of one stage of a longer work. Each member has a run of them to itself, so that it reads memory in
// order and can fetch the next piece ahead; with its run done, it takes from the ends of the others'. wait() is for the
// pieces, not for the members: whoever is late finds them done, and one thread alone does them all.
class Stage {
 public:
  void open(int64_t count, int64_t members) {
    if (int64_t(runs.size()) < members) runs = std::vector<Run>(members);
    num_runs = members;
    for (int64_t m = 0; m < members; ++m) runs[m].left = pack(count * m / members, count * (m + 1) / members);
    unfinished = count;
  }
  // work(piece, next): `next` is the piece that will follow it, or -1 if that cannot be told
  template <class Work> void run(int64_t member, const Work& work) {
    int64_t done = 0;
    for (int64_t turn = 0; turn < num_runs; ++turn) {
      std::atomic<uint64_t>& left = runs[(member + turn) % num_runs].left;
      for (uint64_t seen = left.load(std::memory_order_relaxed);;) {
        const int64_t begin = int64_t(seen & 0xffffffff), end = int64_t(seen >> 32);
        if (begin >= end) break;
        const uint64_t rest = turn ? pack(begin, end - 1) : pack(begin + 1, end);
        if (!left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) continue;
        turn ? work(end - 1, int64_t(-1)) : work(begin, begin + 1 < end ? begin + 1 : int64_t(-1));
        seen = rest, ++done;
      }
    }
    if (done) unfinished.fetch_sub(done, std::memory_order_release);
  }
  void wait() const {
    for (int i = 0; unfinished.load(std::memory_order_acquire) > 0; ++i) {
      if (i >= SPINS) std::this_thread::yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
  }

 private:
  struct alignas(64) Run {
    std::atomic<uint64_t> left{0};  // first piece, and one past the last in the upper half
  };
  static uint64_t pack(int64_t begin, int64_t end) { return uint64_t(begin) | uint64_t(end) << 32; }
  std::vector<Run> runs;
  int64_t num_runs = 0;
  alignas(64) std::atomic<int64_t> unfinished{0};
};

struct Step {
  int64_t pieces, floats;                                // floats touched in all pieces, about
  std::function<void(int64_t piece, int64_t next)> work;  // as in Stage::run
};

// Step after step, each with all threads, which are woken once.
inline void run_steps(const std::vector<Step>& steps) {
  static thread_local std::deque<Stage> kept;
  auto& stages = kept;  // of this thread, not of those that work on them
  if (stages.size() < steps.size()) stages.resize(steps.size());
  int64_t floats = 0;
  for (const Step& step : steps) floats += step.floats;
  const int64_t members = threads_for(floats);
  for (size_t s = 0; s < steps.size(); ++s) stages[s].open(steps[s].pieces, members);
  together(members, [&](int64_t member) {
    for (size_t s = 0; s < steps.size(); ++s) {
      stages[s].run(member, steps[s].work);
      stages[s].wait();
    }
  });
}

}  // namespace
}  // namespace quire
