"""Samples that cannot be used: named once, counted by all ranks together, and bounded."""

import json
from dataclasses import dataclass
from pathlib import Path

from ds_flux import UserError, runtime
from ds_flux.config import DataConfig

NUM_NAMED = 5  # in the log; all are in the file
MIN_SEEN = 1000  # samples of a stream, before a share of them means anything


@dataclass(frozen=True)
class Bad:
    """A sample that cannot be used, and why."""

    sample: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} cannot be used: {self.reason}"


class SkippedSamples:
    """What was left out so far, the same on every rank; rank 0 keeps it in a file, one JSON line for each.

    Making one is a collective.

    Args:
        path: skipped.jsonl in the run's folder.
        num_samples: in the data; None for a stream.
        goes_on: the run was resumed: what its earlier part left out is in the file.
    """

    def __init__(self, path: Path, num_samples: int | None, config: DataConfig, goes_on: bool):
        self.path, self.num_samples, self.config = path, num_samples, config
        lines = runtime.on_main(lambda: path.read_text().splitlines() if goes_on and path.exists() else [], f"reading {path}")
        self.reasons = {row["sample"]: row["reason"] for row in map(json.loads, lines)}

    def agree(self, here: list[Bad], num_seen: int) -> None:
        """Count what each rank met in a step that had any.  A collective.

        Args:
            num_seen: samples that the run has seen: it is of these that a share of a stream may be left out.

        Raises:
            UserError: more than --max_bad_fraction of the data, or any at all with --on_bad_sample error.
        """
        new = {bad.sample: bad for bad in runtime.gathered(here) if bad.sample not in self.reasons}
        for bad in new.values():
            if self.config.on_bad_sample == "error":
                raise UserError(f"{bad}; --on_bad_sample skip goes on without it")
            self.reasons[bad.sample] = bad.reason
            if len(self.reasons) <= NUM_NAMED:
                runtime.log(f"{bad}; it is left out (--on_bad_sample skip) and listed in {self.path.name}")
        if not new:
            return
        runtime.on_main(lambda: self.write(list(new.values())), f"writing {self.path.name}")
        last = list(new.values())[-1]
        num_samples = self.num_samples or max(num_seen, MIN_SEEN)
        if len(self.reasons) > self.config.max_bad_fraction * num_samples:
            raise UserError(
                f"{len(self.reasons)} of {num_samples} samples cannot be used, more than --max_bad_fraction "
                f"{self.config.max_bad_fraction} (the last: {last}); see {self.path}"
            )

    def write(self, bad: list[Bad]) -> None:
        """Add lines; a new run begins the file anew."""
        try:
            with self.path.open("w" if len(bad) == len(self.reasons) else "a") as file:
                file.writelines(json.dumps(vars(one)) + "\n" for one in bad)
        except OSError as error:  # a full disk does not end the run
            runtime.log(f"{self.path} cannot be written: {error.strerror}; it lacks {', '.join(one.name for one in bad)}")
