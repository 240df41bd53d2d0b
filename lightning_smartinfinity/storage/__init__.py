"""The state store: extents and their places, manifest, commit record, recovery, folder lock and free space.

Typical use::

    requests = measure_space(folders, job=config.job, rank=rank, extents=layout.extents, num_parameters=len(names))
    require_space(gathered_requests_of_all_ranks)         # the same result on every rank
    store = create_store(folders, config=config, extents=layout.extents, description=description)
"""

from lightning_smartinfinity.storage.extents import Extent, ExtentMap
from lightning_smartinfinity.storage.folders.manifest import StoreDescription
from lightning_smartinfinity.storage.state.opening import create_store, find_resumable, recover_store
from lightning_smartinfinity.storage.state.space import (
    PARAMETERS,
    SPILLED_GRADIENTS,
    Shortfall,
    SpaceRequest,
    measure_activation_space,
    measure_gradient_space,
    measure_residual_space,
    measure_space,
    measure_tensor_space,
    require_space,
    shortfalls,
)
from lightning_smartinfinity.storage.state.state_store import StateStore
from lightning_smartinfinity.storage.tensors.tensor_files import UnnamedFiles
from lightning_smartinfinity.storage.tensors.tensor_store import StoredTensor, TensorStore

__all__ = [
    "PARAMETERS",
    "SPILLED_GRADIENTS",
    "Extent",
    "ExtentMap",
    "Shortfall",
    "SpaceRequest",
    "StateStore",
    "StoreDescription",
    "StoredTensor",
    "TensorStore",
    "UnnamedFiles",
    "create_store",
    "find_resumable",
    "measure_activation_space",
    "measure_gradient_space",
    "measure_residual_space",
    "measure_space",
    "measure_tensor_space",
    "recover_store",
    "require_space",
    "shortfalls",
]
