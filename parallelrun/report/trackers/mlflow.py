"""MLflow: a local store in `<runs>/mlflow`, shared by all runs of the folder, unless MLFLOW_TRACKING_URI is set."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.report.records.read import flatten
from parallelrun.report.trackers import FINISHED, INTERRUPTED, TrackedRun, Tracker, numbers

if TYPE_CHECKING:
    from mlflow.entities import Metric

STORE, SERVER = "mlflow", "MLFLOW_TRACKING_URI"
_MOST_PARAMETERS, _MOST_METRICS, _LONGEST = 100, 1000, 6000  # MLflow's limits for one call, and for one value
_STATUS = {FINISHED: "FINISHED", INTERRUPTED: "KILLED"}


class MlflowTracker(Tracker):
    """One run of MLflow. Its parameters are the configuration; a run that continues it has the same run id.

    Parameters cannot change, so the configuration that continues a run is an artifact, like summaries.
    """

    library, extra = "mlflow", "trackers"

    def __init__(self, run: TrackedRun):
        for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
            os.environ.setdefault(name, "true")
        from mlflow import MlflowClient

        server, identity = os.environ.get(SERVER), run.identity or {}
        self._store = None if server else identity.get("store") or str(run.runs / STORE)
        self._client = MlflowClient(server or Path(str(self._store)).as_uri())
        self._waiting: list[Metric] = []
        if identity and identity["store"] == self._store:
            self._id = str(identity["run_id"])
            self._client.update_run(self._id, status="RUNNING")
            self._client.log_dict(self._id, dict(run.config), f"config_from_step_{run.resumed_step + 1}.json")
        else:
            self._id = self._create(run)
        for key, value in run.plan.items():  # tags can change: another plan may continue the run
            self._client.set_tag(self._id, f"plan.{key}", "" if value is None else value)

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        tags = {**dict.fromkeys(run.tags, "true"), **({"group": run.group} if run.group else {})}
        created = self._client.create_run(experiment, tags=tags, run_name=run.name)
        identifier = str(created.info.run_id)
        parameters = [Param(key, str(value)[:_LONGEST]) for key, value in flatten(run.config).items()]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(identifier, params=parameters[first : first + _MOST_PARAMETERS])
        return identifier

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"run_id": self._id, "store": self._store}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        if len(self._waiting) + len(metrics) > _MOST_METRICS:
            self.flush()
        self._waiting += [Metric(name, value, now, step) for name, value in metrics.items()]

    def flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
            self._waiting = []

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        self.flush()
        self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_tag(self._id, "state", state)
        for name, value in numbers(summary).items():
            self._client.log_metric(self._id, f"summary.{name}", value)
        self._client.set_terminated(self._id, status=_STATUS.get(state, "FAILED"))


TRACKER = MlflowTracker
