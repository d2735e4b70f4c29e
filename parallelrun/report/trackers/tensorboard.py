"""TensorBoard: scalars of every step, and configuration, plan and summary as texts, in `<run>/tensorboard`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelrun.report.trackers import TrackedRun, Tracker

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Writes event files by the package `tensorboard` alone, without torch.

    A run that continues another writes into that run's folder. TensorBoard forgets the steps after `resumed_step` that
    are there already, because the new file begins with a START event of the next one.
    """

    library, extra = "tensorboard", "trackers"
    takes_back_steps = True

    def __init__(self, run: TrackedRun):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._folder = Path(run.identity["directory"]) if run.identity else run.directory / FOLDER
        self._writer = EventFileWriter(str(self._folder))
        if run.resumed_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(run.resumed_step + 1, session_log=start)
        about = {"name": run.name, "project": run.project, "group": run.group, "tags": list(run.tags)}
        for title, values in (("run", about), ("config", run.config), ("plan", run.plan)):
            self._text(title, values, run.resumed_step)
        self._step = run.resumed_step

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"directory": str(self._folder)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary.Summary(value=values))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        self._text("summary", {**summary, "state": state}, self._step)
        self._writer.close()

    def _text(self, title: str, values: Mapping[str, Any], step: int) -> None:
        """Add a document for TensorBoard's page of texts, which reads Markdown."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        text = f"```\n{json.dumps(values, indent=2)}\n```"
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"),
        )
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        value = self._summary.Summary.Value(tag=title, metadata=metadata, tensor=tensor)
        self._add(step, summary=self._summary.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


TRACKER = TensorBoardTracker
