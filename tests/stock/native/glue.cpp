// DeepSpeed's own asynchronous file I/O (csrc/aio/common, compiled unchanged) behind a C interface. It replaces the
// pybind11 layer of its async_io op, which takes minutes to compile; like that layer it does not report a failed
// write.
#include <deepspeed_aio_common.h>

#include <memory>

extern "C" int transfer(const char* path, char* memory, int64_t nbytes, int read, int64_t file_offset, int block_size,
                        int queue_depth, int single_submit, int overlap_events) {
    const int fd = open_file(path, read != 0);
    if (fd == -1) return -1;
    deepspeed_aio_config_t config(block_size, queue_depth, single_submit != 0, overlap_events != 0, false);
    auto context = std::make_unique<aio_context>(block_size, queue_depth);
    auto request = std::make_unique<io_xfer_ctxt>(fd, file_offset, 0, nbytes, memory);
    const auto operation = overlap_events != 0 ? do_aio_operation_overlap : do_aio_operation_sequential;
    operation(read != 0, context, request, &config, nullptr);
    close(fd);
    return 0;
}
