"""The measure of equality between a plan's trace and the one-device reference: the largest relative difference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parallelrun.training.verify.trace import Trace

BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "fp8_fp64": 1e-10}
FLOOR = 1e-3  # of the largest magnitude of the kind: the gradient of a key bias is only rounding noise


@dataclass(frozen=True)
class Worst:
    """The largest error of one kind of quantity, and the parameter or step that has it."""

    error: float
    where: str


def tensor_errors(ours: dict[str, Tensor], reference: dict[str, Tensor], least_floor: float = 0.0) -> dict[str, float]:
    """Return max|a-b| / max(max|b|, floor) per tensor; infinite for NaN.

    The floor is 1e-3 x the largest max|b| of all tensors, but at least `least_floor`.
    """
    magnitude = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in reference.items()}
    floor = max(FLOOR * max(magnitude.values(), default=0.0), least_floor)
    errors = {}
    for name, value in reference.items():
        difference = float((ours[name].to(value.dtype) - value).abs().max()) if value.numel() else 0.0
        scale = max(magnitude[name], floor)
        errors[name] = difference / scale if scale > 0 else difference
        if errors[name] != errors[name]:
            errors[name] = float("inf")
    return errors


def compare(ours: Trace, reference: Trace, least_floor: float = 0.0) -> dict[str, Worst]:
    """Return the worst errors of initial weights, loss, grads, grad_norm, params (weight updates) and val_loss.

    If routing decisions are held, also of router_scores. least_floor: of gradients and updates (`tensor_errors`).
    """
    worst = {
        "initial": _worst_tensor([(ours.initial, reference.initial)]),
        "loss": _worst_number(ours.losses, reference.losses),
        "grads": _worst_tensor(list(zip(ours.gradients, reference.gradients)), least_floor),
        "grad_norm": _worst_number(ours.grad_norms, reference.grad_norms),
        "params": _worst_tensor([(ours.updates, reference.updates)], least_floor),
        "val_loss": _worst_number([ours.val_loss], [reference.val_loss]),
    }
    if reference.router_scores:
        worst["router_scores"] = _worst_tensor([(ours.router_scores, reference.router_scores)])
    return worst


def _worst_tensor(pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]], least_floor: float = 0.0) -> Worst:
    errors = [
        Worst(error, name if len(pairs) == 1 else f"{name} (step {step})")
        for step, (ours, reference) in enumerate(pairs, start=1)
        for name, error in tensor_errors(ours, reference, least_floor).items()
    ]
    return max(errors, key=lambda worst: worst.error)


def _worst_number(ours: list[float], reference: list[float]) -> Worst:
    assert len(ours) == len(reference), "traces of different length"
    errors = []
    for step, (a, b) in enumerate(zip(ours, reference), start=1):
        error = abs(a - b) / abs(b) if b else abs(a)
        errors.append(Worst(error if error == error else float("inf"), f"step {step}"))
    return max(errors, key=lambda worst: worst.error)
