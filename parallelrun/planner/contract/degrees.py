"""The degrees pp, dp, cp and tp, whose product and the servers are the world; `filling` finds them.

ep is not a factor of the product: it divides dp x cp, whose ranks also hold the experts (`expert_axes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallelrun.config.schema.run_schema import Config

AXES = ("pp", "dp", "cp", "tp")
LARGEST = 2**20
Sizes = dict[str, int]


@dataclass
class Degrees:
    """pp, dp, cp, tp, ep (a divisor of dp x cp) and the number of servers, which together determine the world.

    filled: sentences on values that were filled in. sound: the degrees can be planned with. demonstrated: no degree was
    given, so these are the preset's demonstration plan.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    servers: int = 0
    device: str = "cpu"
    filled: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sound: bool = True
    demonstrated: bool = False

    def shorten(self, most: int, config: Config) -> None:
        """Reduce pp of the demonstration plan to `most`, the number of stages that the model can be cut into."""
        if not self.demonstrated or self.pp <= most or config.strategy.own_axis == "pp":
            return
        self.pp = most
        sizes = shown({axis: degree for axis in AXES if (degree := getattr(self, axis)) > 1}) or "dp=1"
        self.filled[0] = f"{sizes} (filled: the smallest plan that shows strategy={config.strategy.name}, at pp={most})"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp + self.servers


def device_of(config: Config, gpus: int | None) -> str:
    """cpu | cuda: as set, else what this host has or, where ranks are only planned, the cluster."""
    if config.device in ("cpu", "cuda"):
        return config.device
    cluster, is_planned = config.cluster, config.verb in ("plan", "explain")
    return "cuda" if gpus or (is_planned and cluster.gpus_per_node and not cluster.cores) else "cpu"


def shown(values: Mapping[str, object]) -> str:
    """Degrees and other keys, as a user types them."""
    return " ".join(f"{key}={value}" for key, value in values.items())
