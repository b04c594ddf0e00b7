"""The rollout `sglang`: SGLang servers behind AsyncFlow's `Rollout`."""
