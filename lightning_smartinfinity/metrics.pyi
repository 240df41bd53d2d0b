from lightning_smartinfinity.integrations.trainer.metrics import (
    BytesPerParameter as BytesPerParameter,
    StorageBandwidth as StorageBandwidth,
    StorageBytes as StorageBytes,
    StorageCounters as StorageCounters,
    StorageWait as StorageWait,
    traffic_between as traffic_between,
)
