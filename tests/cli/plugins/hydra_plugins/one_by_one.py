"""A sweeper for tests: runs `strategy=a,b,c` one point after the other, and keeps what each answers.

In a folder of its own, because Hydra takes plug-ins from packages named hydra_plugins only.
"""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper

answers: list[Any] = []  # of the points of one sweep: a number, or the exception that stands for none


class OneByOne(Sweeper):
    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self._launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        (swept,) = [text.partition("=")[2].split(",") for text in arguments if text.startswith("strategy=")]
        fixed = [text for text in arguments if not text.startswith("strategy=")]
        for number, name in enumerate(swept):
            (ended,) = self._launcher.launch([[f"strategy={name}", *fixed]], initial_job_idx=number)
            answers.append(ended.return_value if ended.status == JobStatus.COMPLETED else ended._return_value)
