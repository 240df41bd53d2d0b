"""The native core: I/O, update kernels, checksums and the transfer schedule."""

import enum
from collections.abc import Sequence
from typing import overload

class DType(enum.Enum):
    """Type of gradients and parameters in memory."""

    FLOAT32 = 0

    FLOAT16 = 1

    BFLOAT16 = 2

class InstructionSet(enum.Enum):
    """What the kernels were compiled for; all give the same bits."""

    SCALAR = 0

    AVX2 = 1

    AVX512 = 2

def supported_instruction_sets() -> list[InstructionSet]:
    """Of this CPU, slowest first."""

def select_instruction_set(choice: InstructionSet | None) -> InstructionSet:
    """
    Use one from now on, in every thread; None is the best. Returns it.

    Raises:
        ValueError: This CPU does not support it.
    """

def crc32c(address: int, nbytes: int, value: int = 0, width: int | None = None) -> int:
    """
    CRC-32C of memory, continuing `value`: in the way of the instruction set in use, or of a width in crc32c_widths().

    Raises:
        ValueError: This CPU has no such way.
    """

def crc32c_combine(first: int, second: int, nbytes: int) -> int:
    """CRC-32C of two pieces of memory, one behind the other, from the checksum of each; nbytes are the second's."""

def crc32c_widths() -> list[int]:
    """Ways to compute CRC-32C on this CPU, slowest first: the bits of their registers, 0 for the table."""

def sum_of_squares(address: int, numel: int, dtype: DType) -> float:
    """In double precision and a fixed order: the same bits on every instruction set. Finite iff every element is."""

def accumulate(
    gradients: Sequence[int],
    sums: Sequence[int],
    numels: Sequence[int],
    adds: Sequence[bool],
    gradient_dtype: DType,
    dtype: DType,
) -> list[float]:
    """
    Gradients become sums, or are added to them, as torch rounds; all in one pass over memory.

    Args:
        gradients: Addresses.
        sums: Addresses; none overlaps its gradient.
        numels: Elements of each.
        adds: Whether each is added.
        gradient_dtype: Of the gradients.
        dtype: Of the sums.

    Returns:
        What sum_of_squares() gives for each sum.

    Raises:
        ValueError: The lists differ in length.
    """

class CudaDevice:
    """
    A CUDA device through its primary context and the driver's library, opened at run time.

    Copies run in a stream's order; their memory stays until they have completed. Streams are
    handles as torch's `cuda_stream`, 0 is the default stream. Not usable in a forked child.

    Raises:
        CudaError: No driver, no such device, or any call that fails.
    """

    def __init__(self, index: int) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def registration_failure(self) -> str:
        """Why host memory could not be registered; empty if it always could."""

    def copy_to_host(self, *, host: int, device: int, nbytes: int, stream: int) -> None:
        """Start a copy."""

    def copy_to_device(self, *, device: int, host: int, nbytes: int, stream: int) -> None:
        """Start a copy."""

class CudaEvent:
    """
    A point in a stream's order; recorded again, it is another one.

    Raises:
        CudaError: A call failed, or the work before the point did.
    """

    def __init__(self, device: CudaDevice) -> None: ...
    def record(self, stream: int) -> None:
        """Make it the point that the stream has reached with what it was given so far."""

    def synchronize(self) -> None:
        """Until the work before the point is done."""

    def hold(self, stream: int) -> None:
        """Let what the stream is given from now on run after the point."""

class CudaStream:
    """
    A stream of our own, without implicit order with any other.

    Raises:
        CudaError: A call failed.
    """

    def __init__(self, device: CudaDevice) -> None: ...
    @property
    def handle(self) -> int: ...
    def follow(self, other: int) -> None:
        """Let what is given to this stream from now on run after what is in the other one now."""

    def lead(self, other: int) -> None:
        """Let what is given to the other stream from now on run after what is in this one now."""

class HostBuffer:
    """
    Zero-filled, page-aligned memory (2 MiB-aligned from that size on), absent from forked children.

    Raises:
        ValueError: No bytes.
        OSError: The memory cannot be mapped.
    """

    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def register(self, device: CudaDevice) -> bool:
        """
        Let copies from and to the device be asynchronous, until unregister() or the end of the memory.

        Returns whether it worked; if not, the device's registration_failure says why.
        """

    def unregister(self) -> None:
        """Idempotent."""

    def memoryview(self) -> memoryview:
        """Writable bytes; they keep the buffer alive."""

class StateFile:
    """
    One open descriptor of an existing file, close-on-exec.

    A pipeline that uses it keeps the descriptor open until it is closed too.

    Raises:
        OSError: With errno and filename.
    """

    def __init__(self, path: str, *, direct: bool) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    def sync(self) -> None:
        """fdatasync; raises OSError."""

    def close(self) -> None:
        """Idempotent."""

class Identity:
    """
    What the extents of a store carry.

    Raises:
        ValueError: job is not 16 bytes.
    """

    def __init__(self, *, job: bytes, rank: int, state_format: int) -> None: ...
    @property
    def job(self) -> bytes: ...
    @property
    def rank(self) -> int: ...
    @property
    def state_format(self) -> int: ...

class AdamStep:
    """
    Holds the scalars of one hyperparameter set at one step, as fp32.

    g = gradient * gradient_scale (+ l2 * p); m, v as in torch; p = p * decay
    - step_size * (m / (sqrt(v) * inverse_sqrt_bias_correction2 + eps)). `seed` is the
    number of the update: that of stochastic rounding, in the formats that have it.
    """

    def __init__(
        self,
        *,
        gradient_scale: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        decay: float,
        l2: float,
        step_size: float,
        inverse_sqrt_bias_correction2: float,
        eps: float,
        seed: int = 0,
    ) -> None: ...
    @property
    def gradient_scale(self) -> float: ...
    @property
    def one_minus_beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def one_minus_beta2(self) -> float: ...
    @property
    def decay(self) -> float: ...
    @property
    def l2(self) -> float: ...
    @property
    def step_size(self) -> float: ...
    @property
    def inverse_sqrt_bias_correction2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def words(self) -> list[int]:
        """The scalars as a card's kernel takes them: the bits of each, in order."""

class AdagradStep:
    """
    Holds the scalars of one hyperparameter set at one step, as fp32.

    g = gradient * gradient_scale (+ weight_decay * p); s = s + g * g;
    p = p - step_size * (g / (sqrt(s) + eps)).
    """

    def __init__(self, *, gradient_scale: float, weight_decay: float, step_size: float, eps: float) -> None: ...
    @property
    def gradient_scale(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def step_size(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def words(self) -> list[int]:
        """The scalars as a card's kernel takes them: the bits of each, in order."""

class SgdStep:
    """
    Holds the scalars of one hyperparameter set at one step, as fp32.

    g = gradient * gradient_scale (+ weight_decay * p);
    b = buffer_coefficient * b + gradient_coefficient * g;
    p = p - lr * (g + nesterov_momentum * b), or, where that is 0, p - lr * b.
    A buffer_coefficient of 0 forgets the buffer, even what is not finite in it.
    """

    def __init__(
        self,
        *,
        gradient_scale: float,
        weight_decay: float,
        buffer_coefficient: float,
        gradient_coefficient: float,
        nesterov_momentum: float,
        lr: float,
    ) -> None: ...
    @property
    def gradient_scale(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def buffer_coefficient(self) -> float: ...
    @property
    def gradient_coefficient(self) -> float: ...
    @property
    def nesterov_momentum(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def words(self) -> list[int]:
        """The scalars as a card's kernel takes them: the bits of each, in order."""

class RmspropStep:
    """
    Holds the scalars of one hyperparameter set at one step, as fp32.

    g = gradient * gradient_scale (+ weight_decay * p); v = alpha * v + one_minus_alpha * g * g;
    a = torch.lerp(a, g, one_minus_alpha) where centered; d = g / (sqrt(v (- a * a)) + eps);
    b = momentum * b + d where there is momentum; p = p - lr * (b or d).
    Without momentum b stays as it is, and not centered a does.
    """

    def __init__(
        self,
        *,
        gradient_scale: float,
        weight_decay: float,
        alpha: float,
        one_minus_alpha: float,
        eps: float,
        momentum: float,
        centered: float,
        lr: float,
    ) -> None: ...
    @property
    def gradient_scale(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def one_minus_alpha(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def centered(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def words(self) -> list[int]:
        """The scalars as a card's kernel takes them: the bits of each, in order."""

class Segment:
    """
    Elements [offset, offset + numel) of a tasklet; addresses are those of the first element, 0 is none.

    step -1 carries the state over and leaves the parameter alone. `arrays` are fp32: the master and
    what the rule keeps (exp_avg, exp_avg_sq; sum; momentum_buffer). WRITE and MODIFY take the
    master from `parameter` if arrays[0] is 0.
    """

    def __init__(
        self,
        *,
        offset: int,
        numel: int,
        step: int = -1,
        gradient: int = 0,
        gradient_dtype: DType = DType.FLOAT32,
        parameter: int = 0,
        parameter_dtype: DType = DType.FLOAT32,
        arrays: Sequence[int] = [],
    ) -> None: ...
    @property
    def offset(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def gradient(self) -> int: ...
    @property
    def gradient_dtype(self) -> DType: ...
    @property
    def parameter(self) -> int: ...
    @property
    def parameter_dtype(self) -> DType: ...
    @property
    def arrays(self) -> tuple[int, ...]: ...

class Operation(enum.Enum):
    """What a batch does with every tasklet."""

    UPDATE = 0
    """Read, optimizer update, parameters out, write at the other place."""

    READ = 1
    """Read, copy arrays and the master (cast to the parameter) out."""

    WRITE = 2
    """Write arrays from memory; zeros where there is none."""

    MODIFY = 3
    """Read, replace arrays from memory where there are some, write."""

class Blocks:
    """
    How a tasklet's elements are cut into the blocks of 8-bit formats: at every multiple of 256 and
    at `borders`, elements that begin a parameter.
    """

    def __init__(self, borders: Sequence[int]) -> None: ...
    def count(self, numel: int) -> int:
        """Blocks of a tasklet of this many elements."""

class Tasklet:
    """
    One extent, read at one place and written at another, of the same file or not.
    Segments are in ascending order and do not overlap; elements outside are carried over
    (WRITE: zeros). With master_in_parameter (UPDATE, fp32 parameters; INT8_REMAINDER: bf16) the master
    is not read, or only its remainder: it is the parameter, and segments cover the whole tasklet.
    `offset` is that of the first element in the partition, a multiple of 256: stochastic rounding
    depends on it. `blocks` tells where parameters meet, for formats that have blocks. `payload` is the
    address of a compressed gradient, for segments that have the type of its values and no gradient.
    In a batch with a codec it is that of `payload_bytes` for the segments' gradients to be compressed to;
    `residual` is then the address of the tasklet's fp32 residual, if it has one, and elements in `padding`,
    ranges of (offset, numel) in ascending order, are never sent.
    """

    def __init__(
        self,
        *,
        index: int,
        numel: int,
        num_arrays: int,
        extent_bytes: int,
        read_file: int,
        read_offset: int,
        read_generation: int,
        write_file: int,
        write_offset: int,
        write_generation: int,
        segments: Sequence[Segment],
        master_in_parameter: bool = False,
        offset: int = 0,
        blocks: Blocks | None = None,
        payload: int = 0,
        payload_bytes: int = 0,
        residual: int = 0,
        padding: Sequence[tuple[int, int]] = [],
    ) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def num_arrays(self) -> int: ...
    @property
    def extent_bytes(self) -> int: ...
    @property
    def read_file(self) -> int: ...
    @property
    def read_offset(self) -> int: ...
    @property
    def read_generation(self) -> int: ...
    @property
    def write_file(self) -> int: ...
    @property
    def write_offset(self) -> int: ...
    @property
    def write_generation(self) -> int: ...
    @property
    def segments(self) -> list[Segment]: ...
    @property
    def master_in_parameter(self) -> bool: ...
    @property
    def offset(self) -> int: ...
    @property
    def blocks(self) -> Blocks | None: ...
    @property
    def payload(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def residual(self) -> int: ...
    @property
    def padding(self) -> list[tuple[int, int]]: ...
    def in_file(self, file: int) -> Tasklet:
        """The same tasklet for a pipeline that has its file at this index."""

    def compressed(self, payload_bytes: int, value_dtype: DType) -> Tasklet:
        """The same tasklet for a batch without a codec: its gradient has been compressed into its payload."""

class Batch:
    """
    Tasklets to work in order. Validated by Pipeline.submit().

    With a stream, parameters lie in its device's memory; they travel through it and
    through one slot of host memory for each ring buffer.

    With a codec (UPDATE only), every tasklet's gradient is compressed into its payload just
    before it is updated by what the payload has. A tasklet may have an unscaled residual, what
    earlier steps did not send: residual_scale times it is added to the gradient, which is scaled
    by that, before. The batch leaves residuals as they are: feed_back() is for them.
    """

    def __init__(
        self,
        operation: Operation,
        tasklets: Sequence[Tasklet],
        steps: Sequence[AdamStep | AdagradStep | SgdStep | RmspropStep] = [],
        stream: CudaStream | None = None,
        codec: GradientCodec | None = None,
        residual_scale: float = 1.0,
    ) -> None: ...
    @property
    def operation(self) -> Operation: ...
    @property
    def tasklets(self) -> list[Tasklet]: ...
    @property
    def steps(self) -> list[AdamStep | AdagradStep | SgdStep | RmspropStep]: ...
    @property
    def stream(self) -> CudaStream | None: ...
    @property
    def codec(self) -> GradientCodec | None: ...
    @property
    def residual_scale(self) -> float: ...

class GradientCodec:
    """A way to compress the gradient of a tasklet into a payload."""

    @property
    def name(self) -> str: ...
    def payload_bytes(self, numel: int, gradient_dtype: DType = DType.FLOAT32) -> int:
        """The most that the payload of a tasklet takes."""

    def value_dtype(self, gradient_dtype: DType = DType.FLOAT32) -> DType:
        """Type of the values that are read from a payload."""

class TopK(GradientCodec):
    """
    Sends the ceil(ratio * n) elements of largest magnitude of a tasklet's n, less where others are zero.

    In order of the magnitude's fp32 bits (NaN is largest), and of the index where they are equal. Values are
    rounded to nearest, ties to even; a finite one stays finite. A ratio of 1 sends zeros, too, in the
    gradient's own type.

    Args:
        ratio: Of elements, in (0, 1].
        value_dtype: Of what is sent; None is the gradient's.
        exact: False chooses by a magnitude that is estimated from a sample, wherever this reads an eighth of the
            elements at most (from 12,800 elements to send on): the number of elements sent is then, at four
            standard deviations, within a tenth of that wanted, and never above it by more.

    Raises:
        ValueError: The ratio is another.
    """

    def __init__(self, *, ratio: float, value_dtype: DType | None = None, exact: bool = True) -> None: ...
    @property
    def ratio(self) -> float: ...
    @property
    def exact(self) -> bool: ...
    def count(self, numel: int) -> int:
        """Elements to send of so many."""

class BlockScaled(GradientCodec):
    """
    Sends every element in 8 bits: as the nearest multiple, of 127 at most, of a power of two for each 256.

    The error is at most a 127th of the block's largest magnitude (or 2**-127). Values are read as fp32 and
    are exact in bf16, too. Magnitudes above 127 * 2**121, and NaN, become that.
    """

    def __init__(self) -> None: ...

def encode_gradient(codec: GradientCodec, tasklet: Tasklet, *, residual_scale: float = 1.0) -> int:
    """
    Compress a tasklet's gradient into its payload now, as UPDATE does for a batch with this codec.

    Returns:
        Bytes of the payload.

    Raises:
        ValueError: It cannot be compressed.
    """

def decode_gradient(
    payload: int, nbytes: int, numel: int, out: int, *, first: int = 0, last: int | None = None
) -> DType:
    """
    Write elements [first, last) of a payload's gradient to `out`, dense, in the type that is returned.

    Args:
        payload: Address, a multiple of 4.
        nbytes: Of the payload.
        numel: Elements of the tasklet.
        out: Address of memory for (last - first) elements of up to 4 bytes.
        first: Element.
        last: Element; None is numel.

    Raises:
        ValueError: It is not a payload for so many elements.
    """

def feed_back(tasklets: Sequence[Tasklet], *, residual_scale: float = 1.0, threads: int = 1) -> None:
    """
    After a step whose gradients were compressed: what was not sent becomes the residual.

    With y = gradient + residual * residual_scale, and v what the payload sent of it (zero where nothing was),
    each element that was updated gets residual = (y - v) / residual_scale. Padding and elements without a
    step keep theirs. Payloads are used up: called again, it does nothing.

    Args:
        tasklets: Of the step, with the payloads that it wrote and its gradients; those that have no residual
            are passed by.
        residual_scale: Of the gradients.
        threads: That work at a time.

    Raises:
        ValueError: A payload or a tasklet is not in order; no residual has changed.
    """

class TransferSchedule:
    """The order of a batch as a pure state machine: no I/O, no clock, no threads."""

    def __init__(
        self,
        num_tasklets: int,
        num_buffers: int,
        *,
        reads: bool,
        writes: bool,
        fetches: bool = False,
        delivers: bool = False,
    ) -> None: ...
    def next(self) -> list[tuple[str, int, int]]:
        """
        Actions to start now, in this order: (name, tasklet, buffer); names are "read", "fetch" (parameters
        from a device), "compute", "write" and "deliver" (parameters to a device).
        """

    def extend(self, num_tasklets: int) -> None:
        """More tasklets, behind those there are."""

    def extend_resident(self, num_tasklets: int, *, reads: bool, writes: bool) -> None:
        """The same for resident tasklets; their buffers are numbered from `num_buffers` on."""

    def prefer(self, tasklets: Sequence[int]) -> None:
        """Of these tasklets those that have not begun are begun next, in this order."""

    def done(self, action: str, tasklet: int) -> None:
        """
        A started action has ended.

        Raises:
            ValueError: It is not in flight.
        """

    def fail(self, action: str, tasklet: int) -> None:
        """
        A started action has ended without success: nothing new starts but deliveries, which compute has
        begun; others still report done.
        """

    def parameters_out(self, tasklet: int) -> bool:
        """Whether it has been computed."""

    def complete(self) -> list[bool]:
        """By tasklet: whether all of it has ended with success."""

    @property
    def finished(self) -> bool: ...

class FileCounters:
    """Of one file, since creation."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def busy_seconds(self) -> float:
        """With at least one request in the system."""

class Counters:
    """Since creation. Seconds are summed over threads."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def read_calls(self) -> int: ...
    @property
    def write_calls(self) -> int: ...
    @property
    def cached_read_bytes(self) -> int:
        """Of resident tasklets: not read."""

    @property
    def cached_write_bytes(self) -> int:
        """Of resident tasklets: not written."""

    @property
    def shared_read_bytes(self) -> int:
        """Of a card: from it to the host."""

    @property
    def shared_write_bytes(self) -> int:
        """Of a card: from the host to it."""

    @property
    def internal_read_bytes(self) -> int:
        """Of a card: from storage to it."""

    @property
    def internal_write_bytes(self) -> int:
        """Of a card: from it to storage."""

    @property
    def padding_bytes(self) -> int:
        """Of a card: what these four do not count, of blocks."""

    @property
    def control_bytes(self) -> int:
        """Of a card: trailers and status beats."""

    @property
    def gradient_file_bytes(self) -> int:
        """Of a card: blocks that were written to the file of gradients, and read from it."""

    @property
    def read_seconds(self) -> float: ...
    @property
    def write_seconds(self) -> float: ...
    @property
    def compute_seconds(self) -> float: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def system_calls(self) -> int:
        """Of the I/O engine."""

    @property
    def io_cpu_seconds(self) -> float:
        """Of its threads."""

    @property
    def registered_bytes(self) -> int:
        """Of memory that is pinned for it now."""

    @property
    def registration_errno(self) -> int:
        """Why none is, where it asked for it, or 0."""

    @property
    def files(self) -> list[FileCounters]:
        """Of a pipeline, by index."""

class Failure:
    """
    Why a batch stopped: kind is io, short, checksum, foreign, generation, format, cuda, device (a card) or
    gradient (a compressed one); errno may be 0.
    """

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def errno(self) -> int: ...
    @property
    def tasklet(self) -> int: ...
    @property
    def message(self) -> str: ...
    def __repr__(self) -> str: ...

def io_engines() -> list[tuple[str, str | None]]:
    """The I/O engines by name, fastest first, each with the reason why it is not to be had here, or None."""

class CardError(RuntimeError):
    """A call at a card failed."""

class Card:
    """
    A card whose kernels are loaded, through the methods of `binding` (see devices/smartssd), which are called
    with the interpreter's lock; or, with open(), through XRT's public C API, without it.

    Every call of it, and of what it gives out, raises CardError if the card fails.
    """

    def __init__(self, binding: object) -> None: ...
    @staticmethod
    def open(device: int | str, *, xclbin: str, library: str = "libxrt_coreutil.so.2") -> Card:
        """Open a device by its index or PCIe address and load the kernels of a file."""

    def group(self, kernel: str, argument: int) -> int:
        """The memory that a kernel's argument must lie in."""

    def allocate(self, nbytes: int, *, group: int, p2p: bool = False) -> CardBuffer:
        """Memory on the card."""

    def close(self) -> None:
        """Idempotent. The device closes with the last buffer or pipeline that uses it."""

class CardBuffer:
    """
    Memory on the card. Peer to peer, only a file system may touch what is at `address`:
    it is the card's own memory.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def queue(self, *, timeout_ms: int) -> FileQueue:
        """
        What moves bytes between files and this memory alone. A request that does not return in time is given up:
        its failure is of kind "device", and until it returns it keeps the memory and its file.
        """

    def sync_to_card(self, nbytes: int, offset: int = 0) -> None:
        """What is at `address` becomes what the card has."""

    def sync_from_card(self, nbytes: int, offset: int = 0) -> None:
        """The other way round."""

class CardOptions:
    """
    A card that works the batches of a pipeline: UPDATE only, of fp32 state in one file.

    Args:
        card: The card.
        kernel: Name of the update rule's.
        gradient_bytes: On the card for each buffer of the ring: the largest gradient or payload.
        parameter_bytes: The same of parameters: two bytes for every element at least.
        timeout_ms: How long a run of a kernel, a transfer of state or gradients, or a sync may take.
        dram_bytes: The most that the ring may take of the card's memory; None: all there is.
        gradient_file: On the card's own storage, with gradient_bytes (a multiple of 4096) for each
            buffer: gradients go through it. None: from host memory.

    Raises:
        ValueError: The card is closed.
    """

    def __init__(
        self,
        *,
        card: Card,
        kernel: str,
        gradient_bytes: int,
        parameter_bytes: int,
        timeout_ms: int,
        dram_bytes: int | None = None,
        gradient_file: StateFile | None = None,
    ) -> None: ...

class Pipeline:
    """
    Works batches of tasklets in a ring of buffers: reads, compute and writes overlap.

    The first failure stops new work; wait() returns it from then on, drain() returns it and ends the
    batch. Not usable in a forked child.

    io_engine is one of io_engines(), or "auto": the fastest that works here for these files.

    The tasklets with the indices 0, 1, ... are resident, as many as resident_bytes has items, the sizes of
    their extents: their state stays in host memory. Unless resident_through, it is never on storage.

    With a card, it works the batches, in a ring of its own memory, and I/O runs in threads. More than one
    compute thread lets the gradient of a tasklet travel while another is updated.

    Raises:
        ValueError: A size or number is out of range.
        OSError: Memory, threads or the I/O engine are not to be had.
        CardError: The card fails, or has too little memory.
    """

    def __init__(
        self,
        *,
        files: Sequence[StateFile],
        identity: Identity,
        num_buffers: int,
        buffer_bytes: int,
        io_threads: int = 4,
        compute_threads: int = 1,
        io_engine: str = "auto",
        resident_bytes: Sequence[int] = [],
        resident_through: bool = True,
        card: CardOptions | None = None,
    ) -> None: ...
    @property
    def io_engine(self) -> str:
        """The engine in use: one of io_engines()."""

    @property
    def ring_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int:
        """Of resident tasklets."""

    def submit(self, batch: Batch) -> None:
        """
        Start a batch; returns at once. Memory it names must stay until drain().

        Raises:
            ValueError: The batch cannot be worked, or another one is active.
        """

    def extend(self, more: Batch) -> None:
        """
        Add tasklets behind those of the active batch; returns at once. They are counted on from its last.

        Raises:
            ValueError: They cannot be worked, are of another operation or on a CUDA device, or no batch
                is active.
        """

    def prefer(self, positions: Sequence[int]) -> None:
        """Of these tasklets of the active batch those that have not begun are begun next, in this order."""

    def wait(self, first: int = 0, last: int | None = None) -> Failure | None:
        """
        Until batch tasklets [first, last) have their parameters and arrays out, or the batch failed.

        A signal handler that raises, as that of Ctrl-C, ends the wait; the batch goes on.
        """

    def wait_for(self, positions: Sequence[int]) -> Failure | None:
        """As wait(), for tasklets anywhere in the batch, as counted in it; those that have not begun are preferred."""

    def drain(self) -> Failure | None:
        """Until nothing is in flight; the batch is over. A signal handler may end the wait, as in wait()."""

    def abandon(self) -> None:
        """End the batch, whose waiters get a failure, once nothing is in flight: what has not begun is not done."""

    def finished(self) -> list[int]:
        """
        Positions in the active batch, or the last, of tasklets that are wholly done: their outputs in memory,
        their extents written.
        """

    @property
    def busy(self) -> bool:
        """Whether something of a card's that timed out has not returned; no batch may be submitted until then."""

    def writes_out(self) -> list[tuple[int, int]]:
        """(offset, nbytes) in a card's file of each write that timed out and has not returned: it may still write."""

    def counters(self) -> Counters: ...
    def close(self) -> None:
        """Abandon the batch, whose waiters get a failure; wait for what is in flight. Idempotent."""

class FileQueue:
    """
    Reads and writes files in the background; large requests run in parts, side by side.

    `memory` is what most requests will name: an engine that gains by it registers it once.
    A direct file wants offset, address and nbytes to be multiples of 4096. Not usable in a forked child.

    Raises:
        ValueError: A number is out of range.
        OSError: Threads or the I/O engine are not to be had.
    """

    def __init__(self, *, io_threads: int = 4, io_engine: str = "auto", memory: HostBuffer | None = None) -> None: ...
    def read(self, file: StateFile, *, offset: int, address: int, nbytes: int) -> int:
        """
        Start reading; returns a ticket. The memory must stay until wait().

        Raises:
            ValueError: It cannot be transferred.
        """

    def write(self, file: StateFile, *, offset: int, address: int, nbytes: int) -> int:
        """
        Start writing; returns a ticket. The memory must stay, unchanged, until wait().

        Raises:
            ValueError: It cannot be transferred.
        """

    def wait(self, ticket: int) -> Failure | None:
        """
        Until the request has ended, all of it or with a failure, which only the first wait returns.

        A signal handler that raises, as that of Ctrl-C, ends the wait; the request goes on, its ticket stays
        open and its memory in use.

        Raises:
            ValueError: There is no such ticket.
        """

    @property
    def io_engine(self) -> str:
        """The engine in use: one of io_engines()."""

    def counters(self) -> Counters: ...
    @property
    def busy(self) -> bool:
        """Whether a request that was given up has not returned."""

    def close(self) -> None:
        """Wait for what is in flight, but not for what was given up, whose memory and file are lost. Idempotent."""

@overload
def inject(
    pipeline: Pipeline,
    *,
    seed: int = 0,
    max_delay_us: int = 0,
    fail_read_at: int = -1,
    fail_write_at: int = -1,
    short_transfer_every: int = 0,
    errno: int = 5,
) -> None: ...
@overload
def inject(
    queue: FileQueue,
    *,
    seed: int = 0,
    max_delay_us: int = 0,
    fail_read_at: int = -1,
    fail_write_at: int = -1,
    short_transfer_every: int = 0,
    errno: int = 5,
) -> None:
    """Faults for tests, from now on: requests are counted from 0, reads and writes apart."""

class Throttle:
    """Makes files of a pipeline slow, for tests: their requests take turns."""

    def __init__(self, pipeline: Pipeline, files: Sequence[StateFile]) -> None: ...
    @property
    def bytes_per_second(self) -> float:
        """Of all of them; 0: as fast as they are."""

    @bytes_per_second.setter
    def bytes_per_second(self, arg: float, /) -> None: ...

class Hold:
    """
    Holds `count` reads or writes of a pipeline or queue, for tests: from now on, those from number `read_at`
    or `write_at` on do not begin before they are released. `gradients`: those of a card's gradient file alone;
    else all others.
    """

    @overload
    def __init__(
        self, pipeline: Pipeline, *, read_at: int = -1, write_at: int = -1, count: int = 1, gradients: bool = False
    ) -> None: ...
    @overload
    def __init__(self, queue: FileQueue, *, read_at: int = -1, write_at: int = -1, count: int = 1) -> None: ...
    @property
    def count(self) -> int:
        """Those that are held now."""

    def release(self) -> None:
        """Let go of them, and hold no more."""

def use_cuda_library(path: str | None) -> None:
    """Open this library instead of libcuda.so.1 from now on; None: libcuda.so.1. What exists keeps its own."""
