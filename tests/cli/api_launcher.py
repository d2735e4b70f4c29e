"""The process that carries out a run for the Python API, forked instead of started (`parallelrun.api.launching`)."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cli.launcher import Launched, read, request, wait_for


class WarmProcess:
    """`subprocess.Popen` of `python -m parallelrun.api.launcher`, as far as `launching` uses it."""

    def __init__(self, order: dict[str, Any], answer: int):
        self._folder = tempfile.TemporaryDirectory(prefix="parallelrun-api-")
        folder, self.returncode = Path(self._folder.name), 0
        readers, writers = zip(os.pipe(), os.pipe())
        self.stdout, self.stderr = (io.FileIO(descriptor) for descriptor in readers)
        files = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (answer, *writers)]
        request("tests.cli.api_launcher:carry_out", folder, {"order": order, "files": files, "folder": str(folder)}, {})
        wait_for(lambda: read(folder / "ready"), f"launcher\n{read(folder / 'stderr')}")
        for descriptor in writers:
            os.close(descriptor)
        self._launched = Launched(folder, 0, folder)

    def send_signal(self, number: int) -> None:
        os.kill(self._launched.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        self.returncode = self._launched.wait()
        return self.returncode

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()
        self._folder.cleanup()


def carry_out(argument: dict[str, Any]) -> int:
    """What the warm process does: take the pipes of the test, then what `python -m parallelrun.api.launcher` does."""
    from parallelrun.api import launcher

    answer, *streams = (os.open(file, os.O_WRONLY) for file in argument["files"])
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    (Path(argument["folder"]) / "ready").write_text("yes")
    sys.stdin = io.StringIO(json.dumps({**argument["order"], "answer": answer, "parent": os.getppid()}))
    launcher.main()
    return 0
