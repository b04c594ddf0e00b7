"""The workflow: one `Flow` from prompts to trained weights.

Pure: `admission`, `weights`, `micro_batches`, `dataflow`. I/O: `worker` (the one loop every task
runs), `train` and `fanout` (the trainer's steps over its ranks), `launch` and `serve` (processes),
`controller` (one run), `flow` (the user's object).
"""
