// Runs a process of a dataflow in a thread of its own.
#pragma once

#include <xmmintrin.h>

#include <exception>
#include <string>
#include <thread>

#include "dataflow.hpp"

namespace sim {

class Process {
 public:
    // `work` may refer to variables of the top, which waits for the process before they end.
    template <class Work>
    Process(std::string name, Work work) : dataflow_(*Dataflow::current()) {
        dataflow_.add_process();
        const unsigned arithmetic = _mm_getcsr();  // the thread flushes subnormals if the top's thread does
        thread_ = std::thread([this, name, work, arithmetic] {
            _mm_setcsr(arithmetic);
            process_name() = name;
            std::string failure;
            try {
                work();
            } catch (const std::exception& error) {
                failure = error.what();
            }
            dataflow_.end_process(failure);
        });
    }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;
    ~Process() {
        dataflow_.all_started();
        thread_.join();
    }

 private:
    Dataflow& dataflow_;
    std::thread thread_;
};

}  // namespace sim

#define SIM_NAME_OF(function, first, ...) #function "(" #first ")"
#define SIM_JOINED(left, right) left##right
#define SIM_UNIQUE(stem, number) SIM_JOINED(stem, number)
#define PROCESS(function, ...)                                                            \
    const sim::Process SIM_UNIQUE(process_, __LINE__)(SIM_NAME_OF(function, __VA_ARGS__), \
                                                      [&] { function(__VA_ARGS__); })
