"""A DeepSpeed JSON and our flags -> one checked DeepSpeed config.

A setting has one owner.  The flags own the batch, accumulation, clipping, precision and the optimizer: the JSON leaves them
out or says "auto", and an explicit value that contradicts a flag is an error that names both.  DeepSpeed itself ignores an
unknown top-level key and takes "auto" for false, so both end here.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel, ValidationError
from torch import nn

from ds_flux import UserError
from ds_flux.config import OptimConfig, TrainConfig
from ds_flux.flags import check_known

TOP_LEVEL_KEYS = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer scheduler "
    "zero_optimization bf16 fp16 data_types torch_autocast zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor "
    "sparse_gradients disable_allgather steps_per_print wall_clock_breakdown memory_breakdown dump_state aio checkpoint "
    "comms_logger flops_profiler tensorboard wandb csv_monitor comet activation_checkpointing compile nebula elasticity "
    "autotuning data_efficiency seed tensor_parallel sequence_parallel_size zenflow log_level "
    "disable_python_gc timers"
).split()

CHECKPOINT_KEYS = ("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer")
"""DeepSpeed ignores others"""

NOT_READ = {  # sections that DeepSpeed knows and nothing here would act on
    "activation_checkpointing": "use --gradient_checkpointing, --gradient_checkpointing_every and --offload_activations",
    "compile": "use --compile; DeepSpeed's DeepCompile is not verified here",
    "sequence_parallel_size": "use --sequence_parallel",
    "tensor_parallel": "the models here are not cut that way",
    "autotuning": "use ds-flux tune",
    "data_efficiency": "it would draw other samples than the schedule",
    "elasticity": "any checkpoint goes on on any number of processes",
}

SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    ("bf16",): DeepSpeedBF16Config,
    ("fp16",): DeepSpeedFP16Config,
    ("zero_optimization", "offload_param"): DeepSpeedZeroOffloadParamConfig,
    ("zero_optimization", "offload_optimizer"): DeepSpeedZeroOffloadOptimizerConfig,
    ("zero_optimization",): DeepSpeedZeroConfig,
}


@dataclass(frozen=True)
class ModelSize:
    """What "auto" sizes in a JSON are computed from, in parameters."""

    num_params: int
    num_block_params: int
    """of the largest block of a ModuleList: what ZeRO-3 gathers at once"""
    num_largest_param: int
    """of the largest tensor: what a buffer between NVMe and memory has to hold a rank's share of"""
    num_block_tensors: int
    """matrices in the block that has most of them: buffers that are in use at once"""

    @staticmethod
    def of(module: nn.Module) -> "ModelSize":
        """Count a module, on whatever device (also meta)."""
        blocks = [block for m in module.modules() if isinstance(m, nn.ModuleList) for block in m]
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        total = sum(p.numel() for p in module.parameters())
        counts = [sum(p.ndim > 1 for p in block.parameters()) for block in blocks]
        largest = max((p.numel() for p in module.parameters()), default=0)
        return ModelSize(total, max(sizes, default=total), largest, max(counts, default=1))


@dataclass(frozen=True)
class Ranks:
    """How many processes there are."""

    num: int
    num_per_node: int


def auto_sizes(size: ModelSize, ranks: Ranks) -> dict[str, int]:
    """Buffers in proportion to the model, for "auto" in the JSON; DeepSpeed's own defaults suit billions of weights.

    A bucket holds half a block, half a block is gathered ahead while one is alive.  Whatever is small beside a block stays
    whole on every rank, up to DeepSpeed's default.  hpZ keeps a second copy of the weights in each node.
    """
    block = size.num_block_params
    return {
        "reduce_bucket_size": block // 2,
        "allgather_bucket_size": block // 2,
        "stage3_prefetch_bucket_size": block // 2,
        "stage3_max_live_parameters": block + block // 2,
        "stage3_max_reuse_distance": 2 * block,
        "stage3_param_persistence_threshold": min(100_000, block // 1000),
        "sub_group_size": max(block // 2, size.num_params // 16),
        "zero_hpz_partition_size": ranks.num_per_node,
    }


def nvme_buffers(size: ModelSize, ranks: Ranks) -> dict[str, int]:
    """Of `offload_param`, for "auto": DeepSpeed's default of 100 million elements is less than a share of the largest tensor of
    some models, and far more than any of others.
    """
    return {"buffer_size": -(-size.num_largest_param // ranks.num), "buffer_count": max(5, size.num_block_tensors)}


def train_config(
    path: str, optim: OptimConfig, train: TrainConfig, bf16: bool, ranks: Ranks, size: ModelSize
) -> dict[str, Any]:
    """The DeepSpeed config of the training engine.

    Raises:
        UserError: unknown key (the nearest known one is named), wrong value, or a contradiction to a flag.
    """
    config = read(path)
    if "scheduler" in config:
        raise UserError(f"{path}: scheduler belongs to --lr_scheduler and --lr_warmup_steps; take it out of the JSON")
    fill(config, path, "train_micro_batch_size_per_gpu", "train_batch_size", train.train_batch_size)
    fill(config, path, "gradient_accumulation_steps", "gradient_accumulation_steps", train.gradient_accumulation_steps)
    global_batch_size = train.train_batch_size * train.gradient_accumulation_steps * ranks.num
    fill(config, path, "train_batch_size", f"train_batch_size x accumulation x {ranks.num} processes =", global_batch_size)
    fill(config, path, "gradient_clipping", "max_grad_norm", optim.max_grad_norm)
    fill_optimizer(config, path, optim)
    config = finish(config, path, bf16, size, ranks)
    if optim.ema_decay is not None:
        check_ema(config, path)
    return config


def check_ema(config: dict[str, Any], path: str) -> None:
    """Raise UserError unless there are fp32 weights in memory, to keep an average of."""
    if optimizer_device(config) == "nvme":
        raise UserError(f"{path}: --ema_decay needs the optimizer in memory, and offload_optimizer puts it on NVMe")
    if config["bf16"].get("bf16_master_weights_and_grads", False):
        raise UserError(f"{path}: --ema_decay needs fp32 weights in the optimizer, and bf16_master_weights_and_grads has none")


def inference_config(path: str, bf16: bool, size: ModelSize, ranks: Ranks, offload: bool) -> dict[str, Any]:
    """The DeepSpeed config of a frozen engine: stage 3, no optimizer.  Raises UserError like `train_config`.

    Args:
        offload: keep the weights in CPU memory unless the JSON says where they are.
    """
    config = read(path)
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise UserError(f"{path}: {key} has no place in the config of a frozen text encoder; take it out")
    if stage_of(config) != 3:
        raise UserError(f"{path}: a frozen engine is sharded by stage 3, not {stage_of(config)}; or --shard_text_encoder false")
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    if offload:
        config["zero_optimization"].setdefault("offload_param", {"device": "cpu", "pin_memory": True})
    return finish(config, path, bf16, size, ranks)


def stage_of(config: dict[str, Any]) -> int:
    """The ZeRO stage of a config."""
    return config.get("zero_optimization", {}).get("stage", 0)


def optimizer_device(config: dict[str, Any]) -> str:
    """Where the optimizer's state is: none (with the weights), cpu or nvme; it runs on the CPU unless none."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return offload.get("device", "none")


def read(path: str) -> dict[str, Any]:
    """A DeepSpeed JSON whose top-level keys DeepSpeed knows."""
    if not Path(path).is_file():
        raise UserError(f"DeepSpeed config {path}: no such file")
    try:
        config = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"DeepSpeed config {path} is not JSON: {error}") from None
    check_known(config, TOP_LEVEL_KEYS, f"key in {path}")
    for key in NOT_READ.keys() & config.keys():
        raise UserError(f"{path}: {key} has no effect here: {NOT_READ[key]}; take it out")
    check_known(config.get("checkpoint", {}), CHECKPOINT_KEYS, f"key of checkpoint in {path}")
    return copy.deepcopy(config)


def fill(config: dict[str, Any], path: str, key: str, flag: str, value: Any) -> None:
    """Set config[key] to what the flag says; "auto" and absence are invitations, anything else must agree."""
    if config.get(key, "auto") not in ("auto", value):
        raise UserError(f'{path} says {key} {config[key]} but --{flag} {value}: write "auto" there, or change the flag')
    config[key] = value


def fill_optimizer(config: dict[str, Any], path: str, optim: OptimConfig) -> None:
    """AdamW unless the JSON names another optimizer, whose parameters then are "auto" or agree with the flags."""
    optimizer = config.setdefault("optimizer", {})
    check_known(optimizer, ("type", "params", "legacy_fusion"), f"key of optimizer in {path}")
    kind, params = optimizer.setdefault("type", "AdamW"), optimizer.setdefault("params", {})
    owned = {
        "lr": ("learning_rate", optim.learning_rate),
        "betas": ("adam_beta1 and --adam_beta2", [optim.adam_beta1, optim.adam_beta2]),
        "eps": ("adam_epsilon", optim.adam_epsilon),
        "weight_decay": ("adam_weight_decay", optim.adam_weight_decay),
    }
    for key, (flag, value) in owned.items():
        if key in params or key == "lr" or kind == "AdamW":
            fill(params, path, key, flag, value)
    if kind == "AdamW" and optimizer_device(config) == "none":
        # torch's own fused AdamW, which needs no kernel compiled at the first start
        params.setdefault("torch_adam", True)
        params.setdefault("fused", True)


def finish(config: dict[str, Any], path: str, bf16: bool, size: ModelSize, ranks: Ranks) -> dict[str, Any]:
    """Precision, "auto" sizes, and DeepSpeed's own checks of the nested sections."""
    for section, enabled in {"bf16": bf16, "fp16": False}.items():
        precision = config.setdefault(section, {})
        fill(precision, f"{path}: {section}", "enabled", f"mixed_precision {'bf16' if bf16 else 'no'}, so", enabled)
    if bf16:
        config["bf16"].setdefault("check_grad_overflow", True)  # as in fp32: a step whose gradients are not finite is left out
    zero = config.setdefault("zero_optimization", {"stage": 0})
    fill_auto(zero, auto_sizes(size, ranks))
    fill_auto(zero.get("offload_param") or {}, nvme_buffers(size, ranks))
    check_variant(config, path, ranks)
    for keys, schema in SECTIONS.items():
        check_section(config, path, keys, schema)
    left = [key for key, value in walk(config) if value == "auto"]
    if left:
        raise UserError(f'{path}: nothing decides {left[0]} "auto"; give a value')
    # DeepSpeed prints its own throughput line; ours says the same and more
    config.setdefault("steps_per_print", 10**9)
    return config


def fill_auto(section: dict[str, Any], sizes: dict[str, int]) -> None:
    """Replace each "auto" for which there is a size."""
    section.update({key: sizes[key] for key, value in section.items() if value == "auto" and key in sizes})


def check_variant(config: dict[str, Any], path: str, ranks: Ranks) -> None:
    """Raise UserError for what DeepSpeed has no more, and for combinations that it ignores or dies of."""
    zero, stage = config["zero_optimization"], stage_of(config)
    hpz = zero.get("zero_hpz_partition_size", 1)
    rules = [
        ("mics_shard_size" in zero, 'MiCS is gone from DeepSpeed: write "zero_hpz_partition_size": "auto" instead'),
        (bool(zero.get("offload_param")) and stage != 3, f"offload_param works at stage 3 only, and this is stage {stage}"),
        (hpz not in (0, 1) and stage != 3, f"zero_hpz_partition_size works at stage 3 only, and this is stage {stage}"),
        (
            hpz not in (0, 1) and bool(zero.get("offload_param")),
            "zero_hpz_partition_size keeps a second copy of the weights on the GPUs, and offload_param takes them off: "
            "leave one out",
        ),
        (
            isinstance(hpz, int) and hpz > 1 and ranks.num_per_node % hpz != 0,
            f"zero_hpz_partition_size {hpz} does not divide the {ranks.num_per_node} processes of a node",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise UserError(f"{path}: {message}")


def check_section(config: dict[str, Any], path: str, keys: tuple[str, ...], schema: type[BaseModel]) -> None:
    """Let DeepSpeed's own schema check a nested section, and say what it says in one line."""
    section: Any = config
    for key in keys:
        section = section.get(key) or {}
    known = {name for field, info in schema.model_fields.items() for name in (field, info.alias) if name}
    check_known(section, known, f"key of {'.'.join(keys)} in {path}")
    try:
        schema(**copy.deepcopy(section))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([*keys, *map(str, first["loc"])])
        raise UserError(f"{path}: {place}: {first['msg']}, got {first['input']!r}") from None


def walk(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    leaves = []
    for key, value in config.items():
        leaves += walk(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return leaves
