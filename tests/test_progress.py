"""What shows how far something is: on a terminal, in a log, on other ranks; and that nobody else speaks in between."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from ds_flux import progress
from tests.distributed import ROOT

WORK = """
import time
from ds_flux import progress
progress.LINE_EVERY_S = 0.5
with progress.bar(total=30, initial=10, desc="train", unit="step") as bar:
    for step in range(20):
        time.sleep(0.06)
        bar.set_postfix(loss=f"{1 / (step + 1):.4f}")
        bar.update()
        if step == 12:
            progress.write("ds-flux: a message")
            for _ in progress.bar(range(3), desc="inside", unit="step", leave=False):
                pass
for _ in progress.bar(range(3), desc="short", unit="image"):
    pass
with progress.bar(total=3 << 30, desc="copy", unit="B", unit_scale=True, unit_divisor=1024) as bar:
    for _ in range(3):
        time.sleep(0.4)
        bar.update(1 << 30)
"""
PLAIN = re.compile(
    r"[a-z ]+: [\d.]+[kMG]?(/[\d.]+[kMG]?)?( ?[a-zA-Z]+)?, (\d+ %, )?[\d.]+ ?[\w/]+, (\d+:\d\d left|in \d+:\d\d|\? left)(, .+)?"
)


def variables(rank: int) -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    return {**here, "PYTHONPATH": str(ROOT), "RANK": str(rank)}


def check_nobody_else_speaks(said: str) -> None:
    """In what the ranks of a run have said on stderr there are our messages and lines of progress, and nothing else."""
    lines = said.splitlines()
    others = [line for line in lines if not line.startswith("ds-flux: ") and not PLAIN.fullmatch(line)]
    assert lines and not others, others


def test_whole_lines_in_a_log() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], env=variables(0), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "\r" not in done.stderr
    check_nobody_else_speaks(done.stderr)
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("ds-flux")] == ["ds-flux: a message"]
    assert not [line for line in lines if line.startswith(("short", "inside"))], "what is soon over is not worth a line"
    trained = [line for line in lines if line.startswith("train")]
    assert 2 <= len(trained) <= 4, "one every half second, and the last, however often there is news"
    assert re.fullmatch(r"train: \d\d/30 steps, \d\d %, \d+\.?\d* steps/s, 0:0\d left, loss=0\.\d{4}", trained[0])
    assert re.fullmatch(r"train: 30/30 steps, 100 %, \d+\.?\d* steps/s, in 0:0\d, loss=0\.0500", trained[-1])
    assert re.fullmatch(r"copy: 3\.00G/3\.00GB, 100 %, [\d.]+GB/s, in 0:01", lines[-1])


def on_terminal(columns: int) -> str:
    """What the work shows on a terminal of so many columns."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execve(sys.executable, [sys.executable, "-c", WORK], variables(0))
    shown = b""
    try:
        while read := os.read(terminal, 4096):
            shown += read
    except OSError:  # as Linux says that the other end is closed
        pass
    assert os.waitpid(child, 0)[1] == 0, shown
    return shown.decode()


def test_a_bar_on_a_terminal() -> None:
    shown = on_terminal(90)
    drawn = [line.strip() for line in re.split(r"[\r\n]|\x1b\[A", shown)]
    assert "ds-flux: a message" in drawn, "a line of its own"
    shape = r"train:  \d\d%\|\S* *\| \d\d/30 steps, [\d.]+ steps/s, 0:0\d left, loss=[\d.]+"
    assert any(re.fullmatch(shape, one) for one in drawn)
    assert any(re.fullmatch(r"train: 100%\|█+\| 30/30 steps, [\d.]+ steps/s, in 0:0\d, loss=0\.0500", one) for one in drawn)
    assert max(map(len, drawn)) < 90
    assert re.search(r"inside.+\r? {80,}", shown.replace("\n", "")), "a bar inside another one is wiped out"


def test_plain_lines_on_a_terminal_that_knows_no_width() -> None:
    check_nobody_else_speaks(on_terminal(0))


def test_other_ranks_are_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", WORK.replace("progress.write", "str")], env=variables(1), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("rate, words", [(0.25, "4 s/step"), (2.5, "2.5 steps/s"), (0.0, "0 steps/s")])
def test_slow_things_are_told_in_seconds(rate: float, words: str) -> None:
    with progress.Bar(total=1, unit="step", file=io.StringIO(), disable=False) as bar:
        assert bar.speed(rate) == words
