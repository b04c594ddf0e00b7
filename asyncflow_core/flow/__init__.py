"""The workflow: one `Flow` from prompts to trained weights.

Pure: `admission`, `policies`, `weights`, `micro_batches`, `dataflow`, `status`. I/O: `worker` (the
one loop every task runs), `train` and `fanout` (the trainer's steps over its ranks), `evaluation`
(held-out prompts beside them), `launch` and `serve` (processes), `watching` (what `asyncflow top`
shows), `controller` (one run), `flow` (the user's object).
"""
