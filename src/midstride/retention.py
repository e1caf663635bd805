"""Which checkpoints stay: the newest, every so many steps, the best; joined by ``|``.

Rules are asked after a commit, about committed checkpoints, in the order of ``seq``. The newest
always stays, whatever the rules say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from midstride.info import CheckpointInfo


class Retention:
    """The root of all rules."""

    def kept(self, infos: Sequence[CheckpointInfo]) -> set[int]:
        """``seq`` of the checkpoints that this rule keeps."""
        raise TypeError(f"{type(self).__name__} does not say what to keep")

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            return NotImplemented
        return UnionOf((*_parts(self), *_parts(other)))


def _parts(rule: Retention) -> tuple[Retention, ...]:
    return rule.rules if isinstance(rule, UnionOf) else (rule,)


@dataclass(frozen=True)
class LatestN(Retention):
    """Keeps the newest ``n``."""

    n: int

    def __post_init__(self) -> None:
        _count("LatestN", self.n)

    def kept(self, infos: Sequence[CheckpointInfo]) -> set[int]:
        return {info.seq for info in sorted(infos, key=lambda info: info.seq)[-self.n :]}


@dataclass(frozen=True)
class EveryNSteps(Retention):
    """Keeps those whose step is a multiple of ``n``, for ever."""

    n: int

    def __post_init__(self) -> None:
        _count("EveryNSteps", self.n)

    def kept(self, infos: Sequence[CheckpointInfo]) -> set[int]:
        return {info.seq for info in infos if info.step % self.n == 0}


@dataclass(frozen=True)
class BestN(Retention):
    """Keeps the ``n`` with the best values of a metric; ``mode`` is "min" or "max".

    Only finite numbers take part; of equal values the newer checkpoint is better.
    """

    n: int
    metric: str
    mode: str

    def __post_init__(self) -> None:
        _count("BestN", self.n)
        _check_mode(self.mode)

    def kept(self, infos: Sequence[CheckpointInfo]) -> set[int]:
        return {info.seq for info in _ranked(infos, self.metric, self.mode)[: self.n]}


@dataclass(frozen=True)
class UnionOf(Retention):
    """Keeps what any of its rules keeps."""

    rules: tuple[Retention, ...]

    def kept(self, infos: Sequence[CheckpointInfo]) -> set[int]:
        return set().union(*(rule.kept(infos) for rule in self.rules))


def as_retention(keep: int | Retention | None) -> Retention | None:
    """What ``keep=`` may be: a number of newest checkpoints, rules, or None for all."""
    if keep is None or isinstance(keep, Retention):
        return keep
    if type(keep) is int:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint stays; keep=None keeps all")
        return LatestN(keep)
    raise TypeError(f"keep must be a number of checkpoints, rules joined by |, or None, not {keep!r}")


def to_retire(policy: Retention, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The checkpoints that may be deleted, the oldest first; never the newest."""
    ordered = sorted(infos, key=lambda info: info.seq)
    kept = policy.kept(ordered)
    return [info for info in ordered[:-1] if info.seq not in kept]


def best_of(infos: Sequence[CheckpointInfo], metric: str, mode: str) -> CheckpointInfo | None:
    """The checkpoint with the best finite value of a metric; None if none has one."""
    _check_mode(mode)
    ranked = _ranked(infos, metric, mode)
    return ranked[0] if ranked else None


def _ranked(infos: Sequence[CheckpointInfo], metric: str, mode: str) -> list[CheckpointInfo]:
    sign = 1 if mode == "min" else -1
    rated = []
    for info in infos:
        value = info.metrics.get(metric)
        # An int is finite, and may be too large for isfinite().
        if isinstance(value, int) or (value is not None and math.isfinite(value)):
            rated.append((sign * value, -info.seq, info))
    return [info for _, _, info in sorted(rated, key=lambda entry: entry[:2])]


def _check_mode(mode: str) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")


def _count(name: str, n: int) -> None:
    if type(n) is not int:
        raise TypeError(f"{name} takes a whole number, not {n!r}")
    if n < 1:
        raise ValueError(f"{name} takes at least 1, not {n}")
