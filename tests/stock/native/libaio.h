// The part of libaio's interface that DeepSpeed's I/O code uses, built directly on the kernel's system calls, so
// that the comparison with stock needs no system package.
#pragma once

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

using io_context_t = aio_context_t;

inline long kernel_result(long returned) { return returned < 0 ? -errno : returned; }

inline int io_queue_init(int depth, io_context_t* context) {
    *context = 0;
    return static_cast<int>(kernel_result(syscall(SYS_io_setup, depth, context)));
}

inline int io_queue_release(io_context_t context) {
    return static_cast<int>(kernel_result(syscall(SYS_io_destroy, context)));
}

inline int io_submit(io_context_t context, long count, struct iocb** blocks) {
    return static_cast<int>(kernel_result(syscall(SYS_io_submit, context, count, blocks)));
}

inline int io_pgetevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout,
                         void* /*signals*/) {
    return static_cast<int>(kernel_result(syscall(SYS_io_getevents, context, least, most, events, timeout)));
}

inline void prepare(struct iocb* block, int operation, int fd, const void* memory, std::size_t nbytes, int64_t offset) {
    std::memset(block, 0, sizeof *block);
    block->aio_lio_opcode = static_cast<uint16_t>(operation);
    block->aio_fildes = static_cast<uint32_t>(fd);
    block->aio_buf = reinterpret_cast<uint64_t>(memory);
    block->aio_nbytes = nbytes;
    block->aio_offset = offset;
}

inline void io_prep_pread(struct iocb* block, int fd, void* memory, std::size_t nbytes, int64_t offset) {
    prepare(block, IOCB_CMD_PREAD, fd, memory, nbytes, offset);
}

inline void io_prep_pwrite(struct iocb* block, int fd, const void* memory, std::size_t nbytes, int64_t offset) {
    prepare(block, IOCB_CMD_PWRITE, fd, memory, nbytes, offset);
}
