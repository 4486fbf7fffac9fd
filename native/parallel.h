// A team of threads that run the same function and meet at barriers.
//
// With OpenMP the team is the process's own OpenMP pool, which PyTorch's operators use too (both ask for the library
// libgomp.so.1 and so share one): no second pool, nothing that spins while another operator works.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <vector>
#endif

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace onlinenorm {

// After a fork the child has none of its parent's threads, and an OpenMP pool that waits for them forever.
inline bool& in_forked_child() {
    static bool forked = false;
    return forked;
}
#if !defined(_WIN32)
inline const int watching_for_fork = pthread_atfork(nullptr, nullptr, [] { in_forked_child() = true; });
#endif

// Where a team meets. Waiting is short, some hundred nanoseconds, if every thread has a core. If other work shares a
// core with a thread that waits, that thread would lose it for a whole time slice by sleeping: so it goes on asking. But
// if the thread that it waits for shares its core, asking keeps that one from arriving: so it does not ask for long.
class Meeting {
public:
    void wait(int size) {
        if (size == 1) return;
        const int64_t round = rounds.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            rounds.store(round + 1, std::memory_order_release);
            return;
        }
        const auto patient_until = std::chrono::steady_clock::now() + kPatience;
        for (int asked = 1; rounds.load(std::memory_order_acquire) == round; ++asked) {
            if (asked % 64 || std::chrono::steady_clock::now() < patient_until) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
    }

private:
    static constexpr std::chrono::microseconds kPatience{100};

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int64_t> rounds{0};
};

struct Team {
    int rank, size;
    Meeting* meeting;
    void barrier() const { meeting->wait(size); }
};

template <class Body>
void in_parallel(int threads, const Body& body) {
    Meeting meeting;
    if (threads <= 1 || in_forked_child()) return body(Team{0, 1, &meeting});
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    body(Team{omp_get_thread_num(), omp_get_num_threads(), &meeting});
#else
    std::vector<std::thread> others;
    for (int rank = 1; rank < threads; ++rank) {
        others.emplace_back([&, rank] { body(Team{rank, threads, &meeting}); });
    }
    body(Team{0, threads, &meeting});
    for (std::thread& other : others) other.join();
#endif
}

// The part of [0, count) that belongs to one of the team.
struct Share {
    int64_t first, last;
    Share(const Team& team, int64_t count)
        : first(count * team.rank / team.size), last(count * (team.rank + 1) / team.size) {}
};

}  // namespace onlinenorm
