"""The workflow: one `Flow` from prompts to trained weights.

`flow` is the user's object, `open` opens one service by hand. `planning` checks a configuration,
`processes` starts and watches, `working` is what works on rows, `weights` brings versions to
replicas, `running` is a run from its first prompt to its last step. State machines are pure:
`running.admission`, `running.pacing`, `running.policies`, `weights.protocol`, `processes.watchdog`,
`working.micro_batches`, `planning.dataflow`.
"""
