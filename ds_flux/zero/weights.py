"""Weights into a module that was built on the meta device, partitioned or whole, without a copy of the model anywhere.

Partitioned (ZeRO-3): `zero.Init` serves as a partitioner only.  Each parameter becomes a DeepSpeed parameter that never
existed whole, and each rank reads its own slice of each tensor: no broadcast, no gather.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus, ZeroParamStatus
from torch import Tensor, nn

from ds_flux import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}


class WeightSource(Protocol):
    """Whatever can say the elements of a flattened tensor."""

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """{name: shape} of all tensors; None: any that is asked for."""

    def read(self, name: str, shape: tuple[int, ...], start: int, out: Tensor) -> None:
        """Fill 1-D `out` with the elements from `start` on of tensor `name`, flattened."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a safetensors file."""

    path: Path
    offset: int  # bytes from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsFolder:
    """The (sharded) safetensors files of one component; opening it reads headers only.

    Raises:
        UserError: no such files, or one that is cut short.
    """

    def __init__(self, folder: Path, base: str, variant: str | None = None):
        self.entries: dict[str, Entry] = {}
        for path in safetensors_files(folder, base, variant):
            for name, info in read_header(path).items():
                if info["dtype"] not in DTYPES:
                    raise UserError(f"{path}: {name} is stored as {info['dtype']}; known are {', '.join(DTYPES)}")
                self.entries[name] = Entry(path, info["data_offsets"][0], DTYPES[info["dtype"]], tuple(info["shape"]))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in self.entries.values())

    def part(self, names: list[str]) -> "SafetensorsFolder":
        """Only the tensors `names`, which lie here under some prefix: a model inside a larger one."""
        prefixes = {found.removesuffix(names[0]) for found in self.entries if found.endswith(names[0])}
        prefix = max(prefixes, key=lambda prefix: sum(prefix + name in self.entries for name in names), default="")
        inside = copy.copy(self)
        inside.entries = {name: self.entries[prefix + name] for name in names if prefix + name in self.entries}
        return inside

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all tensors."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, name: str, shape: tuple[int, ...], start: int, out: Tensor) -> None:
        """See `WeightSource`.  Converts to the dtype and device of `out` through a buffer of its size where they differ."""
        entry = self.entries[name]
        same = out.dtype == entry.dtype and out.device.type == "cpu"
        buffer = out if same else torch.empty(out.numel(), dtype=entry.dtype)
        view = memoryview(buffer.view(torch.uint8).numpy())
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset + start * entry.dtype.itemsize)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise UserError(f"{entry.path} ends in the middle of {name}: the file is cut short")
                view = view[count:]
        if not same:
            out.copy_(buffer)


def safetensors_files(folder: Path, base: str, variant: str | None = None) -> list[Path]:
    """The weight files of a component in the Hugging Face layout: one file, or several with an index."""
    suffix = f".{variant}" if variant else ""
    index = folder / f"{base}.safetensors.index{suffix}.json"
    if index.exists():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [folder / f"{base}{suffix}.safetensors"]
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: no such weight file")
    return files


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """{tensor: {dtype, shape, data_offsets}} of a safetensors file, offsets counted from the start of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > size:
            raise UserError(f"{path} is no safetensors file, or is cut short")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise UserError(f"{path} is no safetensors file: its header is not JSON") from None
    header.pop("__metadata__", None)
    for info in header.values():
        info["data_offsets"] = [8 + length + offset for offset in info["data_offsets"]]
        if info["data_offsets"][1] > size:
            raise UserError(f"{path} is cut short: {size} bytes, {info['data_offsets'][1]} or more expected")
    return header


@dataclass(frozen=True)
class RandomWeights:
    """Weights for pre-training, the same however they are partitioned: `initialise` fills a tensor by its name.

    Each tensor has a generator keyed by (seed, name), so no rank needs another tensor to know this one.
    """

    seed: int
    initialise: Callable[[str, Tensor, int], None]  # (name, whole tensor to fill in place, seed)

    def shapes(self) -> None:
        """Any shape."""

    def read(self, name: str, shape: tuple[int, ...], start: int, out: Tensor) -> None:
        """See `WeightSource`."""
        whole = torch.empty(shape)
        self.initialise(name, whole, self.seed)
        out.copy_(whole.flatten()[start : start + out.numel()])


class Partitioner(Init):
    """`zero.Init` as a partitioner instead of a context: the partition of a parameter that is never whole."""

    def __init__(self, ds_config: dict[str, Any]):
        super().__init__(config_dict_or_path=ds_config)
        if self.mem_efficient_linear:
            # else autograd's view of a gathered weight keeps it alive until the backward pass
            self._enable_mem_efficient_linear()

    def partition(self, shape: torch.Size, requires_grad: bool, fill: Callable[[int, Tensor], None]) -> nn.Parameter:
        """A partitioned parameter; `fill(start, out)` writes this rank's elements.  No collective."""
        # the right shape over one element of memory, for DeepSpeed's bookkeeping
        stub = torch.empty(1, dtype=self.dtype, device=self.local_device).expand(shape)
        parameter = nn.Parameter(stub, requires_grad=requires_grad)
        self._convert_to_deepspeed_param(parameter)
        numel = self._aligned_size(parameter) // self._partition_world_size(parameter)
        parameter.ds_numel_aligned = numel * self._partition_world_size(parameter)
        parameter.ds_tensor = self._allocate(parameter, numel)
        start = self._partition_rank(parameter) * numel
        count = max(0, min(numel, parameter.ds_numel - start))
        parameter.ds_tensor[count:].zero_()
        if count:
            fill(start, parameter.ds_tensor[:count])
        parameter.data = torch.empty(0, dtype=self.dtype, device=self.local_device)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if parameter.ds_tensor.final_location == OffloadDeviceEnum.nvme:
            self.param_swapper.swap_out_and_release([parameter])
        return parameter

    def _allocate(self, parameter: nn.Parameter, numel: int) -> Tensor:
        """The storage of a partition where DeepSpeed's own `_partition_param` would put it."""
        on_nvme = self.remote_device == OffloadDeviceEnum.nvme
        location = None
        if on_nvme and self.param_swapper.swappable_tensor(numel=numel):
            tensor, location = self.param_swapper.get_buffer(parameter, numel).detach(), OffloadDeviceEnum.nvme
        else:
            remote = "cpu" if on_nvme else self.remote_device
            tensor = torch.empty(numel, dtype=self.dtype, device=self.local_device if parameter.ds_persist else remote)
            if tensor.device.type == "cpu" and self.pin_memory:
                tensor = get_accelerator().pin_memory(tensor)
        tensor.ds_numel, tensor.final_location = numel, location
        tensor.status = PartitionedParamStatus.AVAILABLE
        return tensor


def fill_module(module: nn.Module, source: WeightSource, dtype: torch.dtype, ds_config: dict[str, Any] | None) -> None:
    """Replace the meta parameters of `module` by weights: partitioned by `ds_config` at stage 3, whole if it is None.

    Raises:
        UserError: tensors are missing, unexpected or of the wrong shape; it names them.
    """
    names = check_tensors(module, source)
    partitioner = Partitioner(ds_config) if ds_config else None
    device = get_accelerator().current_device_name()
    filled: dict[int, nn.Parameter] = {}
    for owner, attribute, meta in owned_parameters(module):
        if id(meta) not in filled:
            name, shape = names[id(meta)], tuple(meta.shape)

            def fill(start: int, out: Tensor, name: str = name, shape: tuple[int, ...] = shape) -> None:
                source.read(name, shape, start, out)

            if partitioner:
                filled[id(meta)] = partitioner.partition(meta.shape, meta.requires_grad, fill)
            else:
                whole = torch.empty(meta.shape, dtype=dtype, device=device)
                fill(0, whole.view(-1))
                filled[id(meta)] = nn.Parameter(whole, requires_grad=meta.requires_grad)
        owner._parameters[attribute] = filled[id(meta)]
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not left, f"buffers without a value: {left}"


def owned_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) of every place that holds a parameter; a tied one comes once for each place."""
    for owner in module.modules():
        for attribute, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield owner, attribute, parameter


def check_tensors(module: nn.Module, source: WeightSource) -> dict[int, str]:
    """{id of a parameter: its name in the source}.  A tied parameter may be there under any of its names."""
    aliases: dict[int, list[str]] = {}
    shapes_here: dict[int, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
        shapes_here[id(parameter)] = tuple(parameter.shape)
    shapes = source.shapes()
    if shapes is None:
        return {key: names[0] for key, names in aliases.items()}
    found = {key: next((name for name in names if name in shapes), None) for key, names in aliases.items()}
    known = {name for names in aliases.values() for name in names} | {name for name, _ in module.named_buffers()}
    wrong = [(found[key], shapes_here[key]) for key in found if found[key] and shapes[found[key]] != shapes_here[key]]
    problems = {
        "missing": [aliases[key][0] for key in found if found[key] is None],
        "unexpected": sorted(set(shapes) - known),
        "wrongly shaped": [f"{name} (is {shapes[name]}, the model wants {shape})" for name, shape in wrong],
    }
    said = [
        f"{len(names)} {kind}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        for kind, names in problems.items()
        if names
    ]
    if said:
        raise UserError(f"weights do not fit {type(module).__name__}: " + "; ".join(said))
    return {key: str(name) for key, name in found.items()}


def num_elements(parameter: nn.Parameter) -> int:
    """Elements of a parameter, partitioned or not."""
    return math.prod(parameter.ds_shape) if hasattr(parameter, "ds_shape") else parameter.numel()
