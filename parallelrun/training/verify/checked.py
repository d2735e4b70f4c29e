"""What `verify` runs in the place of a plan, and the memory that it needs in addition."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from parallelrun.base.precision import BYTES, TABLE
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict import prediction
from parallelrun.training.verify.single_device import single_device

_COVER_BYTES = 4  # of each element, to see that it is gathered once


def checked_config(config: Config) -> Config:
    """Return the config that is compared: verify's precision, and SGD unless `verify.optimizer=same`.

    SGD has a large learning rate, so that in fp32 too the updates are larger than the rounding of the weights.
    """
    optimizer = config.optimizer
    if config.verify.optimizer != "same":
        optimizer = replace(optimizer, name="sgd", lr=1.0, momentum=0.0, schedule="constant", warmup=0)
    precision = replace(config.precision, name=config.verify.precision)
    return replace(config, optimizer=optimizer, precision=precision, resume=None)


def checked_plan(config: Config, plan: Plan) -> Plan:
    """Return the plan of the checked config. Rare events, such as synchronisations, happen within the checked steps."""
    data = plan.data.checked(config.verify.steps)
    plan = replace(plan, precision=TABLE[config.precision.name], optimizer=config.optimizer.name, data=data)
    promised = plan.data.equivalence(plan)
    return replace(plan, equivalence=promised) if promised.kind == plan.equivalence.kind else plan


class Needs(NamedTuple):
    """Bytes that rank 0 needs in addition to its own training, which stays while the reference trains.

    traces: the logical tensors of both trainings at the moment when the last ones are gathered. state, total: of the
    reference, between steps and at the peak of one; before: the traces at that peak, fewer than `traces`.
    """

    traces: int
    state: int
    total: int
    before: int

    @property
    def peak(self) -> int:
        """The most at once, where rank 0 trains and compares in the same memory."""
        return max(self.state + self.traces, self.total + self.before)


def needs(config: Config, plan: Plan) -> Needs:
    """Return what `trace.record` and the reference need. config, plan: as they are checked.

    A trace has the initial weights, the gradients of each step and the final weights. While the last tensors of the
    reference are gathered, they exist three times: at their owners, as received and as assembled. In a replay, each
    replica has its gradients, those of the rule, and a copy.
    """
    steps, elements = config.verify.steps, sum(spec.numel for spec in plan.spec.parameters.values())
    replicas = plan.mesh.size("dp") if plan.equivalence.kind == "replay" else 1
    tensors = elements * BYTES[plan.precision.stored]
    logical = tensors * (replicas if plan.data.independent else 1)
    reference = prediction.memory(single_device(config, plan)[1], 0)
    state = reference.weights + reference.optimizer + tensors  # gradients stay until the next step begins
    if plan.data.independent:
        gathered = replicas * tensors  # the weights of each, which are compared
    else:
        gathered = 3 * tensors * replicas + (_COVER_BYTES * elements if replicas == 1 else 0)
    return Needs(
        traces=(2 * steps + 3) * logical + gathered,
        state=replicas * state,
        total=(replicas - 1) * state + reference.total,
        before=(2 * steps + 2) * logical,
    )
