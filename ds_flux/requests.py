"""What is asked of a run from outside: by a signal, or by a file in its folder.  All ranks answer together."""

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_flux import runtime

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what schedulers send before they kill
FILES = ("save", "stop")


@dataclass(frozen=True)
class Request:
    """To write a checkpoint, and perhaps to end."""

    reason: str
    stops: bool


class Requests:
    """Inside `with`, signals are remembered, so that a step can be finished and a checkpoint written.

    A second SIGINT ends the process at once.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.number = 0

    def __enter__(self) -> "Requests":
        self.before = {number: signal.signal(number, self.remember) for number in SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, _frame: Any) -> None:
        """A signal has come."""
        if number == self.number == signal.SIGINT:
            os._exit(128 + number)
        self.number = self.number or number  # the launcher follows Ctrl-C up with SIGTERM

    def agreed(self) -> Request | None:
        """What any rank was asked for; a file counts once.  A collective."""
        found = [runtime.rank() == 0 and (self.folder / name).exists() for name in FILES]
        number, *are_there = runtime.all_reduce_max(torch.tensor([float(self.number), *map(float, found)])).tolist()
        files = [name for name, is_there in zip(FILES, are_there) if is_there]
        if files:
            runtime.on_main(lambda: [(self.folder / name).unlink(missing_ok=True) for name in files], "removing the request")
        if number:
            return Request(signal.Signals(int(number)).name, stops=True)
        return Request(f"the file {files[-1]}", stops="stop" in files) if files else None


def command_to_go_on() -> str:
    """The command line of this run, as one that resumes it."""
    kept, skips = [], False
    for argument in sys.argv[1:]:
        is_ours = argument.startswith(("--local_rank", "--resume_from_checkpoint"))
        if not is_ours and not skips:
            kept.append(argument)
        skips = argument == "--resume_from_checkpoint"  # its value comes next
    start = "deepspeed [...] --module ds_flux" if runtime.world_size() > 1 else "ds-flux"
    return f"{start} {shlex.join(kept)} --resume_from_checkpoint latest"
