"""The programs a person runs: reading arguments, presets and reports, no algorithm."""
