"""Injected faults, and parts of the native core that only tests call directly.

Only a core that was built with SMART_INFINITY_TESTING has them; a user's core has not.
"""

from __future__ import annotations

try:
    from lightning_smartinfinity.native._core import (
        EndingClock,
        FaultCounts,
        Hold,
        InstructionSet,
        Throttle,
        checking_thread,
        crc32c_by,
        crc32c_combine,
        crc32c_widths,
        decode_gradient,
        encode_gradient,
        extend_resident,
        inject,
        leave_out_crc32c,
        select_instruction_set,
        supported_instruction_sets,
        sync_from_card,
        sync_to_card,
        use_cuda_library,
        use_system_folder,
    )
except ImportError as error:
    raise ImportError(
        "this native core injects no faults: it was built without SMART_INFINITY_TESTING; build it by `make setup`, or "
        "by `pip install --config-settings cmake.define.SMART_INFINITY_TESTING=ON --editable '.[dev]'`"
    ) from error

__all__ = [
    "EndingClock",
    "FaultCounts",
    "Hold",
    "InstructionSet",
    "Throttle",
    "checking_thread",
    "crc32c_by",
    "crc32c_combine",
    "crc32c_widths",
    "decode_gradient",
    "encode_gradient",
    "extend_resident",
    "inject",
    "leave_out_crc32c",
    "select_instruction_set",
    "supported_instruction_sets",
    "sync_from_card",
    "sync_to_card",
    "use_cuda_library",
    "use_system_folder",
]
