"""Compiled functions of one instance or one run: plain loops over flat arrays, launched over threads by `cpu`.

`geometry` numbers states, pairs and entries, `pairs` answers the inner problem of every state-action pair, `linalg` solves the
Newton system, `quadratic` the small one of the multipliers, `projection` is the loop. `simplex` and `program` are the optimistic
linear program.

An episode: `streams`, `sampling`, `processes` and `rollout` play it, `occupancy` and `metrics` measure it, `confidence` and
`estimation` are what `wcops`, `opt_primal_dual`, `pdbps` and `opt_cmdp` learn with; `block` plays many in one call, `single` does
one step.
"""
