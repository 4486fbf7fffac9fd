// A team of threads that run the same function and meet at barriers.
//
// With OpenMP the team is the process's own OpenMP pool, which PyTorch's operators use too (both ask for the library
// libgomp.so.1 and so share one): no second pool, nothing that spins while another operator works.
#pragma once

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <condition_variable>
#include <mutex>
#include <thread>
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

#if defined(_OPENMP)

struct Team {
    int rank, size;
    void barrier() const {
        if (size > 1) {
#pragma omp barrier
        }
    }
};

template <class Body>
void in_parallel(int threads, const Body& body) {
    if (threads <= 1 || in_forked_child()) return body(Team{0, 1});
#pragma omp parallel num_threads(threads)
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
}

#else

class Meeting {
public:
    explicit Meeting(int size) : size(size) {}
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const int64_t round = rounds;
        if (++waiting == size) {
            waiting = 0;
            ++rounds;
            all_here.notify_all();
        } else {
            all_here.wait(lock, [&] { return rounds != round; });
        }
    }

private:
    const int size;
    int waiting = 0;
    int64_t rounds = 0;
    std::mutex mutex;
    std::condition_variable all_here;
};

struct Team {
    int rank, size;
    Meeting* meeting;
    void barrier() const {
        if (size > 1) meeting->wait();
    }
};

template <class Body>
void in_parallel(int threads, const Body& body) {
    if (threads <= 1) return body(Team{0, 1, nullptr});
    Meeting meeting(threads);
    std::vector<std::thread> others;
    for (int rank = 1; rank < threads; ++rank) {
        others.emplace_back([&, rank] { body(Team{rank, threads, &meeting}); });
    }
    body(Team{0, threads, &meeting});
    for (std::thread& other : others) other.join();
}

#endif

// The part of [0, count) that belongs to one of the team.
struct Share {
    int64_t first, last;
    Share(const Team& team, int64_t count)
        : first(count * team.rank / team.size), last(count * (team.rank + 1) / team.size) {}
};

}  // namespace onlinenorm
