// Runs csrc/cpu/sharing.h on plain threads, for ThreadSanitizer, which does not understand those of OpenMP. Ends with a
// status other than 0 where a piece was left out, done twice, or done before the phase before it had ended.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../../csrc/cpu/sharing.h"

using namespace ocnn_fused::cpu;

namespace {

void nothing() {}

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// `present` of the threads come; the last of them stands for those that do not, and waits so long before it comes.
HelperStats run(const std::vector<Phase>& phases, int64_t threads, int64_t present, std::chrono::microseconds late) {
  Sharing sharing(phases, threads, nothing);
  std::vector<std::thread> helpers;
  for (int64_t thread = 1; thread < present; ++thread) {
    const int64_t stands_for = thread + 1 == present ? threads - thread : 1;
    helpers.emplace_back([&, thread, stands_for] {
      std::this_thread::sleep_for(late);
      sharing.help(thread, stands_for);
    });
  }
  sharing.call(present == 1 ? threads : 1);
  for (std::thread& helper : helpers) helper.join();
  return sharing.result();
}

// Every phase reads what all pieces of the phase before it have written, without any further synchronisation.
void check_phases(int64_t threads, int64_t present, int64_t items, int64_t pieces, std::chrono::microseconds late) {
  constexpr int64_t kPhases = 6;
  std::vector<std::vector<int64_t>> values(kPhases, std::vector<int64_t>(pieces, 0));
  std::vector<Phase> phases;
  for (int64_t p = 0; p < kPhases; ++p) {
    phases.push_back({pieces, [&, p](int64_t piece, int64_t thread) {
                        check(thread >= 0 && thread < threads, "a thread that does not exist");
                        int64_t sum = 1;
                        for (int64_t q = 0; p > 0 && q < pieces; ++q) sum += values[p - 1][q];
                        for (int64_t i = 0; i < items; ++i) sum += i % 2 == 0 ? 1 : -1;
                        values[p][piece] += sum;
                      }});
  }
  run(phases, threads, present, late);
  int64_t expected = 1;
  for (int64_t p = 0; p < kPhases; ++p) {
    for (const int64_t value : values[p]) check(value == expected, "a piece has another value than it should");
    expected = 1 + pieces * expected;
  }
}

void check_exception(int64_t threads) {
  std::vector<Phase> phases;
  for (int64_t p = 0; p < 3; ++p) {
    phases.push_back({8, [p](int64_t piece, int64_t) {
                        if (p == 1 && piece % 3 == 0) throw std::runtime_error("piece");
                        check(p < 2, "a phase after the one that failed");
                      }});
  }
  bool thrown = false;
  try {
    run(phases, threads, threads, {});
  } catch (const std::runtime_error& error) {
    thrown = error.what() == std::string("piece");
  }
  check(thrown, "an exception got lost");
}

// Who waits for longer than the others helped goes on alone, for longer if that soon happens again.
void check_backoff() {
  Backoff backoff;
  const Clock::time_point start = Clock::time_point{} + std::chrono::hours(1);
  const auto at = [&](double seconds) { return start + std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); };
  const auto alone_until = [&](double seconds) {
    return !backoff.is_wanted(at(seconds - 1e-3), 0) && backoff.is_wanted(at(seconds + 1e-3), 0);
  };
  check(backoff.is_wanted(at(0), 0), "alone from the beginning");
  backoff.judge({1e-3, 0.9e-3}, at(0));
  check(backoff.is_wanted(at(0), 0), "alone although the others helped");
  backoff.judge({0, 4e-3}, at(0));
  check(alone_until(8e-3), "not alone for twice the loss");
  check(backoff.is_wanted(at(0), 9e-3), "alone for work that takes longer than that");
  backoff.judge({0, 4e-3}, at(20e-3));
  check(alone_until(36e-3), "not alone for longer when it soon happens again");
  backoff.judge({0, 60}, at(50e-3));
  check(alone_until(0.3), "alone for too long");
  backoff.judge({0, 4e-3}, at(9));
  check(alone_until(9 + 8e-3), "what happened long ago counts");
}

}  // namespace

int main() {
  for (const int64_t threads : {2, 3, 5}) {
    for (int64_t present = 1; present <= threads; ++present) {
      for (const int64_t pieces : {1, 2, 3, 7, 40}) {
        for (const int64_t late : {0, 300})
          check_phases(threads, present, 200, pieces, std::chrono::microseconds(late));
      }
    }
    check_exception(threads);
  }
  check_backoff();
  std::puts("ok");
}
