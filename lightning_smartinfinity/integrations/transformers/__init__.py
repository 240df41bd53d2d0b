"""``transformers.Trainer`` and Accelerate with optimizer state that is kept on storage.

::

    from lightning_smartinfinity.huggingface import SmartInfinityTraining

    with SmartInfinityTraining(storage="/mnt/nvme") as training:
        args = TrainingArguments("finetuned", bf16=True, deepspeed=training.config)
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        trainer.train()
        trainer.save_model("my-model")
"""

from lightning_smartinfinity.integrations.transformers.training import SmartInfinityTraining

__all__ = ["SmartInfinityTraining"]
