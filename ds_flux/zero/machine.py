"""What a DeepSpeed config asks of this machine, looked at before anything is loaded."""

import os
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder

from ds_flux import UserError

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_machine(ds_config: dict[str, Any]) -> None:
    """Raise UserError for what cannot be had here."""
    zero = ds_config["zero_optimization"]
    for key in QUANTIZED:
        if zero.get(key) and get_accelerator().device_name() == "cpu":
            raise UserError(f"{key} needs a GPU: DeepSpeed has no quantizer for the CPU; take it out of the DeepSpeed config")
    for section in ("offload_param", "offload_optimizer"):
        offload = zero.get(section) or {}
        if offload.get("device") == "nvme":
            check_nvme(section, offload.get("nvme_path"))


def check_nvme(section: str, path: str | None) -> None:
    """Raise UserError unless weights can be swapped to this folder."""
    if path is None or not Path(path).is_dir():
        raise UserError(f"{section}: nvme_path {path} is no folder on this node: make it, on a disk of the node's own")
    if not os.access(path, os.W_OK):
        raise UserError(f"{section}: nvme_path {path} cannot be written")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(f"{section}: NVMe needs libaio's headers to build DeepSpeed's async_io: install libaio-dev")
