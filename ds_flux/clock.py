"""Where the time of a step goes, by the device's own clock."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from deepspeed.utils.timer import SynchronizedWallClockTimer

Clocked = Callable[[str], AbstractContextManager[None]]


class Clock:
    """Adds up the time of parts by name; a part may lie in another one, but not in itself.

    On the CPU it is the process's time.  Elsewhere it is the device's, between events in the stream of the part, for which
    nobody waits before the sums are read.
    """

    def __init__(self) -> None:
        self.timers = SynchronizedWallClockTimer()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what happens inside."""
        timer = self.timers(part)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def read(self) -> dict[str, float]:
        """Seconds of each part since they were read last."""
        return {name: timer.elapsed() / 1000 for name, timer in self.timers.get_timers().items()}


def unclocked(_part: str) -> AbstractContextManager[None]:
    """Takes the place of a clock where nobody reads one."""
    return nullcontext()
