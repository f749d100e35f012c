"""An exponential moving average (EMA) of the weights that train, kept by each rank of its own part, without communication.

After each step ema = decay * ema + (1 - decay) * weights, in fp32, of the optimizer's fp32 weights: at stages 1 to 3 the
rank's partition of them, at stage 0 all of them on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_flux import progress, runtime
from ds_flux.manifest import Manifest
from ds_flux.zero import elastic, files
from ds_flux.zero.ds_config import stage_of
from ds_flux.zero.engines import Engine

CHUNK_NUMEL = 1 << 24


@dataclass(frozen=True)
class Masters:
    """The fp32 weights of this rank in its optimizer's own memory, and how they lie there."""

    flats: list[Tensor]
    """of each group, 1-D"""
    shapes: list[dict[str, torch.Size]]
    """of each group, {name: shape} in the order they follow one another"""
    gaps: list[list[int]]
    """of each group, the elements behind each of its tensors"""
    publish: Callable[[], None]
    """has the module compute with what is in `flats` now; a collective"""


def masters_of(engine: Engine) -> Masters:
    """The fp32 weights of an engine of any stage."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        flats, publish = optimizer.fp32_partitioned_groups_flat, lambda: publish_partitioned(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        flats, publish = optimizer.single_partition_of_fp32_groups, optimizer.update_lp_params
    elif isinstance(optimizer, BF16_Optimizer):  # stage 1 in bf16 with gradients in fp32
        flats, publish = optimizer.fp32_groups_flat_partition, optimizer.update_lp_params
    else:
        return whole_masters(engine)
    shapes = engine._get_zero_param_shapes()
    is_aligned = isinstance(optimizer, DeepSpeedZeroOptimizer)
    gaps = optimizer.round_robin_bit16_padding if is_aligned else [[0] * len(group) for group in shapes]
    return Masters([flat.detach() for flat in flats], shapes, gaps, publish)


def whole_masters(engine: Engine) -> Masters:
    """Stage 0: each tensor is a group; in fp32 it is the module's own."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # in bf16, by its old name
        groups, masters = optimizer.fp16_groups, [tensor for group in optimizer.fp32_groups for tensor in group]
    elif isinstance(optimizer, FP16_Optimizer):
        groups, pairs = optimizer.fp16_groups, zip(optimizer.fp32_groups_flat, optimizer.fp16_groups)
        masters = [part for flat, group in pairs for part in flat.split([parameter.numel() for parameter in group])]
    else:
        groups = [group["params"] for group in optimizer.param_groups]
        masters = [parameter for group in groups for parameter in group]
    parameters = [parameter for group in groups for parameter in group]
    flats = [master.detach().view(-1) for master in masters]

    def publish() -> None:
        for parameter, flat in zip(parameters, flats):
            parameter.data.view(-1).copy_(flat)

    return Masters(flats, [{engine.param_names[p]: p.shape} for p in parameters], [[0] for _ in parameters], publish)


def publish_partitioned(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Stage 3: as at the end of DeepSpeed's own step."""
    optimizer.checkpoint_event_prologue()  # no weight is whole on any rank
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()  # small weights become whole again on all ranks


@dataclass(frozen=True)
class Ema:
    """The moving average of this rank's part."""

    engine: Engine
    decay: float
    flats: list[Tensor]
    """like those of `Masters`"""

    @staticmethod
    def start(engine: Engine, decay: float, device: str | None) -> "Ema":
        """From the weights as they are now, on `device` or where the fp32 weights are."""
        return Ema(engine, decay, [flat.to(device or flat.device, copy=True) for flat in masters_of(engine).flats])

    def update(self) -> None:
        """After a step that was taken."""
        for average, weights in self.beside(masters_of(self.engine)):
            average.lerp_(weights.to(average.device), 1 - self.decay)

    def beside(self, masters: Masters) -> Iterator[tuple[Tensor, Tensor]]:
        """(average, fp32 weights) of the same elements, in pieces that may be copied to another device."""
        for average, weights in zip(self.flats, masters.flats, strict=True):
            yield from zip(average.split(CHUNK_NUMEL), weights.split(CHUNK_NUMEL), strict=True)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the engine computes with the averages, and its weights are kept where they were; do not train or save.

        Afterwards both are what they were, to the bit.  A collective, at its end as well.
        """
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Each takes the place of the other.  A collective."""
        masters = masters_of(self.engine)
        for average, weights in self.beside(masters):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
        masters.publish()

    def contents(self, is_first: bool) -> dict[str, Any]:
        """{file: what torch is to save in it} of this rank for a checkpoint; stage 0 has one file for all ranks.

        Args:
            is_first: of the ranks on its disk.
        """
        if stage_of(self.engine.config) == 0 and not is_first:
            return {}
        masters = masters_of(self.engine)
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in masters.shapes]
        return {self.file: {"flats": self.flats, "shapes": shapes, "gaps": masters.gaps}}

    @property
    def file(self) -> str:
        """This rank's, or stage 0's for all."""
        return f"rank_{runtime.rank() if stage_of(self.engine.config) else 0}{files.EMA_FILE}"

    def load(self, folder: Path, manifest: Manifest) -> None:
        """Out of a checkpoint, whatever layout it was made in: each rank reads its share of all ranks' files."""
        if manifest.elsewhere:  # of nodes with disks of their own, in the layout of this run: its own file is here
            for flat, own in zip(self.flats, files.load(folder / self.file)["flats"], strict=True):
                flat.copy_(own)
            return
        saved = {tensor.name: tensor for tensor in files.read_ema(folder, manifest)}
        masters, layout = masters_of(self.engine), elastic.layout_of(self.engine)
        part = runtime.rank() if layout.stage else 0
        total = sum(flat.numel() for flat in self.flats)
        with progress.bar(total=total, unit=" elements", unit_scale=True, desc="resume EMA") as bar:
            for flat, shapes, gaps in zip(self.flats, masters.shapes, masters.gaps, strict=True):
                tensors = [saved[name] for name in shapes]
                elastic.fill(flat, elastic.share(tensors, layout, part, flat.numel(), gaps), bar)
