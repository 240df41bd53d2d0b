"""Set-up before the engine is built: DeepSpeed's configuration, the environment, storage and the update device."""
