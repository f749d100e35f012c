"""Successive halving: measure many candidates briefly, the better half of them longer, and so on."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Candidate = TypeVar("Candidate")
Measure = Callable[[Candidate, int], float]


def rungs_of(num_trials: int) -> list[int]:
    """How many candidates each rung has, where all rungs together have at most `num_trials` trials; the last has two.

    >>> rungs_of(6), rungs_of(14)
    ([4, 2], [8, 4, 2])
    """
    rungs = [max(1, num_trials)] if num_trials < 3 else [1]
    for first in range(2, num_trials + 1):
        sizes = [first]
        while sizes[-1] > 2:
            sizes.append((sizes[-1] + 1) // 2)
        if sum(sizes) <= num_trials and first > rungs[0]:
            rungs = sizes
    return rungs


def best_of(candidates: Iterable[Candidate], measure: Measure, num_trials: int, num_steps: int) -> Candidate | None:
    """The fastest candidate, by at most `num_trials` calls of `measure`; None: none works.

    Args:
        candidates: the most promising first; those at the end may never be measured.
        measure: (candidate, steps) -> speed; 0 where it fails, and then the next candidate takes its place.
        num_steps: of the first rung; each later one takes twice as many as the one before.
    """
    rungs = rungs_of(num_trials)
    left = num_trials - sum(rungs[1:])
    speeds: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        if len(speeds) == rungs[0] or not left:
            break
        left -= 1
        if speed := measure(candidate, num_steps):
            speeds.append((speed, candidate))
    for rung, size in enumerate(rungs[1:], start=1):
        better = sorted(speeds, key=lambda pair: -pair[0])[:size]
        measured = [(measure(candidate, num_steps * 2**rung), candidate) for _, candidate in better]
        tried = [candidate for _, candidate in better]
        # where all of them fail in the longer run, those that were not in it
        speeds = [pair for pair in measured if pair[0]] or [pair for pair in speeds if pair[1] not in tried]
    return max(speeds, key=lambda pair: pair[0])[1] if speeds else None
