"""How far something is that takes long: a bar on a terminal, whole lines in a log, and nothing on ranks above 0."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

LINE_EVERY_S = 10.0
WORTH_A_LINE_S = 1.0  # what is done sooner is not worth one


class Bar(tqdm):
    """tqdm's, in our words."""

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's facts, and the words that its line consists of; once closed the rate is that of the whole."""
        facts = super().format_dict
        done, total, elapsed_s = facts["n"] - facts["initial"], facts["total"], facts["elapsed"]
        rate = None if self.disable else facts["rate"]
        rate = rate or (done / elapsed_s if elapsed_s else 0.0)
        words = {"amount": self.amount(facts["n"], total), "speed": self.speed(rate), "left": f"in {interval(elapsed_s)}"}
        if not self.disable and total:
            words["left"] = f"{interval((total - facts['n']) / rate)} left" if rate else "? left"
        return {**facts, **words, "bar_format": self.shape(total)}

    def shape(self, total: float | None) -> str:
        """What stands where."""
        share = "{percentage:3.0f}%|{bar}| " if total else ""
        return f"{{desc}}: {share}{{amount}}, {{speed}}, {{left}}{{postfix}}"

    def amount(self, done: float, total: float | None) -> str:
        """12/60 steps"""
        numbers = [done] if total is None else [done, total]
        if self.unit_scale:
            return "/".join(tqdm.format_sizeof(number, divisor=self.unit_divisor) for number in numbers) + self.unit
        return f"{'/'.join(map(str, numbers))} {self.unit}s"

    def speed(self, rate: float) -> str:
        """3.1 steps/s, or 2.5 s/step"""
        if self.unit_scale:
            return f"{tqdm.format_sizeof(rate, divisor=self.unit_divisor)}{self.unit}/s"
        return f"{rate:.3g} {self.unit}s/s" if rate >= 1 or not rate else f"{1 / rate:.3g} s/{self.unit}"


class Lines(Bar):
    """A line every ten seconds, for logs: tqdm's own place for other displays (`gui`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, gui=True, mininterval=LINE_EVERY_S, miniters=1)
        self.next_line_s = time.monotonic() + LINE_EVERY_S

    def __iter__(self) -> Iterator[Any]:
        """Count one by one, where tqdm counts when it draws: a line that somebody else causes says the number of now."""
        with self:
            for item in self.iterable:
                yield item
                self.update()

    @property
    def format_dict(self) -> dict[str, Any]:
        """As of a bar; a line is as long as it is."""
        return {**super().format_dict, "ncols": None}

    def shape(self, total: float | None) -> str:
        """What stands where."""
        share = "{percentage:.0f} %, " if total else ""
        return f"{{desc}}: {{amount}}, {share}{{speed}}, {{left}}{{postfix}}"

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Called whenever there is news: write a line if the last one is old enough."""
        if time.monotonic() >= self.next_line_s:
            self.next_line_s = time.monotonic() + LINE_EVERY_S
            self.write_line()

    def write_line(self) -> None:
        """At once, and whole, as others write into the same log."""
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Nothing stands in the way of a message."""

    def close(self) -> None:
        """A last line, unless it was soon over; of a bar inside another only where it had lines before."""
        is_open = not self.disable
        super().close()
        worth_s = WORTH_A_LINE_S if self.leave else LINE_EVERY_S
        if is_open and self._time() - self.start_t >= worth_s:
            self.write_line()


def bar(
    iterable: Iterable[Any] | None = None, *, desc: str, unit: str, disable: bool = False, leave: bool = True, **more: Any
) -> Bar:
    """A bar that is used as tqdm's is: iterate over it, or `update` it in a `with` block.

    Args:
        unit: in the singular, as in `step`; with `unit_scale` as it stands behind a number, as in `B`.
        leave: whether the bar stays when it is full; not where it is inside another.
        more: of tqdm's own: total, initial, unit_scale, ...
    """
    kind = Bar if is_on_terminal() else Lines
    # where it is not disabled here, tqdm's variable TQDM_DISABLE decides
    quiet = {"disable": True} if disable or env_rank() > 0 else {}
    return kind(iterable, **{"desc": desc, "unit": unit, "leave": leave, "dynamic_ncols": True, **quiet, **more})


def env_rank() -> int:
    """This process's rank as the launcher set it; known before the group is."""
    return int(os.environ.get("RANK", 0))


def is_on_terminal() -> bool:
    """Whether stderr is a terminal on which a bar can be drawn: one that knows how wide it is."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


def write(message: str) -> None:
    """A line on stderr that tears no bar."""
    tqdm.write(message, file=sys.stderr)


def interval(seconds: float) -> str:
    """4:05"""
    return tqdm.format_interval(seconds).removeprefix("0")
