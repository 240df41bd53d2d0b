"""The native core and the package call kernels as ``hls/description.py`` describes them.

``tests/hls`` shows that the kernels follow the same description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hls.description import ERROR_BITS, INTERFACE_VERSION, KERNELS, STATUS_WORDS, Kernel
from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd import kernels as of_package
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.native import (
    Batch,
    Card,
    CardOptions,
    DType,
    Failure,
    Operation,
    Pipeline,
)
from lightning_smartinfinity.pipeline.rules import rule_for
from tests.helpers.compressed import block_scaled_codes
from tests.helpers.golden import decode, encode, random_arrays
from tests.helpers.payload import compress
from tests.helpers.update_rules import ARRAYS
from tests.helpers.update_rules import RULES as RULE_OF
from tests.native.stored import Array, Run, StoredState
from tests.smartssd.described_card import DescribedCard

NUMEL, FIRST, LAST = 3_000, 700, 2_900
STEPS = {rule.kernel: getattr(native, rule.step) for rule in RULES}
SGD = next(kernel for kernel in KERNELS if kernel.name == "sgd_update")


def step_of(kernel: Kernel) -> Any:
    """Return a step in which every word has a different value."""
    values = {word: 1.5 + number for number, word in enumerate(kernel.words)}
    return STEPS[kernel.name](**values, **({"seed": 1} if kernel.name == "adamw_update" else {}))


@contextmanager
def stored_state(folder: Path, kernel: Kernel, arrays: tuple[Array, ...]) -> Iterator[StoredState]:
    with StoredState(folder, NUMEL, num_arrays=len(kernel.arrays)) as stored:
        stored.write(*arrays)
        yield stored


def update(stored: StoredState, kernel: Kernel, binding: DescribedCard, run: Run) -> Failure | None:
    options = CardOptions(
        card=Card(binding), kernel=kernel.name, gradient_buffer_bytes=1 << 16, parameter_bytes=1 << 16, timeout_ms=1000
    )
    pipeline = Pipeline(
        files=stored.files,
        identity=stored.identity,
        num_buffers=1,
        buffer_bytes=stored.extent_bytes,
        card=options,
    )
    pipeline.submit(Batch(Operation.UPDATE, stored.tasklets([run], compressed=True), [step_of(kernel)]))
    failure = pipeline.finish()
    pipeline.close()
    return failure


def read(stored: StoredState, num_arrays: int) -> tuple[Failure | None, list[Array]]:
    """Read, on the host, the state that a card wrote."""
    stored.generation, stored.place = stored.generation + 1, 1 - stored.place
    found = [np.zeros(NUMEL, np.float32) for _ in range(num_arrays)]
    stored.start(Operation.READ, [Run(0, NUMEL, arrays=found)])
    return stored.finish(commits=False), found


@pytest.mark.parametrize("form", [1, 256 + 1, 512], ids=["dense", "sparse", "8 bits"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_arguments(tmp_path: Path, kernel: Kernel, form: int) -> None:
    """A kernel gets every argument in its place: pointers, ranges, forms, and the rule's words by their names."""
    step = step_of(kernel)
    gradient, *arrays = random_arrays(step, NUMEL, 1, special=False)
    payload = None
    if form != 1:
        payload = block_scaled_codes(gradient).payload() if form == 512 else compress(gradient, 0.1, DType.FLOAT16)
    binding = DescribedCard(payload)
    parameter = np.zeros(NUMEL, np.int16)
    run = Run(
        FIRST,
        LAST - FIRST,
        0,
        encode(gradient, DType.FLOAT16)[FIRST:] if payload is None else None,
        DType.FLOAT32 if form == 512 else DType.FLOAT16,
        parameter[FIRST:],
        DType.BFLOAT16,
    )
    with stored_state(tmp_path, kernel, tuple(arrays)) as stored:
        if payload is not None:
            stored.payloads = {0: np.frombuffer(payload.tobytes(), np.uint8).copy()}
        assert update(stored, kernel, binding, run) is None
        failure, found = read(stored, len(arrays))
        assert failure is None
    np.testing.assert_array_equal(np.stack(found), np.stack(arrays))
    np.testing.assert_array_equal(parameter[FIRST:LAST], encode(arrays[0], DType.BFLOAT16)[FIRST:LAST])
    assert not parameter[:FIRST].any() and not parameter[LAST:].any()
    assert [(call.elements, call.words["active"]) for call in binding.calls] == [
        (slice(0, FIRST), 0),
        (slice(FIRST, LAST), 1),
        (slice(LAST, NUMEL), 0),
    ]
    call = binding.calls[1]
    words = {word: int(np.float32(getattr(step, word)).view(np.uint32)) for word in kernel.words}
    forms = {"gradient_form": form, "parameter_form": 2}
    assert call.words == {"numel": NUMEL, "first": FIRST, "last": LAST, "active": 1, **forms, **words}
    for name, values in zip(kernel.arrays, arrays, strict=True):
        np.testing.assert_array_equal(call.arrays[name], values)
        assert call.memory[f"{name}_in"].ctypes.data == call.memory[f"{name}_out"].ctypes.data
    if payload is None:
        sent = decode(call.memory["gradient"].view(np.int16)[FIRST:LAST], DType.FLOAT16)
        np.testing.assert_array_equal(sent, decode(encode(gradient, DType.FLOAT16), DType.FLOAT16)[FIRST:LAST])


PROBLEMS = {
    "magic": "there is no status of a kernel",
    "version_and_kernel": rf"interface is version {INTERFACE_VERSION ^ 64}, expected {INTERFACE_VERSION}$",
    "count": rf"updated {(LAST - FIRST) ^ 64} elements, expected {LAST - FIRST}",
    "errors": r"reports errors \(64\)",
    "gradient_read": "the gradient arrived with another checksum",
    "array0_read": "array 0 arrived with another checksum",
    "array1_read": "array 1 arrived with another checksum",
    "array2_read": "the kernel has an array 2",
    "array3_read": "the kernel has an array 3",
    "parameter_written": "the parameters arrived with another checksum",
    "array0_written": "",
    "array1_written": "",
    "array2_written": "the kernel has an array 2",
    "array3_written": "the kernel has an array 3",
    "indices_read": "the gradient's indices or exponents arrived with another checksum",
    "header_read": "the gradient's header or counts arrived with another checksum",
}


def answered(folder: Path, word: str, bits: int) -> tuple[Failure | None, Failure | None]:
    """Update with altered bits in a status word. Return the failure of the update and of the next read."""
    gradient, *arrays = random_arrays(step_of(SGD), NUMEL, 2, special=False)
    payload = compress(gradient, 0.1, DType.FLOAT32)
    binding = DescribedCard(payload)
    binding.tamper = lambda status: status.__setitem__(word, status[word] ^ bits)
    with stored_state(folder, SGD, tuple(arrays)) as stored:
        stored.payloads = {0: np.frombuffer(payload.tobytes(), np.uint8).copy()}
        run = Run(FIRST, LAST - FIRST, 0, parameter=np.zeros(NUMEL, np.float32))
        failure = update(stored, SGD, binding, run)
        return failure, read(stored, len(arrays))[0] if failure is None else None


@pytest.mark.parametrize("word", STATUS_WORDS)
def test_words_of_the_status(tmp_path: Path, word: str) -> None:
    """Each status word is checked. Checksums of written arrays are checked by the next read."""
    failure, later = answered(tmp_path, word, 64)
    if not PROBLEMS[word]:
        assert failure is None and later is not None and later.kind == "checksum"
        return
    assert failure is not None and failure.kind == "device"
    assert re.search(PROBLEMS[word], failure.message), failure.message


@pytest.mark.parametrize(
    ("word", "bits", "told"),
    [
        # The kernel's number is the upper half of the version word.
        ("version_and_kernel", 64 << 16, f"kernel {SGD.number ^ 64} answered, expected {SGD.number}, sgd_update"),
        *(
            ("errors", ERROR_BITS[error], f"({ERROR_BITS[error]}: {words})")
            for error, words in (
                ("bad_index", "an index is out of range or order"),
                ("bad_header", "the payload's header is wrong"),
                ("bad_range", "the range of elements is wrong"),
                ("unknown_form", "the form is unknown"),
                ("wrong_counts", "the counts do not give the header's sum"),
                ("bad_code", "an exponent or a code is none"),
            )
        ),
    ],
)
def test_what_a_status_says(tmp_path: Path, word: str, bits: int, told: str) -> None:
    """A status from another kernel is refused. Each error bit of the status is explained in words."""
    failure, _ = answered(tmp_path, word, bits)
    assert failure is not None and failure.kind == "device" and told in failure.message


def test_an_optimizer_without_a_kernel() -> None:
    """An optimizer without a kernel is refused by name, with a list of those that have one."""
    with pytest.raises(UnsupportedError, match=r"torch\.optim\.Adamax") as caught:
        of_package.kernel_of("Adamax")
    assert "update_device='host'" in caught.value.remedy and "Adagrad" in caught.value.remedy


def example_state(step: Any) -> tuple[Array, ...]:
    """Return the self-test's state after a step.

    It must be finite, since a card's NaN may have other bits than the host's.
    """
    gradient, *state = np.random.default_rng(1).standard_normal((1 + len(ARRAYS[type(step)]), 50_000), np.float32)
    return RULE_OF[type(step)](step, gradient, tuple(map(np.abs, state)))


def test_kernels_of_the_package() -> None:
    """The package's kernels agree with the description in names, arrays and steps, and with torch's optimizers."""
    assert [kernel.name for kernel in of_package.KERNELS] == [kernel.name for kernel in KERNELS]
    for ours, described in zip(of_package.KERNELS, KERNELS, strict=True):
        assert ours.num_arrays == len(described.arrays)
        example = ours.example()
        assert type(example) is STEPS[described.name]
        assert all(getattr(example, word) != 0 for word in described.words)
        assert all(np.isfinite(array).all() for array in example_state(example))
        for optimizer in ours.rule.optimizers:
            rule = rule_for(getattr(torch.optim, optimizer)([torch.nn.Parameter(torch.zeros(1))]))
            assert rule.name == optimizer and tuple(rule.arrays) == described.arrays
