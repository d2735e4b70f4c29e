"""`tracker=diary`: a file with a line for whatever happens, in the run's directory."""

from __future__ import annotations

import json

from parallelrun.report.trackers import TrackedRun, Tracker


class Diary(Tracker):
    """A run that continues another one writes on in that one's file."""

    def __init__(self, run: TrackedRun):
        self.path = run.identity["path"] if run.identity else str(run.directory / "diary.jsonl")
        self.write(began=run.name, group=run.group, dp=run.plan["dp"], lr=run.config["optimizer"]["lr"])

    @property
    def identity(self):
        return {"path": self.path}

    def log(self, step, metrics):
        self.write(step=step, loss=metrics["loss"])

    def finish(self, state, summary):
        self.write(ended=state, loss=summary.get("loss"))

    def write(self, **line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


TRACKER = Diary
