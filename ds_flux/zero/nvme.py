"""An optimizer on NVMe (ZeRO-Infinity): its weights and moments in memory one group at a time, for saving and resuming.

DeepSpeed's own checkpoint of it holds the swap files as they are, which no consolidation reads, and does not bring the
weights back.  Here a rank's file is the same as of an optimizer in memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_flux.zero import files

MOMENTS = ("exp_avg", "exp_avg_sq")


@contextmanager
def at_hand(optimizer: Any, group: int) -> Iterator[Tensor]:
    """The fp32 weights of a group, in memory inside the block, as their moments are; changes to them go back to the disk."""
    is_swapped = optimizer._swappable_optimizer_subgroup(group)
    if is_swapped:
        optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield optimizer.fp32_partitioned_groups_flat[group]
    finally:
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_out(group)


def brought_back(optimizer: Any, content: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed would write of an optimizer, with copies of what is on NVMe; they lie in files there, without a name."""
    folder = Path(optimizer.optimizer_swapper.swap_folder)
    masters, states = [], {}
    for group in range(len(optimizer.fp16_groups)):
        with at_hand(optimizer, group) as master:
            masters.append(on_disk(master.data, folder))
            moments = optimizer.optimizer.state[master].items()
            states[group] = {key: on_disk(value, folder) if key in MOMENTS else value for key, value in moments}
    base = content[files.BASE_OPTIMIZER[3]]
    return content | {files.MASTERS[3]: masters, files.BASE_OPTIMIZER[3]: base | {"state": states}}


def on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """A copy whose memory is a file that is gone with it."""
    path = folder / "copy"
    copy = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    path.unlink()
    return copy.copy_(tensor)
