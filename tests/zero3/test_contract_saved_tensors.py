"""Contract with torch's autograd and DeepSpeed's checkpoints, on which activations on storage rely."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity.common.patches import wrapped


@pytest.mark.seam("views of parameters pass through")
def test_a_view_knows_its_base() -> None:
    """A product with a transposed weight saves a view, whose Tensor._base is that parameter."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        torch.ones(4, 3, requires_grad=True) @ weight.t()
    assert any(tensor is not weight and tensor._base is weight for tensor in saved)
    assert torch.ones(2)._base is None


@pytest.mark.seam("`Packing` lets pass what is saved within backward")
def test_autograd_tells_whether_it_runs_a_graph() -> None:
    """torch._C._current_graph_task_id is -1 outside of backward, and not in a recomputation within it."""
    seen: list[int] = []

    def body(value: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._current_graph_task_id())
        return value.exp()

    value = torch.ones(2, requires_grad=True)
    checkpoint(body, value, use_reentrant=False).sum().backward()
    assert seen[0] == -1 and seen[1] >= 0 and torch._C._current_graph_task_id() == -1


@pytest.mark.seam("a pause for code, as torch.func, that refuses hooks", "_push_saved_tensors_default_hooks.")
def test_hooks_can_be_set_aside_and_put_back() -> None:
    """torch._C._autograd has _top_saved_tensors_default_hooks and _pop_saved_tensors_default_hooks of a stack."""
    packed: list[torch.Tensor] = []
    pack, unpack = packed.append, packed.pop  # of which the second is never called
    autograd = torch._C._autograd
    assert autograd._top_saved_tensors_default_hooks(True) is None
    value = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        assert autograd._top_saved_tensors_default_hooks(True) == (pack, unpack)
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(lambda each: each.exp().sum())(torch.ones(2))
        autograd._pop_saved_tensors_default_hooks()
        value.exp()
        torch.func.grad(lambda each: each.exp().sum())(torch.ones(2))
        assert packed == []
        autograd._push_saved_tensors_default_hooks(pack, unpack)
        value.exp()
    assert len(packed) == 1 and autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.seam("change_error, Packing: changes in place are noticed, also within backward")
def test_changes_are_counted_for_all_views_and_the_count_can_be_set() -> None:
    """An alias without memory shares Tensor._version; _unsafe_set_version_counter of torch._C._autograd sets it.

    Autograd gives the unpacked tensor the _version of what a hook returned.
    """
    tensor = torch.ones(4)
    alias, other = tensor.detach(), tensor.clone()
    alias.data = torch.empty(0)
    assert alias.untyped_storage().nbytes() == 0
    tensor.add_(1)
    assert (tensor._version, alias._version, other._version) == (1, 1, 0)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (7,))
    assert (tensor._version, alias._version, other._version) == (7, 7, 0)
    alias.data = torch.ones(4)
    alias.add_(1)
    assert (tensor._version, alias._version, other._version) == (8, 8, 0)
    with saved_tensors_hooks(lambda tensor: None, lambda packed: other):
        node: Any = torch.ones(4, requires_grad=True).exp().grad_fn
    node._saved_result.add_(1)
    assert other._version == 1


@pytest.mark.seam("one `Entry` for each storage, and `Packing` knows whether offloading it frees memory")
def test_who_holds_the_memory_of_a_tensor_is_known() -> None:
    """torch._C._storage_Use_Count counts by UntypedStorage._cdata, and a StorageWeakRef ends with the last holder."""
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    assert tensor.view(2, 2).untyped_storage()._cdata == storage._cdata
    alone = torch._C._storage_Use_Count(storage._cdata)
    view = tensor[1:]
    assert torch._C._storage_Use_Count(storage._cdata) == alone + 1
    weak = StorageWeakRef(storage)
    del tensor, storage
    assert not weak.expired()
    del view
    assert weak.expired()


@pytest.mark.seam("`Packing` lets tensors of the batch pass")
def test_tensors_are_found_in_nested_containers() -> None:
    """torch.utils._pytree.tree_leaves goes through dictionaries, lists and tuples."""
    one, two = torch.ones(1), torch.ones(2)
    leaves = tree_leaves({"a": [one, {"b": (two, "text")}]})
    assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] == [one, two]


@pytest.mark.seam("open_activations says that they are not offloaded")
def test_the_checkpoints_of_deepspeed_keep_their_inputs_themselves() -> None:
    """activation_checkpointing.checkpointing.CheckpointFunction.forward keeps ctx.deepspeed_saved_tensors, unhooked."""
    function = checkpointing.CheckpointFunction
    assert isinstance(vars(function)["forward"], staticmethod)
    names = list(inspect.signature(function.forward).parameters)
    assert names == ["ctx", "run_function", "all_outputs", "args"]
    assert "ctx.deepspeed_saved_tensors = " in inspect.getsource(function.forward)
    packed: list[torch.Tensor] = []
    seen: list[object] = []

    def look(forward: Any, *inputs: object) -> Any:
        seen.extend(inputs[3:])
        return forward(*inputs)

    value = torch.ones(3, requires_grad=True)
    with (
        wrapped(function, "forward", look),
        saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor),
    ):
        checkpointing.checkpoint(torch.exp, value)
    assert seen == [value] and packed == []


@pytest.mark.seam("zeros that have no memory pass through")
def test_zeros_of_forward_mode_have_no_memory() -> None:
    """Tensor._is_zerotensor tells of zeros whose storage has a size, but no memory."""
    zeros = torch._efficientzerotensor((4,))  # type: ignore[attr-defined]
    assert zeros._is_zerotensor() and zeros.untyped_storage().nbytes() == 16
    with pytest.raises(RuntimeError):
        zeros.untyped_storage().data_ptr()
    assert not torch.zeros(4)._is_zerotensor()
