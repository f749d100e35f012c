"""Processes: the group, this rank and its device; agreement between ranks; messages from rank 0; leaving.

A collective that one rank misses hangs all the others.  So whatever can fail on one rank alone runs inside `together`, and
whatever only one rank notices (a signal) is agreed with `any_rank` before anyone acts on it.
"""

import ctypes
import gc
import io
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from ds_flux import UserError, chatter, progress
from ds_flux.progress import env_rank


def env_world_size() -> int:
    """The number of processes as the launcher set it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def host_memory_bytes() -> int:
    """Of this node."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def env_local_world_size() -> int:
    """The number of processes on this node as the launcher set it: DeepSpeed's, or torch's."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or env_world_size())


def init(timeout_s: int = 1800) -> None:
    """Join the process group; without a launcher, be a group of one.

    Args:
        timeout_s: how long a collective waits for a process that does not answer.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    keep_heap_small()
    # DeepSpeed prints that its kernels are there
    with nullcontext() if chatter.is_everything_shown() else redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=chatter.is_everything_shown(), timeout=timedelta(seconds=timeout_s))
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    unname_shared_memory()


def unname_shared_memory() -> None:
    """Take away the name of the 66 MB that DeepSpeed's CPU collectives share between processes; a collective.

    All ranks have it mapped by now.  DeepSpeed never removes the file, so that every run would leave its own behind in memory.
    """
    barrier()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank()}").unlink(missing_ok=True)


def keep_heap_small(mmap_threshold_bytes: int = 16 << 20) -> None:
    """Have glibc map large buffers one by one, so that each goes back to the system when it is freed.

    By itself it raises that threshold to 32 MiB and keeps gathered weights of ever other sizes as holes in its heap, which
    then grows from step to step where weights or optimizer are on the CPU.
    """
    libc, m_mmap_threshold = ctypes.CDLL(None), -3
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(m_mmap_threshold, mmap_threshold_bytes)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shutdown() -> None:
    """Leave the process group, if there is one; all ranks together, lest one loses a peer that is not done."""
    if torch.distributed.is_initialized():
        barrier()
        torch.distributed.destroy_process_group()


def rank() -> int:
    """This process's rank in the group."""
    return comm.get_rank()


def world_size() -> int:
    """The number of processes in the group."""
    return comm.get_world_size()


def device() -> torch.device:
    """This process's device."""
    return torch.device(get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))


def log(message: str) -> None:
    """A line for the user, from rank 0, that does not tear the progress bar."""
    if env_rank() == 0:
        progress.write(f"ds-flux: {message}")


def barrier() -> None:
    """Wait for all ranks."""
    comm.barrier()


def all_reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of a small tensor over ranks."""
    values = values.to(device())
    comm.all_reduce(values)
    return values.cpu()


def all_reduce_max(values: torch.Tensor) -> torch.Tensor:
    """Largest of each element over ranks."""
    values = values.to(device())
    comm.all_reduce(values, op=comm.ReduceOp.MAX)
    return values.cpu()


def all_gather(values: torch.Tensor) -> torch.Tensor:
    """A small tensor of each rank, (ranks, ...)."""
    everyone = torch.empty(world_size() * values.numel(), dtype=values.dtype, device=device())
    comm.all_gather_into_tensor(everyone, values.flatten().to(device()))
    return everyone.view(world_size(), *values.shape).cpu()


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; a collective."""
    return bool(all_reduce_max(torch.tensor([float(flag)]))[0])


def gathered(items: list[Any]) -> list[Any]:
    """The items of all ranks, rank 0's first, on every rank; a collective."""
    everyone: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(everyone, items)
    return [item for of_rank in everyone for item in of_rank]


def free(module: Any) -> None:
    """Let go of a frozen module, in an engine or not, so that its memory goes back to the system; all ranks together."""
    if isinstance(module, deepspeed.DeepSpeedEngine):
        module.destroy()
        module = module.module
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
        if hasattr(parameter, "ds_tensor"):  # this rank's part of it, by DeepSpeed
            parameter.ds_tensor.data = torch.empty(0)
    gc.collect()
    get_accelerator().empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


@contextmanager
def together(what: str) -> Iterator[None]:
    """If the block fails on one rank, it fails on all, with the same message; a collective at its end.

    The block itself must hold no collective.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001  (re-raised below, once all ranks know)
        error = raised
    if not any_rank(error is not None):
        return
    reports: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(reports, None if error is None else (isinstance(error, UserError), str(error)))
    failed, (is_user_error, text) = next((r, report) for r, report in enumerate(reports) if report is not None)
    if is_user_error:
        raise UserError(text) from error
    raise RuntimeError(f"{what} failed on rank {failed}: {text}") from error


def on_main(function: Callable[[], Any], what: str) -> Any:
    """Rank 0 calls `function`; every rank gets its result, or its failure.  A collective."""
    result = [None]
    with together(what):
        if rank() == 0:
            result = [function()]
    torch.distributed.broadcast_object_list(result, src=0)
    return result[0]


def on_each_node_first(function: Callable[[], Any], what: str) -> Any:
    """Local rank 0 of every node calls `function` before the others do: for downloads into a cache.  A collective."""
    result = None
    for turn_of_first in (True, False):
        with together(what):
            if (os.environ["LOCAL_RANK"] == "0") == turn_of_first:
                result = function()
    return result


def has_accelerator() -> bool:
    """Whether processes compute on something else than the CPU."""
    return get_accelerator().device_name() != "cpu"


def device_name() -> str:
    """What this process's device calls itself; empty for the CPU."""
    return torch.get_device_module(device()).get_device_name() if has_accelerator() else ""


def peak_device_memory_gib() -> float:
    """Most memory allocated on this process's device so far; 0 where the device is the CPU itself."""
    return 0.0 if device().type == "cpu" else get_accelerator().max_memory_allocated() / 2**30
