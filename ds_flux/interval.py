"""The figures of a line: what has happened on all ranks since the last one."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_flux import runtime
from ds_flux.clock import Clock
from ds_flux.metrics import LossSums, peak_host_memory_gib

PARTS = (
    "data_wait", "text_engine", "autoencoder", "forward", "backward", "optimizer", "communication_wait", "saving",
    "validation",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One optimizer step, the same on every rank."""

    sums: Tensor
    """LossSums of all ranks"""
    lr: float
    grad_norm: float
    is_taken: bool

    @property
    def loss(self) -> float:
        """Mean over the samples."""
        return (self.sums[0] / self.sums[1]).item()


class Interval:
    """Adds up steps, and makes a line of them.

    Args:
        clock: what counts the parts of a step.
        peak_tflops: that a process can compute at most, in 1e12 operations a second; None: not known.
    """

    def __init__(self, clock: Clock, peak_tflops: float | None) -> None:
        self.clock, self.peak_tflops = clock, peak_tflops
        self.steps: list[Step] = []
        self.times: Counter[str] = Counter()
        self.began_s = time.perf_counter()

    def add(self, step: Step) -> None:
        """Count a step that has just been."""
        self.steps.append(step)
        self.times.update(self.clock.read())

    def set_validation_apart(self) -> None:
        """Count what has been since the step as validation, and its collectives not as the steps'."""
        self.times["validation"] += self.clock.read()["validation"]

    def figures(self) -> dict[str, Any]:
        """The line, and begin anew.  A collective.

        Losses and gradient norm are means over the steps that were taken; where none was, those of the last one.  Times are
        seconds per step, means over the ranks; `communication_wait` lies in the others.  Speeds are without validation.
        """
        steps = [step for step in self.steps if step.is_taken] or self.steps[-1:]
        sums = torch.stack([step.sums.double() for step in steps]).sum(0)
        self.times.update(self.clock.read())
        mine = [*(self.times[part] for part in PARTS), peak_host_memory_gib(), runtime.peak_device_memory_gib()]
        table = runtime.all_gather(torch.tensor(mine))
        ended_s, num_steps = time.perf_counter(), len(self.steps)
        times = dict(zip(PARTS, (table.mean(0)[: len(PARTS)] / num_steps).tolist()))
        step_s = (ended_s - self.began_s) / num_steps - times["validation"]
        num_skipped = sum(not step.is_taken for step in self.steps)
        self.steps, self.times, self.began_s = [], Counter(), ended_s
        return {
            **LossSums.figures(sums),
            "lr": steps[-1].lr,
            "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
            "skipped": num_skipped,
            **self.speeds(sums / len(steps) / step_s),
            **{f"time_s/{part}": seconds for part, seconds in {"step": step_s, **times}.items() if seconds},
            **peaks("host", table[:, -2]),
            **(peaks("device", table[:, -1]) if runtime.has_accelerator() else {"peak_device_memory_gib": 0.0}),
        }

    def speeds(self, per_s: Tensor) -> dict[str, float]:
        """Of all processes together, but for what the model itself computes, which is of each.

        Args:
            per_s: LossSums of a second.
        """
        _, images, tokens, tflops = per_s[:4].tolist()
        each = tflops / runtime.world_size()
        used = {} if self.peak_tflops is None else {"mfu": each / self.peak_tflops}
        return {"images_per_s": images, "tokens_per_s": tokens, "model_tflops_per_s": each, **used}


def peaks(where: str, of_ranks: Tensor) -> dict[str, float]:
    """The highest, and the first rank that has it."""
    return {f"peak_{where}_memory_gib": of_ranks.max().item(), f"peak_{where}_memory_rank": of_ranks.argmax().item()}
