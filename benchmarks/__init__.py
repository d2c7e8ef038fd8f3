"""Side-by-side measurements of flax_rpsave and other checkpointers. `./scripts/bench --help` says how to run them.

A pipeline of small modules, each run by the one before it:

`run` (one command, one JSON file) → `trial` (one peer, one fresh process) → `states` (what is saved), `peers` (who
saves it), `meters` (what it costs), `limits` (what the machine could do at best) → `report` (tables for
docs/performance.md).

Linux only: CPU, memory and I/O are read from /proc. Units are in the names: `_secs`, `_bytes`.
"""
