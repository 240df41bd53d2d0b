"""Tests the seams of transformers and accelerate that trainings by ``transformers.Trainer`` rely on."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from accelerate import Accelerator, checkpointing
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedPlugin, constants
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters
from torch.utils.data import DataLoader
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations import deepspeed as integration
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.integrations.transformers.launch import launched
from lightning_smartinfinity.integrations.transformers.seams import fresh_accelerate
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer.release import has_engine
from lightning_smartinfinity.zero3.setup.environment import prepare_environment
from tests.helpers.runif import RunIf
from tests.huggingface.trained import arguments
from tests.zero3.test_contract import assert_in_order, lacking, passed


@pytest.fixture(autouse=True)
def no_op_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Accelerate from compiling DeepSpeed's op for collectives, or waiting for a compilation that was killed."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    prepare_environment("cpu", local_world_size=1)
    assert "DS_ACCELERATOR" not in os.environ  # only a DeepSpeed that is imported later reads it


def two_rows() -> DataLoader[int]:
    return DataLoader([1, 2], batch_size=2)  # type: ignore[arg-type]


@pytest.mark.seam("SmartInfinityTraining, initializing_with: our engine", "By ``zero_force_ds_cpu_optimizer: false``.")
def test_accelerate_asks_deepspeed_for_an_engine_by_name_and_keeps_the_optimizer() -> None:
    """Accelerate looks deepspeed.initialize up, passes config_params, and keeps torch's optimizer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = SmartInfinityTraining()._config
    with (
        fresh_accelerate(),
        launched(),
        mock.patch("deepspeed.initialize", side_effect=ZeroDivisionError) as initialize,
    ):
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=3))
        with pytest.raises(ZeroDivisionError):
            accelerator.prepare(model, optimizer, two_rows())
    given = initialize.call_args.kwargs
    assert given == {"model": model, "optimizer": optimizer, "config_params": mock.ANY}
    expected = {"zero_optimization": config["zero_optimization"], "gradient_accumulation_steps": 3}
    assert given["config_params"] | expected == given["config_params"]


@pytest.mark.seam("checking the arguments, and the place of the storage")
def test_arguments_complete_the_configuration_and_show_themselves(tmp_path: Path) -> None:
    """TrainingArguments call trainer_config_process of HfTrainerDeepSpeedConfig; unset_hf_deepspeed_config."""
    seen: list[transformers.TrainingArguments] = []
    original = integration.HfTrainerDeepSpeedConfig.trainer_config_process

    def process(self: object, args: transformers.TrainingArguments, *rest: object) -> None:
        original(self, args, *rest)
        seen.append(args)

    with (
        fresh_accelerate(),
        launched(),
        mock.patch.object(integration.HfTrainerDeepSpeedConfig, "trainer_config_process", process),
    ):
        made = arguments(tmp_path, SmartInfinityTraining()._config, gradient_accumulation_steps=2)
    assert seen == [made]
    assert made.output_dir == str(tmp_path) and made.use_cpu is False and made.optim == "adamw_torch_fused"
    completed = made.hf_deepspeed_config.config
    assert completed["gradient_accumulation_steps"] == 2 and completed["bf16"]["enabled"] is False
    integration.unset_hf_deepspeed_config()
    assert not integration.is_deepspeed_zero3_enabled()


@pytest.mark.seam("an update that begins within the last backward of a window")
def test_the_boundary_of_a_window_is_told_before_backward() -> None:
    """DeepSpeedEngineWrapper.backward calls set_gradient_accumulation_boundary, then DeepSpeedEngine.backward."""
    engine = mock.MagicMock()
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward("loss", sync_gradients=False, scale_wrt_gas=False)
    wrapper.backward("loss", sync_gradients=True)
    assert engine.mock_calls == [
        mock.call.set_gradient_accumulation_boundary(is_boundary=False),
        mock.call.backward("loss", scale_wrt_gas=False),
        mock.call.set_gradient_accumulation_boundary(is_boundary=True),
        mock.call.backward("loss"),
        mock.call.step(),
    ]


@pytest.mark.seam("steps_taken_by_optimizers, SmartInfinityEngine: the optimizer's methods step and drop gradients")
def test_accelerates_optimizers_do_nothing_for_deepspeed_alone() -> None:
    """DeepSpeedEngineWrapper.backward ends with engine.step(). ``step`` and zero_grad of DeepSpeedOptimizerWrapper do
    nothing; those of its base, AcceleratedOptimizer, call the optimizer's. Accelerator.clip_grad_norm_ returns the
    engine's get_global_grad_norm, the _global_grad_norm that each step sets.
    """
    engine, optimizer = mock.MagicMock(), mock.create_autospec(torch.optim.SGD, instance=True)
    wrapper = mock.MagicMock(optimizer=optimizer, scaler=None)
    assert issubclass(DeepSpeedOptimizerWrapper, AcceleratedOptimizer)
    for name in ("step", "zero_grad"):
        getattr(DeepSpeedOptimizerWrapper, name)(wrapper)
    assert optimizer.mock_calls == []
    for wrapper.gradient_state.sync_gradients in (False, True):
        AcceleratedOptimizer.step(wrapper)
        AcceleratedOptimizer.zero_grad(wrapper)
    assert optimizer.mock_calls == [mock.call.step(None), mock.call.zero_grad(set_to_none=True)]
    accelerator = mock.MagicMock(distributed_type="DEEPSPEED", deepspeed_engine_wrapped=DeepSpeedEngineWrapper(engine))
    engine.get_global_grad_norm.return_value = 2.0
    assert Accelerator.clip_grad_norm_(accelerator, [], 1.0) == 2.0
    assert_in_order(DeepSpeedEngine._take_model_step, "self.optimizer.step()", "self._global_grad_norm = ")


@pytest.mark.seam("steps_taken_by_optimizers: `accelerator.backward` divides no loss; callbacks find clipped gradients")
def test_a_trainer_divides_the_loss_and_asks_for_the_norm_before_it_steps() -> None:
    """The Trainer divides losses by the number of micro-batches, and its Accelerator by 1. After Trainer.training_step
    come norm, CallbackHandler.on_pre_optimizer_step(args, state, control), step and schedule.
    """
    trainer = transformers.Trainer
    assert_in_order(
        trainer._run_epoch,
        "self.training_step(",
        "self._clip_grad_norm(model)",
        "self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)",
        "self.optimizer.step()",
        "self.lr_scheduler.step()",
    )
    backward = 'kwargs["scale_wrt_gas"] = False\n\n            self.accelerator.backward(loss, **kwargs)'
    assert lacking(trainer.training_step, backward) == []
    assert lacking(trainer.create_accelerator_and_postprocess, 'grad_acc_kwargs["num_steps"] = 1') == []


@pytest.mark.seam("SmartInfinityTraining, models_saved_by: models are written by windows (is_deepspeed_enabled)")
def test_the_trainer_saves_models_by_one_method() -> None:
    """Trainer.save_model calls _zero3_consolidated_16bit_state_dict of Trainer.deepspeed, or else save_pretrained."""
    assert passed(transformers.Trainer.save_model) == ["self", "output_dir", "_internal_call"]
    trainer = mock.MagicMock(is_deepspeed_enabled=False, is_fsdp_enabled=False)
    transformers.Trainer.save_model(trainer, "folder")
    trainer._save.assert_called_once_with("folder")
    config, engine = {"zero_optimization": {"stage": 3}}, mock.MagicMock()
    accelerator = mock.MagicMock(distributed_type="DEEPSPEED", deepspeed_config=config)
    state_dict = Accelerator.get_state_dict(accelerator, engine)
    engine.zero_gather_16bit_weights_on_model_save.assert_called_once_with()
    assert state_dict is engine._zero3_consolidated_16bit_state_dict.return_value
    assert lacking(transformers.Trainer._save, "self.model.save_pretrained(output_dir, state_dict=state_dict") == []


@pytest.mark.seam("SmartInfinityEngine has checks and names of saves")
def test_checkpoints_are_asked_of_the_engine(tmp_path: Path) -> None:
    """deepspeed_load_checkpoint and the Trainer call load_checkpoint and save_checkpoint of the engine."""
    (tmp_path / "global_step3").mkdir()
    engine = mock.MagicMock()
    engine.load_checkpoint.return_value = ("path", {})
    integration.deepspeed_load_checkpoint(engine, str(tmp_path), load_module_strict=False)
    (call,) = engine.load_checkpoint.mock_calls
    inspect.signature(SmartInfinityEngine.load_checkpoint).bind(engine, *call.args, **call.kwargs)
    assert call.args == (str(tmp_path),) and call.kwargs["load_module_strict"] is False
    # It leaves frozen weights out of checkpoints of adapters if the engine can.
    assert "exclude_frozen_parameters" in passed(SmartInfinityEngine.save_checkpoint)


@pytest.mark.seam("begin_checkpoint and models_saved_by: flushed before older ones go; only whole ones, ours, resume")
def test_a_checkpoint_begins_with_the_model_and_ends_with_the_trainers_state(tmp_path: Path) -> None:
    """Trainer._save_checkpoint begins with ``save_model(..., _internal_call=True)``, ends with the file of
    TRAINER_STATE_NAME, and then calls its module's rotate_checkpoints. Folders begin with PREFIX_CHECKPOINT_DIR;
    OPTIMIZER_NAME is the file of an optimizer in memory. Before, Trainer._save_rng_state(output_dir) writes
    ``rng_state_<rank>.pth`` on each rank.
    """
    trainer = mock.MagicMock(hp_search_backend=None)
    trainer.args.save_only_model, trainer.args.push_to_hub, trainer.args.save_total_limit = False, False, None
    trainer._get_output_dir.return_value, trainer.state.global_step = str(tmp_path), 7
    trainer.state.best_global_step = None
    with mock.patch.object(transformers.trainer, "rotate_checkpoints") as rotate:
        trainer.attach_mock(rotate, "rotate_saved")
        transformers.Trainer._save_checkpoint(trainer, mock.MagicMock(), None)
    calls = [name for name, *_ in trainer.mock_calls if "save" in name and not name.startswith("args.")]
    folder = tmp_path / f"{PREFIX_CHECKPOINT_DIR}-7"
    trainer.save_model.assert_called_once_with(str(folder), _internal_call=True)
    trainer.state.save_to_json.assert_called_once_with(str(folder / TRAINER_STATE_NAME))
    assert calls[0] == "save_model" and calls[-2:] == ["state.save_to_json", "rotate_saved"]
    assert "_save_rng_state" in calls
    trainer.args.world_size, trainer.args.process_index = 2, 1
    transformers.Trainer._save_rng_state(trainer, str(tmp_path))
    assert os.listdir(tmp_path) == ["rng_state_1.pth"]


@pytest.mark.seam("begin_state, end_state and require_undamaged: checksums of Accelerate's files")
def test_accelerate_calls_its_hooks_before_it_writes_and_reads_its_files() -> None:
    """save_state and load_state call their hooks before save_accelerator_state and load_accelerator_state, whose files
    are RNG_STATE_NAME, SCHEDULER_NAME, SAMPLER_NAME, SCALER_NAME and ``dl_state_dict``; then save_custom_state.
    """
    for name in ("save", "load"):
        places = [f"_{name}_model_state_pre_hook.values()", f"{name}_accelerator_state(", f"{name}_custom_state("]
        assert_in_order(getattr(Accelerator, f"{name}_state"), *places)
    assert '"dl_state_dict.bin"' in inspect.getsource(checkpointing.save_accelerator_state)
    names = (constants.RNG_STATE_NAME, constants.SCHEDULER_NAME, constants.SAMPLER_NAME, constants.SCALER_NAME)
    assert names == ("random_states", "scheduler", "sampler", "scaler.pt")


@pytest.mark.seam("refusing quantized bases; which models are written by windows")
def test_a_model_tells_of_its_quantizer_and_of_its_adapters() -> None:
    """from_pretrained leaves hf_quantizer and is_quantized with the model, and add_adapter _hf_peft_config_loaded."""
    model_class = transformers.PreTrainedModel
    assert lacking(model_class.from_pretrained, "model.hf_quantizer = hf_quantizer") == []
    assert model_class._hf_peft_config_loaded is False
    assert lacking(model_class.add_adapter, "self._hf_peft_config_loaded = True") == []


@pytest.mark.seam("optimizers that a Trainer is given", "DeepSpeedSchedulerWrapper is an AcceleratedScheduler.")
def test_a_trainer_gives_its_optimizer_and_its_schedule_away() -> None:
    """deepspeed_init drops Trainer.optimizer, calls create_optimizer; create_scheduler sets _created_lr_scheduler."""
    trainer, given = transformers.Trainer, mock.MagicMock(optimizer="mine", lr_scheduler="my own")
    assert lacking(integration.deepspeed_init, "trainer.optimizer = None") == []
    assert lacking(integration.deepspeed_optim_sched, "trainer.create_optimizer()") == []
    assert (trainer.create_optimizer(given), trainer.create_scheduler(given, 3)) == ("mine", "my own")
    assert lacking(trainer.create_scheduler, "self._created_lr_scheduler = True") == []
    assert issubclass(DeepSpeedSchedulerWrapper, AcceleratedScheduler)


@pytest.mark.seam("several trainings in one process", "AcceleratorState._reset_state, GradientState._reset_state.")
@pytest.mark.seam("refusing arguments of another Trainer", "A second Accelerator raises NotImplementedError.")
def test_accelerate_keeps_one_plugin_at_a_time(tmp_path: Path) -> None:
    """AcceleratorState.deepspeed_plugin is one for all Accelerators; a later HfTrainerDeepSpeedConfig replaces it."""
    for _ in range(2):
        with SmartInfinityTraining() as training:
            first = arguments(tmp_path, training.config)
            accelerator = Accelerator(deepspeed_plugin=first.deepspeed_plugin)
            assert accelerator.distributed_type == "DEEPSPEED"
            assert accelerator.state.deepspeed_plugin is first.deepspeed_plugin
            second = arguments(tmp_path, training.config)
            Accelerator(deepspeed_plugin=second.deepspeed_plugin)
            assert accelerator.state.deepspeed_plugin is second.deepspeed_plugin


@pytest.mark.seam("SmartInfinityTraining, trainings_seen_by: training after an evaluation; which engine saves")
def test_a_trainer_keeps_the_evaluations_engine() -> None:
    """``train`` takes Trainer.model_wrapped for its engine, so it is reset to the model before."""
    used = ("self._wrap_model(self.model_wrapped)", "use_accelerator_prepare = model is self.model")
    assert lacking(transformers.Trainer._prepare_for_training, *used) == []


@pytest.mark.seam("gathering_when_called, has_engine, SmartInfinityEngine: a module without an engine gets one")
def test_the_hooks_that_gather_go_with_their_engine(tmp_path: Path) -> None:
    """Hooks module_forward_pre_hook and module_forward_post_hook exist from Init._post_init_method (zero_init_context)
    to DeepSpeedEngine.destroy, in torch's Module._forward_pre_hooks and _forward_pre_hooks_with_kwargs.
    """
    with SmartInfinityTraining(tmp_path / "storage") as training:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=training.config))
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        engine, _ = accelerator.prepare(model, two_rows())
        assert all(has_engine(each) for each in model.modules())
        engine.destroy()
        assert not any(has_engine(each) for each in model.modules()) and partition_parameters.zero_init_context == 0
        with partition_parameters.Init():
            assert partition_parameters.zero_init_context == 1


@pytest.mark.seam("precomputed log-probabilities are those of the weights")
@RunIf(package="trl")
def test_trl_hashes_the_reference_after_the_trainer_is_made() -> None:
    """TRL's DPOTrainer and KTOTrainer call hash_module, a global of their modules, after Trainer.__init__."""
    from trl.trainer import dpo_trainer, kto_trainer

    for module, trainer in ((dpo_trainer, dpo_trainer.DPOTrainer), (kto_trainer, kto_trainer.KTOTrainer)):
        assert_in_order(trainer.__init__, "super().__init__(", "hash_module(self.ref_model or self.model)")
        assert callable(module.hash_module)


@pytest.mark.seam(
    "RecordedTraining: records before evaluations and saves, and resumes there",
    "Trainer._init_training_state, _load_rng_state, _maybe_log_save_evaluate, _run_epoch, _tr_loss, _total_loss_scalar,"
    " _globalstep_last_logged; ``skip_first_batches`` and ``deepspeed_load_checkpoint`` of ``transformers.trainer``.",
)
def test_the_loop_calls_what_records_hang_on() -> None:
    """_run_epoch takes keywords only; _maybe_log_save_evaluate follows each step and epoch, on_step_end precedes it."""
    trainer, log = transformers.Trainer, "self._maybe_log_save_evaluate("
    assert inspect.getsource(trainer._run_epoch).count(log) == 2
    assert_in_order(trainer._run_epoch, "callback_handler.on_step_end", log)
    assert_in_order(trainer._run_epoch, "skip_first_batches(", "rng_to_sync = True", "iter(train_dataloader)")
    counted = "self.state.epoch = epoch + (step + 1) / steps_in_epoch"
    assert lacking(trainer._run_epoch, counted, "range(num_update_steps_trained, num_update_steps_per_epoch)") == []
    given = [f"{name}={name}" for name in passed(trainer._run_epoch) if name not in ("self", "model", "epoch")]
    assert lacking(trainer._inner_training_loop, *given) == []
    loop = ("self._prepare_for_training(", "self._tr_loss = ", "self._run_epoch(")
    assert_in_order(trainer._inner_training_loop, *loop)
    names = ["self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval"]
    assert passed(trainer._maybe_log_save_evaluate) == [*names, "start_time", "learning_rate"]
    assert {"_total_loss_scalar", "_globalstep_last_logged"} <= {*trainer._maybe_log_save_evaluate.__code__.co_names}
    loads = ("create_scheduler(", "deepspeed_load_checkpoint(", "_load_optimizer")
    assert_in_order(trainer._prepare_for_training, *loads)
    assert {"state", "epochs_trained"} <= {*re.findall(r"\w+", inspect.getsource(trainer._init_training_state))}


@pytest.mark.seam("Batches: a loader's position before the batch that is fetched ahead")
def test_a_prepared_loader_fetches_one_batch_ahead() -> None:
    """DataLoaderShard calls state_dict of its base before each fetch ahead and after the last batch."""
    base_of = DataLoaderShard([1, 2, 3], batch_size=1)
    calls: list[int] = []
    fetched: list[int] = []
    base_of.base_dataloader.state_dict = lambda: calls.append(len(fetched)) or {"position": len(fetched)}
    base_of.base_dataloader.collate_fn = lambda rows: fetched.append(rows[0]) or rows[0]
    positions = [(batch, base_of.state_dict()["position"]) for batch in base_of]
    assert positions == [(1, 1), (2, 2), (3, 3)] and calls == [1, 2, 3, 3]
    assert issubclass(type(base_of), DataLoaderShard) and isinstance(base_of, DataLoader)


# ---- what exports read of torch and transformers


_SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.seam("LiveWeights and plan_for list the contents of a state dict without creating one")
def test_a_state_dict_is_made_of_what_is_read() -> None:
    """A state dict has parameters, Module._buffers that are not in _non_persistent_buffers_set, and get_extra_state."""
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"scratch"}
    persistent = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    assert set(module.state_dict()) == {*dict(module.named_parameters()), *persistent}

    class Extra(torch.nn.Module):
        def get_extra_state(self) -> str:
            return "extra"

    assert type(module).get_extra_state is torch.nn.Module.get_extra_state
    assert list(Extra().state_dict()) == ["_extra_state"]


@pytest.mark.seam("finding the tensor of a view")
def test_views_without_memory_keep_their_storage() -> None:
    """A view on the meta device has its base's UntypedStorage._cdata and an offset in it; a copy has another."""
    base = torch.empty(4, 6, device="meta")
    view = base[1].narrow(0, 2, 3)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata and view.storage_offset() == 8
    assert base.clone().untyped_storage()._cdata != base.untyped_storage()._cdata


@pytest.mark.seam("names and shapes in files of transformers")
def test_conversions_are_reverted_without_memory() -> None:
    """core_model_loading.revert_weight_conversion needs no memory, and prefers a model's _weight_conversions."""
    sizes = {**_SIZES, "intermediate_size": 4, "vocab_size": 5, "num_local_experts": 2}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))  # type: ignore[arg-type]
    given = {name: torch.empty(value.shape, device="meta") for name, value in model.state_dict().items()}
    reverted = revert_weight_conversion(model, given)
    assert reverted["model.layers.0.block_sparse_moe.experts.1.w2.weight"].shape == (8, 4)
    assert reverted["lm_head.weight"] is given["lm_head.weight"]
    model._weight_conversions = []
    assert revert_weight_conversion(model, given).keys() == given.keys()


@pytest.mark.seam("plan_for and pretrained_export: the tensors in a file of transformers, and the size of files")
def test_models_of_transformers_have_what_is_read_of_them() -> None:
    """Models have all_tied_weights_keys and _keys_to_ignore_on_save; save_pretrained has a default max_shard_size."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2))
    assert model.all_tied_weights_keys == {"lm_head.weight": "transformer.wte.weight"}
    assert not model._keys_to_ignore_on_save
    size = inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    assert isinstance(size, (int, str))
