"""A run's events as MLPerf's log has them: one line each, ":::MLLOG" and a JSON object (mlcommons/logging, README)."""

import json
import time
from pathlib import Path
from typing import Any

PREFIX = ":::MLLOG "


class MlperfLog:
    """Rank 0's; without a path every call does nothing."""

    def __init__(self, path: str | None, global_batch_size: int):
        self.path, self.global_batch_size = Path(path) if path else None, global_batch_size

    def start(self, **settings: Any) -> None:
        """The run begins: what it is, then the start of its clock."""
        for key, value in {"global_batch_size": self.global_batch_size, **settings}.items():
            self.event("POINT_IN_TIME", key, value)
        self.event("INTERVAL_START", "run_start", None)

    def evaluated(self, step: int, loss: float) -> None:
        """A validation loss, after a step of training."""
        self.event("POINT_IN_TIME", "eval_accuracy", loss, samples_count=step * self.global_batch_size)

    def stop(self, is_reached: bool) -> None:
        """The run ends."""
        self.event("INTERVAL_END", "run_stop", None, status="success" if is_reached else "aborted")

    def event(self, kind: str, key: str, value: Any, **metadata: Any) -> None:
        """One line."""
        if self.path is None:
            return
        entry = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": kind, "key": key, "value": value}
        with self.path.open("a") as file:
            file.write(PREFIX + json.dumps({**entry, "metadata": metadata}) + "\n")
