"""Decorators for values that are computed once: for a plan, or for groups of candidates of a search."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from parallelrun.planner.contract.plan import Plan, Value, once

Arguments = ParamSpec("Arguments")
Method = TypeVar("Method", bound=Callable[..., Any])


def cached(
    cache: str,
) -> Callable[[Callable[Concatenate[Plan, Arguments], Value]], Callable[Concatenate[Plan, Arguments], Value]]:
    """Decorate a function of a plan, whose results are kept in one of the plan's caches, by function and arguments.

    cache: the name of the cache. Arguments are hashable, and passed by position.
    """

    def decorate(
        function: Callable[Concatenate[Plan, Arguments], Value],
    ) -> Callable[Concatenate[Plan, Arguments], Value]:
        name = f"{function.__module__}.{function.__qualname__}"

        @wraps(function)
        def cached_function(plan: Plan, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            return once(getattr(plan, cache), (name, args), lambda: function(plan, *args, **kwargs))

        return cast("Callable[Concatenate[Plan, Arguments], Value]", cached_function)

    return decorate


def once_for(*names: str) -> Callable[[Method], Method]:
    """Decorate a method that takes a group: its value is computed once for all groups with equal attributes `names`,
    and kept in the object's `_cache`."""
    attributes = attrgetter(*names)

    def decorate(method: Method) -> Method:
        @wraps(method)
        def cached_method(self: Any, group: Any, *args: object) -> Any:
            key = method.__name__, attributes(group), args
            return once(self._cache, key, lambda: method(self, group, *args))

        return cast(Method, cached_method)

    return decorate
