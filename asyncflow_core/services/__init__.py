"""The four service interfaces: DataStore, Rollout, Trainer, WeightSync, a file each."""
