"""What the figures of a run cost: the share of a step's CPU time that goes into clocks, sums, lines and TensorBoard.

    python -m tests.benchmarks.figures [--steps 12] [--folder out/benchmarks]

Two gloo ranks of one thread, 160 million weights, bf16, ZeRO-3, a line after every step, as `ds-flux train` has it by itself.
Everything that makes figures is clocked from outside, in a real run; of the clocks, which are inside everything else, the
number of uses is counted and one use timed by itself.  The first step, in which FLOPs are measured, is told apart.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import assets
from tests.distributed import launch


class Costs:
    """CPU seconds and clocks used since the last step ended."""

    def __init__(self) -> None:
        self.spent_s, self.num_clocks = 0.0, 0
        self.began_s = time.process_time()
        self.steps: list[dict[str, float]] = []

    def of(self, owner: Any, name: str) -> None:
        """Count a method's time."""
        call: Callable[..., Any] = vars(owner)[name]

        def costing(*args: Any, **kwargs: Any) -> Any:
            began_s = time.process_time()
            result = call(*args, **kwargs)
            self.spent_s += time.process_time() - began_s
            return result

        setattr(owner, name, costing)

    def end_step(self) -> None:
        """Keep what a step took."""
        now_s = time.process_time()
        self.steps.append({"step_s": now_s - self.began_s, "spent_s": self.spent_s, "num_clocks": self.num_clocks})
        self.spent_s, self.num_clocks, self.began_s = 0.0, 0, now_s


def seconds_of_clock(num: int = 20_000) -> float:
    """CPU time of one use of a clock."""
    from ds_flux.clock import Clock

    clock = Clock()
    began_s = time.process_time()
    for _ in range(num):
        with clock("part"):
            pass
    return (time.process_time() - began_s) / num


def rank(folder: str, num_steps: int, out: str) -> None:
    """One rank of the run."""
    from ds_flux import commands, config, runtime, trainer
    from ds_flux.clock import Clock
    from ds_flux.flops import ModelFlops
    from ds_flux.interval import Interval
    from ds_flux.metrics import LossSums, MetricsWriter

    one_clock_s, costs = seconds_of_clock(), Costs()
    for owner, name in (
        (LossSums, "add"), (ModelFlops, "of"), (Interval, "add"), (Interval, "figures"), (MetricsWriter, "advance"),
        (MetricsWriter, "write"),
    ):  # fmt: skip
        costs.of(owner, name)
    use, write = Clock.__call__, MetricsWriter.write

    def counted_use(self: Clock, part: str) -> Any:
        costs.num_clocks += 1
        return use(self, part)

    def last_of_a_step(*args: Any) -> None:
        write(*args)
        costs.end_step()

    Clock.__call__, MetricsWriter.write = counted_use, last_of_a_step  # type: ignore[method-assign]
    argv = [*assets.flags(Path(folder), Path(f"{out}-run"), num_steps), "--save_nothing=true"]
    trainer.train(config.load(argv, "benchmark", commands.TrainCommand)[0])
    Path(f"{out}-{runtime.rank()}.json").write_text(json.dumps({"steps": costs.steps, "one_clock_s": one_clock_s}))


def main() -> None:
    """Print the share of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    assets.write(folder)
    out = folder / f"figures-{time.time_ns()}"
    done = launch(2, "tests.benchmarks.figures", "rank", str(folder), str(options.steps), str(out), timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(2):
        found = json.loads(Path(f"{out}-{number}.json").read_text())
        first, *steps = found["steps"]
        spent_s, step_s, num_clocks = (sum(step[key] for step in steps) for key in ("spent_s", "step_s", "num_clocks"))
        clocks_s = num_clocks * found["one_clock_s"]
        print(
            f"rank {number}: {step_s / len(steps):.2f} s of CPU time in a step; figures "
            f"{100 * (spent_s + clocks_s) / step_s:.2f} %, of which {num_clocks / len(steps):.0f} clocks of "
            f"{1e6 * found['one_clock_s']:.1f} us {100 * clocks_s / step_s:.2f} %; once {first['spent_s']:.2f} s"
        )


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if words[:1] == ["rank"]:
        rank(words[1], int(words[2]), words[3])
    else:
        main()
