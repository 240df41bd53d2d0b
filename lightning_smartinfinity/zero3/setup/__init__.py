"""Set-up before the engine exists: DeepSpeed's configuration, the environment, storage and the update device."""
