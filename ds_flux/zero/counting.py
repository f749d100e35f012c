"""DeepSpeed's flops profiler and communication log, for one step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.comm import comm
from deepspeed.profiling.flops_profiler import profiler
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModuleRow:
    """Modules of one class in the forward pass of a micro step on this rank."""

    depth: int
    """1: directly in the transformer, or in a list there"""
    name: str
    number: int
    num_flops: int
    seconds: float


@dataclass(frozen=True)
class CollectiveRow:
    """Calls of a collective with messages of one size in a step on this rank."""

    name: str
    message_bytes: int
    number: int
    milliseconds: float
    """all of them; of one that only starts there, the time to start it"""


@dataclass
class Counted:
    """What was found, once the step is over."""

    modules: list[ModuleRow]
    collectives: list[CollectiveRow]


@contextmanager
def counting(module: nn.Module) -> Iterator[Counted]:
    """Count what happens inside: the first forward pass of `module`, and all collectives.  Slows both down.

    Only the first pass: gradient checkpointing would count its blocks again.
    """
    found, flops = Counted([], []), profiler.FlopsProfiler(module)
    flops.start_profile()
    F.scaled_dot_product_attention = by_position(F.scaled_dot_product_attention)
    stop = module.register_forward_hook(lambda *_: flops.stop_profile())
    comm.comms_logger.reset_data()
    comm.configure(enabled=True, prof_all=True, verbose=False, debug=False)
    try:
        yield found
        found.modules += modules_of(module)
        found.collectives += collectives_of(comm.comms_logger.get_raw_data())
    finally:
        comm.configure(enabled=False, prof_all=False)
        stop.remove()
        flops.end_profile()


def by_position(attention: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's count of attention knows its arguments by their places alone; diffusers names them."""

    def call(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return attention(query, key, value, **kwargs)

    call.__str__ = attention.__str__  # by which DeepSpeed finds what to put back
    return call


def modules_of(module: nn.Module) -> list[ModuleRow]:
    """By depth and class, those that compute most first."""
    rows: dict[tuple[int, str], list[Any]] = {}
    for name, child in module.named_modules():
        depth = sum(not part.isdigit() for part in name.split(".")) if name else 0
        if depth > 2 or isinstance(child, nn.ModuleList):
            continue
        row = rows.setdefault((depth, type(child).__name__), [0, 0, 0.0])
        row[0] += 1
        row[1] += profiler.get_module_flops(child)
        row[2] += profiler.get_module_duration(child)
    found = [ModuleRow(depth, name, *row) for (depth, name), row in rows.items()]
    return sorted(found, key=lambda row: (row.depth, -row.num_flops))


def collectives_of(logged: dict[str, dict[int, list[Any]]]) -> list[CollectiveRow]:
    """From DeepSpeed's log; those that take longest first."""
    rows = [
        CollectiveRow(name, size, values[0], sum(values[1]))
        for name, by_size in logged.items()
        for size, values in by_size.items()
    ]
    return sorted(rows, key=lambda row: -row.milliseconds)
