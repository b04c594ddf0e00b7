"""Which ready rows a step trains, which groups a batch has, what is thrown away for it. Pure.

- `fixed_batches` (the default): a step trains exactly the groups admitted to its batch. The bound
  holds by admission; trained lengths have the data's distribution, since it waits for every group.
- `ready_first`: a step trains what is ready, the oldest batch first; rows too old are generated
  again, dropped or masked. The bound holds by sorting; what takes long is left out.
- `dynamic_sampling`: groups whose rewards are all equal are refilled in their own batch. It changes
  neither bound nor lengths, as far as rewards do not depend on lengths.
- `over_sampling`: a batch starts more groups than it trains, the slowest are stopped. The bound is
  the order's; the longest responses are not trained.

Each counts what it throws away, by reason. `claims_lengths` says whether trained lengths have the
data's distribution; tests hold those to it that claim it, and show the bias of the others.
"""
