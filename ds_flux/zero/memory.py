"""What a DeepSpeed engine takes in memory and sends: arithmetic on tensor sizes, from reading DeepSpeed 0.19's source.

N ranks, w bytes for a weight as it is computed with (bf16: 2, fp32: 4), P all weights of a model, T those that train.  AdamW
has 8 bytes of moments for each weight that trains.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from ds_flux.zero.ds_config import ModelSize, optimizer_device, stage_of

MOMENTS_BYTES, MASTER_BYTES = 8, 4
MODULE_BYTES = 65_000  # host memory of the hooks that stage 3 puts on a module (measured)
ALL_REDUCE_NUMEL = 500_000_000  # stage 0: gradients that are copied together (DeepSpeed's constant)


@dataclass(frozen=True)
class Weights:
    """The tensors of a model, in elements."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    num_bytes: int
    """of a weight as it is computed with"""
    size: ModelSize
    num_modules: int

    @staticmethod
    def of(module: nn.Module, num_bytes: int, size: ModelSize | None = None) -> "Weights":
        """Count a module, on whatever device (also meta).  `size`: of the model that "auto" is computed from."""
        trains = {flag: tuple(p.numel() for p in module.parameters() if p.requires_grad == flag) for flag in (True, False)}
        return Weights(trains[True], trains[False], num_bytes, size or ModelSize.of(module), len(list(module.modules())))

    @property
    def every(self) -> tuple[int, ...]:
        """All tensors."""
        return self.trainable + self.frozen


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.  The first four are there all the time; `backward` or `step` come on top, never together."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """fp32 weights and moments"""
    ema: int = 0
    gathered: int = 0
    """backward: weights that are whole while a block is computed"""
    buckets: int = 0
    """backward: buffers of communication"""
    step: int = 0
    """copies that the optimizer's step makes"""
    pinned: int = 0
    """host memory that cannot be swapped out"""
    pageable: int = 0
    """other host memory"""
    nvme: int = 0

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(**{f.name: vars(self)[f.name] + vars(other)[f.name] for f in fields(Memory)})

    def device(self, activations: int) -> int:
        """Bytes at the peak, on the accelerator."""
        resident = self.weights + self.gradients + self.optimizer + self.ema
        return resident + max(self.gathered + self.buckets + activations, self.step)

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return self.pinned + self.pageable


def train_memory(
    weights: Weights,
    ds_config: dict[str, Any],
    num_ranks: int,
    keeps_ema: bool = False,
    ema_on_cpu: bool = False,
    is_gloo: bool = False,
) -> Memory:
    """Of an engine that trains.

    Args:
        ds_config: final, as `ds_config.train_config` returns it.
        is_gloo: communication copies what it gathers; at stages 1 and 2, whatever `allgather_bucket_size` says, all weights.
    """
    stage = stage_of(ds_config)
    memory = {0: replicated, 1: flattened, 2: flattened, 3: partitioned}[stage](weights, ds_config, num_ranks)
    if is_gloo and stage in (1, 2) and num_ranks > 1:
        memory = replace(memory, step=max(memory.step, weights.num_bytes * sum(weights.trainable)))
    if not keeps_ema:
        return memory
    own = MASTER_BYTES * (sum(weights.trainable) if stage == 0 else share(weights.trainable, num_ranks))
    return memory + (Memory(pageable=own) if ema_on_cpu or optimizer_device(ds_config) != "none" else Memory(ema=own))


def frozen_memory(weights: Weights, ds_config: dict[str, Any] | None, num_ranks: int) -> Memory:
    """Of a frozen model: in a ZeRO-3 engine of its own, or whole if there is no config."""
    if ds_config is None:
        return Memory(weights=weights.num_bytes * sum(weights.every))
    return weights_at_stage_3(weights, ds_config["zero_optimization"], num_ranks)


def share(tensors: tuple[int, ...], num_ranks: int) -> int:
    """Elements on one rank where each tensor is partitioned by itself."""
    return sum(-(-numel // num_ranks) for numel in tensors)


def replicated(weights: Weights, ds_config: dict[str, Any], num_ranks: int) -> Memory:
    """Stage 0: everything on every rank; in bf16 the step copies gradients to fp32."""
    w, trainable = weights.num_bytes, sum(weights.trainable)
    is_bf16 = w < MASTER_BYTES
    return Memory(
        weights=w * sum(weights.every),
        gradients=w * trainable,
        optimizer=trainable * (MOMENTS_BYTES + (MASTER_BYTES if is_bf16 else 0)),
        buckets=w * min(trainable, ALL_REDUCE_NUMEL) if num_ranks > 1 else 0,
        step=MASTER_BYTES * trainable if is_bf16 else 0,
    )


def flattened(weights: Weights, ds_config: dict[str, Any], num_ranks: int) -> Memory:
    """Stages 1 and 2: whole weights, flattened; each rank has the optimizer of one N-th of the elements.

    A bucket of gradients is filled while another is reduced (`overlap_comm`), and reducing copies it once more.  The step
    flattens this rank's gradients and copies them to fp32.  Stage 1 keeps all gradients where it accumulates.
    """
    zero, w = ds_config["zero_optimization"], weights.num_bytes
    trainable = sum(weights.trainable)
    mine = 2 * -(-trainable // (2 * num_ranks))  # partitions begin at even elements
    bucket = zero.get("reduce_bucket_size", ALL_REDUCE_NUMEL)
    num_buckets = 2 + bool(zero.get("overlap_comm"))
    accumulates = ds_config["gradient_accumulation_steps"] > 1
    whole_weights = w * (sum(weights.frozen) + mine * num_ranks)
    memory = Memory(weights=whole_weights, buckets=w * bucket * num_buckets)
    if optimizer_device(ds_config) != "none":
        largest = max(weights.trainable)
        is_pinned = bool(zero["offload_optimizer"].get("pin_memory"))
        buffers = mine * (2 * MASTER_BYTES + w) + largest * w + (mine * w if accumulates else 0)
        whole = w * trainable if stage_of(ds_config) == 1 and accumulates else 0
        return memory + Memory(gradients=largest * w + whole) + host(buffers, is_pinned) + host(mine * MOMENTS_BYTES, False)
    whole_until_reduced = stage_of(ds_config) == 1 and (accumulates or not zero.get("overlap_comm"))
    gradients = trainable if whole_until_reduced else mine * (1 + accumulates)
    to_fp32 = MASTER_BYTES if w < MASTER_BYTES else 0
    return memory + Memory(gradients=w * gradients, optimizer=mine * (MASTER_BYTES + MOMENTS_BYTES), step=mine * (w + to_fp32))


def partitioned(weights: Weights, ds_config: dict[str, Any], num_ranks: int) -> Memory:
    """Stage 3: each tensor partitioned; optimizer steps by groups of them.

    In fp32 as well the optimizer has a copy: DeepSpeed means to do without, and compares a device with its name.
    """
    zero, w = ds_config["zero_optimization"], weights.num_bytes
    mine = share(weights.trainable, num_ranks)
    largest = max(-(-numel // num_ranks) for numel in weights.trainable)
    group = min(mine, zero.get("sub_group_size", 10**9) + largest)
    bucket = zero.get("reduce_bucket_size", ALL_REDUCE_NUMEL)
    memory = weights_at_stage_3(weights, zero, num_ranks) + Memory(buckets=w * (bucket + min(bucket, sum(weights.trainable))))
    device = optimizer_device(ds_config)
    if device == "none":
        optimizer = mine * (MASTER_BYTES + MOMENTS_BYTES)
        step = group * (w + (MASTER_BYTES if w < MASTER_BYTES else 0))
        return memory + Memory(gradients=w * mine, optimizer=optimizer, step=step)
    is_pinned = bool(zero["offload_optimizer"].get("pin_memory"))
    if device == "nvme":
        swap = zero["offload_optimizer"].get("buffer_count", 4) * group * MASTER_BYTES
        nvme = Memory(nvme=mine * (MASTER_BYTES * 2 + MOMENTS_BYTES))
        return memory + nvme + host(swap, True) + host(w * mine, is_pinned)
    gradients = mine * (w + MASTER_BYTES)  # in both: what is reduced, and what the optimizer reads
    return memory + host(gradients, is_pinned) + host(mine * (MASTER_BYTES + MOMENTS_BYTES), False)


def weights_at_stage_3(weights: Weights, zero: dict[str, Any], num_ranks: int) -> Memory:
    """Partitions where `offload_param` puts them, small tensors whole, and what is gathered while a block is computed."""
    w, threshold = weights.num_bytes, zero.get("stage3_param_persistence_threshold", 100_000)
    whole = w * sum(numel for numel in weights.every if numel <= threshold)
    partition = w * share(weights.every, num_ranks)
    second = zero.get("zero_hpz_partition_size", 1)
    memory = Memory(weights=whole + (w * share(weights.every, second) if second > 1 else 0))
    memory += Memory(gathered=w * live_numel(weights, zero), pageable=MODULE_BYTES * weights.num_modules)
    offload = zero.get("offload_param") or {}
    if offload.get("device", "none") == "none":
        return memory + Memory(weights=partition)
    if offload["device"] == "cpu":
        return memory + host(partition, bool(offload.get("pin_memory")))
    in_cpu = w * min(share(weights.every, num_ranks), offload.get("max_in_cpu", 10**9))
    buffers = w * offload.get("buffer_count", 5) * offload.get("buffer_size", 10**8)
    return memory + Memory(nvme=partition) + host(in_cpu + buffers, True)


def live_numel(weights: Weights, zero: dict[str, Any]) -> int:
    """Elements that are whole at once: a block's and what is prefetched, which is copied out of the buffer it arrives in."""
    block, largest = weights.size.num_block_params, max(weights.every)
    ahead = zero.get("stage3_prefetch_bucket_size", 50_000_000)
    live = min(zero.get("stage3_max_live_parameters", 10**9), block + ahead)
    return min(sum(weights.every), max(live, largest)) + min(sum(weights.every), ahead)


def host(num_bytes: int, is_pinned: bool) -> Memory:
    """In host memory."""
    return Memory(pinned=num_bytes) if is_pinned else Memory(pageable=num_bytes)


def sent_bytes(weights: Weights, ds_config: dict[str, Any], num_ranks: int) -> int:
    """What each rank receives in one optimizer step (and sends as much), by ring algorithms.

    Stages 1 and 2 reduce by all-reduce, as DeepSpeed does it by itself; stage 2 in each micro step.  Stage 3 gathers every
    weight for the forward and for the backward pass of each micro step.
    """
    stage, zero, w = stage_of(ds_config), ds_config.get("zero_optimization", {}), weights.num_bytes
    num_micro, trainable = ds_config["gradient_accumulation_steps"], w * sum(weights.trainable)
    if stage < 3:
        reduces = 2 * trainable * (num_micro if stage == 2 else 1)
        total = reduces + (trainable if stage else 0)
        return total * (num_ranks - 1) // num_ranks
    gathered = w * sum(numel for numel in weights.every if numel > zero.get("stage3_param_persistence_threshold", 100_000))
    forward = gathered // (2 if zero.get("zero_quantized_weights") else 1)
    reduced = trainable // (4 if zero.get("zero_quantized_gradients") else 1)
    return num_micro * ((forward + gathered + reduced) * (num_ranks - 1) // num_ranks)


def checkpoint_bytes(weights: Weights, ds_config: dict[str, Any], keeps_ema: bool) -> int:
    """One checkpoint on disk, all ranks together: fp32 weights and moments, below stage 3 the weights as well."""
    trainable = sum(weights.trainable)
    stage = stage_of(ds_config)
    has_masters = stage > 0 or weights.num_bytes < MASTER_BYTES
    optimizer = MOMENTS_BYTES + (MASTER_BYTES if has_masters else 0) + (MASTER_BYTES if keeps_ema else 0)
    return trainable * (optimizer + (weights.num_bytes if stage < 3 else 0))
