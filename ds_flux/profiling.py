"""--profile: a trace of chosen steps by torch's profiler, and one page with what is worth knowing of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.profiler import profile, record_function

from ds_flux import UserError, runtime
from ds_flux.manifest import write_atomically
from ds_flux.zero.counting import CollectiveRow, Counted, ModuleRow, counting

NUM_OPERATORS = 25


class Profiler:
    """Looks into the steps of a run that are asked for; of the others it sees nothing.

    In the step after them modules and collectives are counted, which would slow down what a trace shows.

    Args:
        steps: the first and the last, counted from 1; None: none.
        folder: for a trace of each rank and the page.
        counts_modules: whether modules can be counted: not where they are compiled.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, module: nn.Module, counts_modules: bool) -> None:
        self.first, self.last = steps or (0, 0)
        self.folder, self.module, self.counts_modules = folder, module, counts_modules
        self.trace: profile | None = None
        self.operators = ""

    @contextmanager
    def looking(self, step: int) -> Iterator[None]:
        """Around a step."""
        if self.first <= step <= self.last:
            with self.tracing(step):
                yield
        elif self.operators and step == self.last + 1 and self.counts_modules:
            with counting(self.module) as counted:
                yield
            self.write(counted)
        else:
            yield

    @contextmanager
    def tracing(self, step: int) -> Iterator[None]:
        """A step of the trace; the page is begun after the last."""
        if self.trace is None:
            self.trace = profile()
            self.trace.start()
        with record_function(f"step {step}"):
            yield
        if step == self.last:
            self.trace.stop()
            with runtime.together("writing the trace"):
                self.export()
            self.write(None)

    def export(self) -> None:
        """Write this rank's trace."""
        assert self.trace
        averages = self.trace.key_averages()
        where = "self_device_time_total" if runtime.has_accelerator() else "self_cpu_time_total"
        self.operators = averages.table(sort_by=where, row_limit=NUM_OPERATORS, max_name_column_width=60)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.trace.export_chrome_trace(str(self.folder / f"rank-{runtime.rank()}.json.gz"))
        except OSError as error:
            raise UserError(f"the trace cannot be written: {self.folder}: {error.strerror}") from None
        self.trace = None

    def write(self, counted: Counted | None) -> None:
        """Rank 0 writes the page.  A collective."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        page = [
            f"# Profile of {steps}, rank 0 of {runtime.world_size()}",
            "Traces of every rank: `rank-*.json.gz` (for https://ui.perfetto.dev or chrome://tracing).",
            f"## Operators\n\n```\n{self.operators}```",
            *(of_counted(counted, self.last + 1) if counted else [self.why_not_counted()]),
        ]
        runtime.on_main(lambda: write_atomically(self.folder / "profile.md", "\n\n".join(page) + "\n"), "writing the profile")
        if counted or not self.counts_modules:
            runtime.log(f"profile of {steps}: {self.folder / 'profile.md'}")

    def why_not_counted(self) -> str:
        """In the page's words."""
        if not self.counts_modules:
            return "Modules and collectives were not counted: the blocks are compiled."
        return "Modules and collectives were not counted: no step followed."


def of_counted(counted: Counted, step: int) -> list[str]:
    """Sections of the page."""
    modules, collectives = map(module_line, counted.modules), map(collective_line, counted.collectives)
    return [
        f"## Modules, in the first forward pass of step {step} (DeepSpeed's flops profiler)",
        table("depth | class | number | FLOPs | seconds", modules),
        f"## Collectives of step {step} (DeepSpeed's communication log)",
        table("collective | message | calls | milliseconds | GB/s", collectives),
        "Milliseconds are of the calls: one that only starts a collective takes no longer than that.  What was waited for is "
        "`time_s/communication_wait` in the run's figures.",
    ]


def module_line(row: ModuleRow) -> str:
    """Of the table."""
    return f"{row.depth} | {row.name} | {row.number} | {row.num_flops:.3e} | {row.seconds:.4f}"


def collective_line(row: CollectiveRow) -> str:
    """Of the table."""
    speed = row.number * row.message_bytes / row.milliseconds / 1e6 if row.milliseconds else 0.0
    return f"{row.name} | {row.message_bytes:,} bytes | {row.number} | {row.milliseconds:.2f} | {speed:.3g}"


def table(head: str, lines: Iterator[str]) -> str:
    """In Markdown."""
    return "\n".join([f"| {head} |", "|" + " --- |" * (head.count("|") + 1), *(f"| {line} |" for line in lines)])
