"""A script of a user of the Python API. `mypy` checks it strictly (pyproject.toml), so that the API's types hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import parallelrun as pr

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from parallelrun.config.schema.run_schema import Config
    from parallelrun.models.network import Network
    from parallelrun.planner.contract.plan import Plan

    def use() -> None:
        planned = pr.plan("model=gpt", "tp=2", config_dir="conf")
        assert_type(planned, pr.PlannedRun)
        assert_type(planned.plan, Plan)
        assert_type(planned.step_s, float | None)
        run = pr.run("model=gpt", "tp=2", show=True)
        assert_type(run, pr.Run)
        assert_type(planned.run(), pr.Run)
        assert_type(pr.load(run, step=3).model, Network)
        assert_type(run.config, Config)
        assert_type(run.metrics.column("loss")[0], object)  # type: ignore[assert-type]
        assert_type(pr.sweep(["tp=2"], "model=gpt")[0], pr.SweepPoint)
        assert_type(pr.compare(run, "latest"), pr.ComparedRuns)
        assert_type(pr.compare(run, "latest").failures("val_loss>+1%"), list[str])
        try:
            pr.verify("tp=2")
        except pr.RunFailed as error:
            assert_type(error.exit_code, int)
        pr.plan(tp=2)  # type: ignore[call-arg]
        pr.run("model=gpt").losses  # type: ignore[attr-defined]  # noqa: B018
