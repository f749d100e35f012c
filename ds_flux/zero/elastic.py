"""Go on from a checkpoint that was made on another number of processes, at another ZeRO stage, or with another offload.

The ranks' old files are memory-mapped.  Each rank reads the elements that its own part of the new layout consists of: the
fp32 weights straight to where its optimizer has them, the moments into memory that its optimizer then takes over.  DeepSpeed
is given these as if they were the contents of a file of this rank's own, so that all the linking and copying at stages 1 to 3
stays DeepSpeed's.  No rank holds more than its share and a piece.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_flux import UserError, progress, runtime
from ds_flux.manifest import Manifest
from ds_flux.streaming import Piece, TensorPieces, between, zeros
from ds_flux.zero import files, nvme
from ds_flux.zero.ds_config import optimizer_device, stage_of
from ds_flux.zero.engines import Engine

CARRIED = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""hyperparameters that go on as they were; others, such as `fused`, are of the optimizer that is there now"""
Groups = list[dict[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Layout:
    """How weights and moments are dealt out over the ranks' files."""

    world_size: int
    stage: int
    optimizer_device: str
    """none (where the weights are), cpu or nvme"""
    bf16: bool
    aligned: bool
    """stages 1 and 2 leave gaps between the weights"""
    groups: Groups
    """of each group of weights, {name: shape} in the order they follow one another; none at stage 0"""

    @staticmethod
    def of(ds_config: dict[str, Any], world_size: int, shapes: list[dict[str, torch.Size]] | None) -> "Layout":
        """The layout that follows from a DeepSpeed config."""
        return Layout(
            world_size=world_size,
            stage=stage_of(ds_config),
            optimizer_device=optimizer_device(ds_config),
            bf16=ds_config.get("bf16", {}).get("enabled", False),
            aligned=ds_config.get("zero_optimization", {}).get("parameter_alignment", False),
            groups=[{name: tuple(shape) for name, shape in group.items()} for group in shapes or []],
        )

    @property
    def words(self) -> str:
        """As a message has it."""
        where = {"none": "", "cpu": " with the optimizer on the CPU", "nvme": " with the optimizer on NVMe"}
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return f"{processes} at stage {self.stage}{where[self.optimizer_device]}{' in bf16' if self.bf16 else ''}"


def layout_of(engine: Engine) -> Layout:
    """The layout that an engine would write."""
    shapes = engine._get_zero_param_shapes() if stage_of(engine.config) else None
    return Layout.of(engine.config, runtime.world_size(), shapes)


def layout_of_files(folder: Path, manifest: Manifest) -> Layout:
    """The layout of a checkpoint."""
    model = read_model(folder, manifest)
    return Layout.of(model["ds_config"], manifest.world_size, model["param_shapes"])


def read_model(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The model file of rank 0, which says what is in all files; its tensors are mapped."""
    return files.load(files.by_rank(folder, manifest, "model_states.pt")[0])


def load(engine: Engine, folder: Path, manifest: Manifest, there: Layout) -> None:
    """Weights, optimizer, schedule and counters out of a checkpoint of another layout.  A collective.

    Raises:
        UserError: one of the two layouts cannot be dealt out.
    """
    optimizer, here = engine.optimizer, layout_of(engine)
    check_can_deal(folder, here, there, optimizer)
    with runtime.together("reading the checkpoint"):
        model = read_model(folder, manifest)
        saved = files.read_optimizer(folder, manifest, model)
    runtime.log(f"{folder.name} was made on {there.words}; its weights and moments are dealt out anew over {here.words}")
    if here.stage == 3:
        optimizer.checkpoint_event_prologue()  # no weight is whole on any rank
    with runtime.together("dealing out the checkpoint"):
        restore_buffers(engine, model)
        take_over(optimizer, here, saved)
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
        engine.global_steps, engine.global_samples = model["global_steps"], model["global_samples"]
        engine.skipped_steps = model["skipped_steps"]
    if here.stage == 3:
        optimizer.checkpoint_event_epilogue()  # small weights become whole again on all ranks
    else:
        optimizer.update_lp_params()


def check_can_deal(folder: Path, here: Layout, there: Layout, optimizer: Any) -> None:
    """Raises UserError unless this rank's layout is one of DeepSpeed's usual ones of stages 1 to 3."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3):
        raise UserError(
            f"cannot resume from {folder}: it was made on {there.words}, this is {here.words}, and DeepSpeed's "
            f"{type(optimizer).__name__} is not known here"
        )


def restore_buffers(engine: Engine, model: dict[str, Any]) -> None:
    """What is neither a weight nor in an optimizer."""
    names = set(model["buffer_names"])
    engine.module.load_state_dict({name: model["module"][name] for name in names}, strict=False)


def take_over(optimizer: Any, layout: Layout, saved: files.OptimizerState) -> None:
    """Bring an optimizer and the weights of this rank to what was saved."""
    numels = optimizer.fp16_partitioned_groups_flat_numel if layout.stage == 3 else map(len, masters_of(optimizer))
    total = sum(numels) * (1 + len(saved.moments))
    with progress.bar(total=total, unit=" elements", unit_scale=True, desc="resume") as bar:
        if layout.optimizer_device == "nvme":
            take_over_on_nvme(optimizer, layout, saved, bar)
            return
        state = deal(optimizer, layout, saved, bar)
    optimizer.load_state_dict([state] * layout.world_size, load_optimizer_states=True, load_from_fp32_weights=True)


def masters_of(optimizer: Any) -> list[Tensor]:
    """Flat, one for each group of weights in memory, at stages 1 and 2."""
    return optimizer.single_partition_of_fp32_groups


def deal(optimizer: Any, layout: Layout, saved: files.OptimizerState, bar: progress.Bar) -> dict[str, Any]:
    """What this rank's own file of the new layout would hold; its fp32 weights are the optimizer's own memory, filled."""
    state = optimizer.state_dict()
    base = state[files.BASE_OPTIMIZER[layout.stage]]
    flats = optimizer.fp32_partitioned_groups_flat if layout.stage == 3 else masters_of(optimizer)
    gaps = [[]] * len(flats) if layout.stage == 3 else optimizer.round_robin_bit16_padding
    for group, flat in enumerate(flats):
        base["state"][group] = fill_group(flat, group, layout, saved, gaps[group], bar)
    carry_on(base["param_groups"], saved)
    return state


def take_over_on_nvme(optimizer: Any, layout: Layout, saved: files.OptimizerState, bar: progress.Bar) -> None:
    """Group by group through memory, as DeepSpeed's own step goes; its `load_state_dict` knows tensors in memory only."""
    for group in range(len(layout.groups)):
        with nvme.at_hand(optimizer, group) as flat:
            optimizer.optimizer.state[flat] = fill_group(flat, group, layout, saved, [], bar)
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    carry_on(optimizer.optimizer.param_groups, saved)


def fill_group(
    flat: Tensor, group: int, layout: Layout, saved: files.OptimizerState, gaps: list[int], bar: progress.Bar
) -> dict[str, Any]:
    """Fill the fp32 weights of a group; returns what the optimizer knows of it besides."""
    moments = {key: torch.zeros_like(flat, requires_grad=False) for key in saved.moments}
    for out, tensors in [(flat.data, saved.masters), *((moments[key], saved.moments[key]) for key in moments)]:
        ordered = [tensors[name] for name in layout.groups[group]]
        fill(out, share(ordered, layout, runtime.rank(), flat.numel(), gaps), bar)
    return {**saved.numbers, **moments}


def carry_on(param_groups: list[dict[str, Any]], saved: files.OptimizerState) -> None:
    """With the hyperparameters that were."""
    for group in param_groups:
        group.update({key: saved.hyperparameters[key] for key in CARRIED if key in group and key in saved.hyperparameters})


def share(
    tensors: list[TensorPieces], layout: Layout, rank: int, flat_numel: int, gaps: list[int]
) -> list[tuple[int, list[Piece]]]:
    """(offset, elements that follow one another from there) of a rank's flat tensor of a group.

    Args:
        tensors: the group's, in order.
        flat_numel: elements of the flat tensor.
        gaps: the elements behind each of the tensors, at stages 1 and 2.
    """
    if layout.stage < 3:
        vector = [piece for tensor, gap in zip(tensors, gaps) for piece in (*tensor.pieces, *zeros("", (gap,)).pieces)]
        return [(0, between(vector, rank * flat_numel, (rank + 1) * flat_numel))]
    runs, offset = [], 0
    for tensor in tensors:
        per_rank = -(-tensor.numel // layout.world_size)
        runs.append((offset, between(tensor.pieces, rank * per_rank, (rank + 1) * per_rank)))
        offset += per_rank
    return runs


def fill(flat: Tensor, runs: list[tuple[int, list[Piece]]], bar: progress.Bar) -> None:
    """Write runs of elements into a flat tensor, piece after piece."""
    for offset, pieces in runs:
        for chunk in (chunk for piece in pieces for chunk in piece.chunks()):
            flat[offset : offset + chunk.numel()].copy_(chunk)
            offset += chunk.numel()
            bar.update(chunk.numel())
