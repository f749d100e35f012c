"""What a run shows of itself: progress bar, TensorBoard, and the same figures as JSON lines."""

import json
import math
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from ds_flux import progress
from ds_flux.mlperf import MlperfLog

NUM_SIGMA_BINS = 8
NUM_TOTALS = 4  # loss, images, tokens, 1e12 floating-point operations


class LossSums:
    """What one optimizer step was, summed over its micro steps; one vector, so one all-reduce makes it global."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(NUM_TOTALS + 2 * NUM_SIGMA_BINS, device=device)

    def add(self, loss: Tensor, sigma: Tensor, weights: Tensor, num_tokens: int = 0, num_flops: int = 0) -> None:
        """Count the per-sample losses (B,) of one micro step at their sigma (B,); stays on the device, so nobody waits.

        Args:
            weights: (B,), 0 for a sample that does not count, else 1.
            num_tokens: of all samples together.
            num_flops: of all samples together.
        """
        loss = loss.detach().float() * weights
        bins = (sigma * NUM_SIGMA_BINS).long().clamp(max=NUM_SIGMA_BINS - 1)
        self.sums[0] += loss.sum()
        self.sums[1] += weights.sum()
        self.sums[2] += num_tokens
        self.sums[3] += num_flops / 1e12
        self.sums[NUM_TOTALS : NUM_TOTALS + NUM_SIGMA_BINS].index_add_(0, bins, loss)
        self.sums[NUM_TOTALS + NUM_SIGMA_BINS :].index_add_(0, bins, weights)

    @staticmethod
    def figures(sums: Tensor) -> dict[str, float]:
        """{name: value} of sums that were added over all ranks, and perhaps steps: the loss, and that of each sigma bin."""
        totals, counts = (part.tolist() for part in sums[NUM_TOTALS:].chunk(2))
        by_bin = {
            f"loss_by_sigma/{i / NUM_SIGMA_BINS:.3f}": total / count
            for i, (total, count) in enumerate(zip(totals, counts))
            if count
        }
        return {"loss": (sums[0] / sums[1]).item(), "num_images": round(sums[1].item()), **by_bin}


def peak_host_memory_gib() -> float:
    """Peak resident memory of this process, by the operating system's count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def host_memory_gib() -> float:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


class Monitor(Protocol):
    """Where figures go as well: one of DeepSpeed's monitors, or several."""

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """(name, value, step) of each figure."""


class MetricsWriter:
    """Rank 0's outlets; on other ranks every call does nothing."""

    def __init__(
        self,
        output_dir: Path,
        first_step: int,
        last_step: int,
        active: bool,
        mlperf: MlperfLog,
        monitor: Monitor | None = None,
    ) -> None:
        self.active, self.mlperf, self.monitor = active, mlperf, monitor
        self.trouble: str | None = None
        if not active:
            return
        logs = output_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        keep_lines_before(logs / "metrics.jsonl", first_step)
        self.lines = (logs / "metrics.jsonl").open("a")
        self.board = SummaryWriter(logs, purge_step=first_step + 1 if first_step else None)
        self.bar = progress.bar(total=last_step, initial=first_step, desc="train", unit="step")

    def advance(self, loss: float, num_images: float) -> None:
        """Move the bar by a step."""
        if self.active:
            rate = self.bar.format_dict["rate"] or 0.0
            self.bar.set_postfix({"loss": f"{loss:.4f}", "images/s": f"{rate * num_images:.3g}"}, refresh=False)
            self.bar.update()

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Record figures after a step, null for what is not finite.

        A disk that is full does not end the run: what is lost is said once.
        """
        if not self.active:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        numbers = {name: value for name, value in finite.items() if value is not None}
        try:
            if "validation_loss" in figures:
                self.mlperf.evaluated(step, figures["validation_loss"])
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
            self.lines.write(json.dumps({"step": step, **finite}) + "\n")
            self.lines.flush()
            if self.monitor:
                self.monitor.write_events([(name, value, step) for name, value in numbers.items()])
        except OSError as error:
            if self.trouble is None:
                progress.write(f"ds-flux: the figures cannot be written: {error.strerror}; training goes on")
            self.trouble = str(error)

    def show(self, step: int, name: str, image: np.ndarray) -> None:
        """An image (height, width, 3) in TensorBoard."""
        if self.active:
            with suppress(OSError):
                self.board.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close."""
        if self.active:
            self.bar.close()
            with suppress(OSError):
                self.board.close()
            with suppress(OSError):
                self.lines.close()


def keep_lines_before(path: Path, first_step: int) -> None:
    """Drop the lines of steps that a resumed run will do again (and all of them when it starts anew)."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= first_step]
        path.write_text("".join(kept))
