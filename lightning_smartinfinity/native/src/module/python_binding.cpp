#include "module/python_binding.hpp"

#include <cstdint>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace smart_infinity {
namespace {

// A Python object that may be released by any thread.
class Held {
 public:
    explicit Held(nb::object object) : object_(std::move(object)) {}
    ~Held() {
        const nb::gil_scoped_acquire acquire;
        object_.reset();
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    const nb::object& get() const { return object_; }

 private:
    nb::object object_;
};

using SharedHeld = std::shared_ptr<const Held>;

// Calls call() with the interpreter's lock. A Python exception becomes a failed call, unless it ends the program.
template <class Call>
auto attempt(const char* name, const Call& call) {
    try {
        return call();
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
        throw CardError(std::string(name) + " failed: " + nb::str(error.value()).c_str());
    } catch (const std::exception& error) {
        throw CardError(std::string(name) + " gave something else than it should: " + error.what());
    }
}

// Calls a method of the binding.
template <class... Arguments>
SharedHeld make(const SharedHeld& binding, const char* name, const Arguments&... arguments) {
    return attempt(name, [&] { return std::make_shared<const Held>(binding->get().attr(name)(arguments...)); });
}

template <class Result, class... Arguments>
Result get(const SharedHeld& binding, const char* name, const Arguments&... arguments) {
    return attempt(name, [&] { return nb::cast<Result>(binding->get().attr(name)(arguments...)); });
}

class PythonBuffer final : public CardBuffer {
 public:
    PythonBuffer(SharedHeld binding, SharedHeld buffer) : binding_(std::move(binding)), buffer_(std::move(buffer)) {}

    std::byte* map() override {
        const nb::gil_scoped_acquire acquire;
        return reinterpret_cast<std::byte*>(get<std::uintptr_t>(binding_, "address", buffer_->get()));
    }
    void sync(Sync direction, std::size_t bytes, std::size_t offset) override {
        const nb::gil_scoped_acquire acquire;
        (void)make(binding_, "sync", buffer_->get(), direction == Sync::kToCard, bytes, offset);
    }
    std::shared_ptr<CardBuffer> part(std::size_t bytes, std::size_t offset) override {
        const nb::gil_scoped_acquire acquire;
        return std::make_shared<PythonBuffer>(binding_, make(binding_, "part", buffer_->get(), bytes, offset));
    }

    const nb::object& object() const { return buffer_->get(); }

 private:
    SharedHeld binding_;
    SharedHeld buffer_;
};

class PythonRun final : public CardRun {
 public:
    PythonRun(SharedHeld binding, SharedHeld run) : binding_(std::move(binding)), run_(std::move(run)) {}

    // Passes the word as a C int, since a binding may be unable to pass any other type.
    void set(int argument, std::uint32_t word) override {
        const nb::gil_scoped_acquire acquire;
        (void)make(binding_, "set_scalar", run_->get(), argument, static_cast<std::int32_t>(word));
    }
    void set(int argument, const std::shared_ptr<CardBuffer>& buffer) override {
        const nb::gil_scoped_acquire acquire;
        const auto& of_python = static_cast<const PythonBuffer&>(*buffer);
        (void)make(binding_, "set_buffer", run_->get(), argument, of_python.object());
    }
    void start() override {
        const nb::gil_scoped_acquire acquire;
        (void)make(binding_, "start", run_->get());
    }
    int wait(std::chrono::milliseconds timeout) override {
        const nb::gil_scoped_acquire acquire;
        return get<int>(binding_, "wait", run_->get(), timeout.count());
    }
    int state() override {
        const nb::gil_scoped_acquire acquire;
        return get<int>(binding_, "state", run_->get());
    }

 private:
    SharedHeld binding_;
    SharedHeld run_;
};

class PythonKernel final : public CardKernel {
 public:
    PythonKernel(SharedHeld binding, SharedHeld kernel) : binding_(std::move(binding)), kernel_(std::move(kernel)) {}

    std::shared_ptr<CardRun> run() override {
        const nb::gil_scoped_acquire acquire;
        return std::make_shared<PythonRun>(binding_, make(binding_, "run", kernel_->get()));
    }
    int group(int argument) override {
        const nb::gil_scoped_acquire acquire;
        return get<int>(binding_, "group", kernel_->get(), argument);
    }

 private:
    SharedHeld binding_;
    SharedHeld kernel_;
};

class PythonBinding final : public CardBinding {
 public:
    explicit PythonBinding(nb::object binding) : binding_(std::make_shared<const Held>(std::move(binding))) {}

    std::shared_ptr<CardKernel> kernel(const std::string& name) override {
        const nb::gil_scoped_acquire acquire;
        return std::make_shared<PythonKernel>(binding_, make(binding_, "kernel", name.c_str()));
    }
    std::shared_ptr<CardBuffer> allocate(std::size_t bytes, Memory memory, int group) override {
        const nb::gil_scoped_acquire acquire;
        const bool p2p = memory == Memory::kPeerToPeer;
        return std::make_shared<PythonBuffer>(binding_, make(binding_, "allocate", bytes, p2p, group));
    }

 private:
    SharedHeld binding_;
};

}  // namespace

std::shared_ptr<CardBinding> make_python_binding(nb::object binding) {
    return std::make_shared<PythonBinding>(std::move(binding));
}

}  // namespace smart_infinity
