"""What mpirun and torchrun start in the attach tests: a rank that a warm process carries out (`tests.cli.launcher`).

The stand-in tells the test which variables it has been given, waits for the rank's end, and passes on what the rank
has printed and its exit code. It imports next to nothing: two ranks that import torch cost five seconds.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(parent: Path) -> int:
    folder = parent / f"process_{os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['RANK']}"
    folder.mkdir()
    (folder / "aside").write_text(json.dumps(dict(os.environ)))
    (folder / "aside").rename(folder / "environ.json")
    while not (folder / "code").exists():
        time.sleep(0.02)
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.write((folder / name).read_text())
    return int((folder / "code").read_text())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
