"""A rank that fails alone, or answers no longer: what the others say and do, so that nobody waits for ever.

A failing rank ends its process at once, and the launcher ends the others.  Where it cannot (a process that is stopped, another
node), the collectives of the others time out; which rank it is that does not answer, they tell by its heartbeat.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from ds_flux import runtime

BEAT_S = 1.0
NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory")
NO_ANSWER = ("gloo", "NCCL", "Timed out", "timed out", "Connection", "monitoredBarrier", "store")


class LoneError(Exception):
    """What one rank alone has to say before it ends; one line."""


class Heart:
    """Tells the others twice a second that this process is alive; `silent` tells which of them are not."""

    def __init__(self) -> None:
        self.store = connected()
        self.stops = threading.Event()
        threading.Thread(target=self.beat, args=(connected(),), daemon=True).start()

    def beat(self, store: TCPStore) -> None:
        """Until `stop`, or until rank 0, which keeps the store, is gone."""
        number = 0
        try:
            while not self.stops.wait(BEAT_S / 2):
                number += 1
                store.set(f"beat {runtime.rank()}", str(number))
        except RuntimeError:
            return

    def silent(self) -> list[int]:
        """Ranks without a beat for a few seconds; [0] where the store does not answer."""
        try:
            before = self.beats()
            time.sleep(3 * BEAT_S)
            after = self.beats()
        except RuntimeError:
            return [0]
        return [rank for rank, (one, other) in enumerate(zip(before, after)) if one == other]

    def beats(self) -> list[bytes | None]:
        """The last beat of each rank."""
        names = [f"beat {rank}" for rank in range(runtime.world_size())]
        return [self.store.get(name) if self.store.check([name]) else None for name in names]

    def stop(self) -> None:
        """No more beats."""
        self.stops.set()


def connected() -> TCPStore:
    """A connection of its own to the store that the process group was made with."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))


def explained(error: Exception, heart: Heart, timeout_s: int, advice: Callable[[], str]) -> Exception:
    """What the user can be told of an error that came to this rank; the error itself where there is nothing to add.

    Args:
        advice: what to do where memory was too small.
    """
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in text for words in NO_MEMORY):
        return LoneError(
            f"rank {runtime.rank()} ran out of memory ({text[:200]}): {advice()}; `ds-flux plan` shows what others take"
        )
    if isinstance(error, RuntimeError) and any(words in text for words in NO_ANSWER):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, which gives us half a minute: enough to say this
        silent = heart.silent()
        if silent:
            ranks = ", ".join(map(str, silent))
            return LoneError(
                f"rank {ranks} of {runtime.world_size()} does not answer any more: killed, stopped or cut off (collectives "
                f"wait --timeout_s {timeout_s}); go on from the last checkpoint with --resume_from_checkpoint latest"
            )
    return error
