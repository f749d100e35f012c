"""What a process spends in collectives: its own part of the work, and the wait for those who come later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.comm import comm

from ds_flux.clock import Clock

PART = "communication_wait"
COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_gather",
    "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip


class Waits:
    """Counts each collective that DeepSpeed calls, and each wait for one that it has started."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.is_inside = clock, False

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted; one inside another counts once."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside:
                return call(*args, **kwargs)
            self.is_inside = True
            try:
                with self.clock(PART):
                    result = call(*args, **kwargs)
            finally:
                self.is_inside = False
            return Work(result, self.counted(result.wait)) if hasattr(result, "wait") else result

        return counting


class Work:
    """A collective that has been started, whose wait is counted."""

    def __init__(self, work: Any, wait: Callable[..., Any]) -> None:
        self.work, self.wait = work, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Inside, `clock` counts collectives as `communication_wait`.

    On an accelerator it is the time of the stream that a collective was called in or waited for, a part of which other
    streams may have used to compute.
    """
    waits, backend = Waits(clock), comm.cdb
    for name in COLLECTIVES:
        setattr(backend, name, waits.counted(getattr(backend, name)))
    try:
        yield
    finally:
        for name in COLLECTIVES:
            delattr(backend, name)  # what the class has comes back
