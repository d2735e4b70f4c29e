"""Checkpoints: one directory per step, loadable bit by bit under any other plan.

    runs/<run>/checkpoints/step_<n>/index.json                contents, and the sha256 of every file
                                    rank_<r>.safetensors      the tensor parts that rank r owns

Names are one-device names: `model/<name>`, `optimizer/<kind>/<name>` (Adam: exp_avg, exp_avg_sq, step). No pickle is
read or written. `find`, `index`, `schema` and `resume` find, describe and check checkpoints without torch; `store`
saves and loads. A save is written under a hidden name and renamed at its end.
"""
