"""The strategies of each axis. `plan.py`, `checks.py` and `keys.py` need no torch; `runtime.py` runs on the ranks."""
