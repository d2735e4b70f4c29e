"""A robust fit of positive constants to measured times: damped Gauss-Newton on logarithms, soft-L1 loss, weak priors.

Residuals are log(predicted / measured) over the expected error of a measurement, so that all sizes count alike; the
soft-L1 loss (sqrt(1 + r^2) - 1) keeps single outliers from deciding; the prior of a constant decides where nothing was
measured that depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Predict = Callable[[Sequence[float]], Sequence[float]]
STEPS, DIFFERENCE = 25, 1e-3
UNPREDICTED = 3.0  # the residual in units of the expected error of a time that is not positive


@dataclass(frozen=True)
class Constant:
    """A constant to fit: the key of `cluster`, where the fit starts, its bounds, and by which factor it may well differ
    from the start."""

    key: str
    start: float
    least: float
    most: float
    factor: float = 4.0


@dataclass(frozen=True)
class Fitted:
    """The constants in order, and log(predicted / measured) of every measurement."""

    values: tuple[float, ...]
    errors: tuple[float, ...]


def fit(
    constants: Sequence[Constant], predict: Predict, measured: Sequence[float], expected: Sequence[float]
) -> Fitted:
    """Choose the constants by which `predict` comes closest to the measured seconds.

    expected: the relative error that each measurement may have, which weights it.
    """
    least, most = (np.log([getattr(constant, name) for constant in constants]) for name in ("least", "most"))
    start = np.log([constant.start for constant in constants])
    width = np.log([constant.factor for constant in constants])
    target, scale = np.log(np.asarray(measured, dtype=float)), np.asarray(expected, dtype=float)

    def errors(place: Vector) -> Vector:
        seconds = np.asarray(predict([float(value) for value in np.exp(place)]), dtype=float)
        safe = np.where(seconds > 0, seconds, 1.0)
        return np.where(seconds > 0, np.log(safe) - target, UNPREDICTED * scale)

    def loss(place: Vector, logs: Vector) -> float:
        return float(np.sum(np.sqrt(1 + (logs / scale) ** 2) - 1) + 0.5 * np.sum(((place - start) / width) ** 2))

    place = np.clip(start, least, most)
    residuals = errors(place)
    best, damping = loss(place, residuals), 1e-2
    for _ in range(STEPS):
        columns = [(errors(_moved(place, index)) - residuals) / DIFFERENCE for index in range(len(place))]
        slopes = np.stack(columns, axis=1)
        weights = 1 / np.sqrt(1 + (residuals / scale) ** 2) / scale**2
        matrix = slopes.T @ (weights[:, None] * slopes) + np.diag(1 / width**2)
        gradient = slopes.T @ (weights * residuals) + (place - start) / width**2
        improved = False
        for _ in range(8):
            moved = np.clip(place - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient), least, most)
            at_moved = errors(moved)
            value = loss(moved, at_moved)
            if value < best:
                improved, change = True, best - value
                place, residuals, best, damping = moved, at_moved, value, damping / 5
                break
            damping *= 5
        if not improved or change < 1e-5 * (1 + best):
            break
    return Fitted(tuple(map(float, np.exp(place))), tuple(map(float, residuals)))


def _moved(place: Vector, index: int) -> Vector:
    moved = place.copy()
    moved[index] += DIFFERENCE
    return moved
