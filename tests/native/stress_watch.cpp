// Lets watches of up to five ranks talk, end and misunderstand each other in random scenarios, while other threads ask
// them and tell them things. In each, one rank is lost in the end, and all others must learn which. Built with
// sanitizers by test_builds.py.

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "stress.hpp"
#include "watch/rank_watch.hpp"

namespace {

using namespace smart_infinity;
using namespace std::chrono_literals;

// A message arrives within this time, also under a sanitizer and on a busy machine.
constexpr std::chrono::milliseconds kLongestWait = 120s;

struct Scenario {
    explicit Scenario(unsigned seed) : seed(seed), random(seed), num_ranks(2 + static_cast<int>(random() % 4)) {
        std::vector<std::string> hosts(static_cast<std::size_t>(num_ranks), "host");
        std::vector<std::pair<int, int>> at_hub;
        std::vector<int> at_rank;
        for (int rank = 1; rank < num_ranks; ++rank) {
            int ends[2];
            require(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets", seed);
            at_hub.emplace_back(rank, ends[0]);
            at_rank.push_back(ends[1]);
        }
        lost = at_rank.back();
        watches.push_back(watch(0, hosts, at_hub));
        for (int rank = 1; rank < num_ranks - 1; ++rank) {
            watches.push_back(watch(rank, hosts, {{0, at_rank[static_cast<std::size_t>(rank - 1)]}}));
        }
    }

    std::unique_ptr<RankWatch> watch(int rank, const std::vector<std::string>& hosts,
                                     const std::vector<std::pair<int, int>>& sockets) {
        return std::make_unique<RankWatch>(WatchOptions{.rank = rank,
                                                        .hosts = hosts,
                                                        .sockets = sockets,
                                                        .silence = 3600s,
                                                        .grace = std::chrono::milliseconds(random() % 20),
                                                        .patience = std::chrono::milliseconds(random() % 20),
                                                        .end = [this](Ending) { ++num_ends; }});
    }

    void tell(RankWatch& watch, unsigned thread) const {
        std::minstd_rand choose(seed * 31 + thread);
        for (int count = 0; count < 20; ++count) {
            switch (choose() % 7) {
                case 0:
                    watch.begin_training();
                    break;
                case 1:
                    watch.end_training();
                    break;
                case 2:
                    watch.tell_failure(std::string(choose() % 6000, 'x'));
                    break;
                case 3:
                    watch.tell_sigterm();
                    break;
                case 4:
                    watch.agree();
                    break;
                case 5:
                    watch.hear_sigterm();
                    break;
                default:
                    watch.wait(1ms);
                    break;
            }
        }
    }

    void run() {
        std::vector<std::thread> threads;
        for (const auto& watch : watches) {
            for (unsigned thread = 0; thread < 2; ++thread) {
                threads.emplace_back([&watch = *watch, thread, this] { tell(watch, thread); });
            }
        }
        std::raise(SIGTERM);
        for (std::thread& thread : threads) thread.join();
        lose_the_last();
        for (const auto& watch : watches) {
            watch->begin_training();
            for (auto waited = 0ms; !watch->report().lost; waited += 1ms) {
                require(waited < kLongestWait, "a rank was not told which one is lost", seed);
                std::this_thread::sleep_for(1ms);
            }
            require(watch->report().lost->rank == num_ranks - 1, "another rank is lost", seed);
        }
        for (const auto& watch : watches) watch->end_training();
        while (!watches.empty()) {  // in any order
            watches.erase(watches.begin() + static_cast<std::ptrdiff_t>(random() % watches.size()));
        }
    }

    // Plays a rank that trains, and is killed in the middle of a message or sends what no watch sends.
    void lose_the_last() {
        std::string words{1, 0, 0, 0, static_cast<char>(num_ranks - 1), 0, 0, 0};
        const std::size_t length = random() % 40;
        for (std::size_t at = 0; at < length; ++at) words.push_back(static_cast<char>(random() % 2 ? 0xff : 0));
        require(::send(lost, words.data(), words.size(), MSG_NOSIGNAL) > 0, "nothing was sent", seed);
        ::close(lost);
    }

    const unsigned seed;
    std::mt19937 random;
    const int num_ranks;
    int lost = -1;
    std::atomic<int> num_ends{0};
    std::vector<std::unique_ptr<RankWatch>> watches;
};

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGTERM, [](int) {});
    return run_scenarios(argc, argv, [](std::uint64_t seed) { Scenario(static_cast<unsigned>(seed)).run(); });
}
