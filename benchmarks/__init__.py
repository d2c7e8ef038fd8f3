"""Side-by-side measurements of flax_rpsave and other checkpointers. `./scripts/bench --help` says how to run them.

A pipeline of small modules, each run by the one before it:

`run` (one command, one JSON file) → `launch` (fresh processes, one answer) → `trial` (one peer in one of them) →
`states` (what is saved), `peers` (who saves it), `meters` (what it costs), `limits` (what the machine could do at best)
→ `report` (tables and plots for docs/performance.md: `tables`, `scaling`, `plots`).

Hosts that save to an object store: `throttled` is the trial, `object_store` the store, `card` each host's network card.
`torch_dcp` is the trial of a peer that has an environment of its own; `request` is what all trials are asked.

Linux only: CPU, memory and I/O are read from /proc. Units are in the names: `_secs`, `_bytes`.
"""
