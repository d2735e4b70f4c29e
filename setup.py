"""Only the list of packages, which pyproject.toml cannot compute: every folder with Python or YAML files is installed.

`strategies`, `conf` and `recipes` lie beside `parallelrun` in the repository and are installed inside it.
"""

from setuptools import find_packages, setup

beside = find_packages(include=["strategies", "strategies.*", "conf", "recipes"])
setup(packages=[*find_packages(include=["parallelrun", "parallelrun.*"]), *(f"parallelrun.{name}" for name in beside)])
