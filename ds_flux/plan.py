"""What a run would take on given machines under every DeepSpeed config.  No GPU, no weights, no process group."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from ds_flux import UserError, assemble, progress
from ds_flux.activations import Pass
from ds_flux.config import Config
from ds_flux.outline import Outline
from ds_flux.zero import ds_config as zero_config
from ds_flux.zero.memory import (
    Memory,
    checkpoint_bytes,
    frozen_memory,
    sent_bytes,
    train_memory,
)

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on."""

    num_nodes: int
    gpus_per_node: int
    gpu_bytes: float
    """of one GPU, for tensors"""
    host_bytes: float
    """of one node; infinite where nobody said"""
    nvme_bytes: float
    """of one node"""
    device_is_host: bool = False
    """no accelerators: all of it is host memory"""

    @property
    def num_ranks(self) -> int:
        """Processes, one for each GPU."""
        return self.num_nodes * self.gpus_per_node

    @property
    def ranks(self) -> zero_config.Ranks:
        """The same, by node."""
        return zero_config.Ranks(self.num_ranks, self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What of a run's settings decides over memory and can be changed without changing what is learnt."""

    deepspeed_config: str
    gradient_checkpointing: bool
    train_batch_size: int
    gradient_accumulation_steps: int

    @staticmethod
    def of(config: Config) -> "Setting":
        """The run's own."""
        return Setting(**{name: config.flat()[name] for name in Setting.__annotations__})

    def applied(self, config: Config) -> Config:
        """The run with these."""
        batch = dict(train_batch_size=self.train_batch_size, gradient_accumulation_steps=self.gradient_accumulation_steps)
        return replace(
            config,
            zero=replace(config.zero, deepspeed_config=self.deepspeed_config),
            model=replace(config.model, gradient_checkpointing=self.gradient_checkpointing),
            train=replace(config.train, **batch),
        )

    def flags(self, other: "Setting") -> list[str]:
        """Of the command line, for what differs from `other`; the DeepSpeed config always."""
        differ = {name: value for name, value in vars(self).items() if value != vars(other)[name]}
        named = {"deepspeed_config": self.deepspeed_config} | differ
        words = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in named.items()}
        return [part for name, word in words.items() for part in (f"--{name}", word)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting on one machine, in bytes of one rank where nothing else is said."""

    setting: Setting
    zero_stage: int
    transformer: Memory
    text: Memory
    """the engine of the text encoder beside it"""
    small_bytes: int
    """frozen models that every rank has whole"""
    activations: Pass
    """of the largest micro batch"""
    encoding_bytes: int
    """while the autoencoder encodes it"""
    sent_bytes: int
    """in an optimizer step"""
    checkpoint_bytes: int
    """of all ranks together"""

    @property
    def device_bytes(self) -> int:
        """The peak on the accelerator: encoding, computing and stepping come one after the other."""
        others = self.text.weights + self.small_bytes
        encoding = replace(self.transformer, step=max(self.text.gathered, self.encoding_bytes, self.transformer.step))
        return encoding.device(self.activations.peak_bytes) + others

    @property
    def host_bytes(self) -> int:
        """In host memory."""
        return self.transformer.host + self.text.host

    @property
    def nvme_bytes(self) -> int:
        """On the node's disk."""
        return self.transformer.nvme + self.text.nvme

    def lacks(self, machine: Machine) -> dict[str, float]:
        """{what: bytes that are missing of it}; nothing where it fits."""
        on_device, in_host = self.device_bytes, self.host_bytes
        if machine.device_is_host:
            on_device, in_host = 0, on_device + in_host
        over = {
            "GPU memory": on_device - machine.gpu_bytes,
            "host memory of a node": in_host * machine.gpus_per_node - machine.host_bytes,
            "NVMe of a node": self.nvme_bytes * machine.gpus_per_node - machine.nvme_bytes,
        }
        return {what: num_bytes for what, num_bytes in over.items() if num_bytes > 0}

    def cost(self) -> tuple[float, ...]:
        """Smaller is faster, as far as one can know: what goes through a disk, the host, the network; then what is computed."""
        flops = self.activations.num_flops * self.setting.gradient_accumulation_steps
        is_offloaded = self.transformer.optimizer == 0
        return (self.nvme_bytes, is_offloaded, flops, self.sent_bytes, self.host_bytes, self.device_bytes)


@dataclass(frozen=True)
class Plan:
    """Every setting that was looked at."""

    outline: Outline
    machine: Machine
    own: Setting
    rows: list[Row]
    """with the run's own flags, under each DeepSpeed config; the first is the run's own"""
    refused: dict[str, str]
    """{DeepSpeed config: why it cannot be used with these flags}"""
    others: list[Row]
    """with gradient checkpointing, and with smaller micro batches"""

    @property
    def recommended(self) -> Row | None:
        """The one that should be fastest of those that fit: with the run's own flags, or else with others."""
        for rows in (self.rows, self.others):
            fitting = [row for row in rows if not row.lacks(self.machine)]
            if fitting:
                return min(fitting, key=Row.cost)
        return None

    @property
    def nearest(self) -> Row:
        """The one that lacks least, of all."""
        return min((*self.rows, *self.others), key=lambda row: sum(row.lacks(self.machine).values()))

    def command(self, row: Row, config_path: str | None) -> str:
        """The command line that starts it."""
        nodes = f"--hostfile launch/hostfile --num_nodes {self.machine.num_nodes} " if self.machine.num_nodes > 1 else ""
        config = f"--config {shlex.quote(config_path)}" if config_path else "[...]"
        flags = shlex.join(row.setting.flags(self.own))
        return f"deepspeed {nodes}--num_gpus {self.machine.gpus_per_node} --module ds_flux train {config} {flags}"


class Planner:
    """Rows of one run on one machine."""

    def __init__(self, config: Config, outline: Outline, machine: Machine):
        self.config, self.outline, self.machine = config, outline, machine

    def row(self, setting: Setting) -> Row:
        """Raises UserError where the setting cannot be."""
        config = setting.applied(self.config)
        bf16 = config.model.mixed_precision == "bf16"
        path, ranks = config.zero.deepspeed_config, self.machine.num_ranks
        ds_config = zero_config.train_config(path, config.optim, config.train, bf16, self.machine.ranks, self.outline.size)
        weights, ema = self.outline.weights, config.optim.ema_decay is not None
        text, text_sent = self.text()
        encodes = not config.data.cache_latents
        side = max(config.data.resolutions)
        return Row(
            setting=setting,
            zero_stage=zero_config.stage_of(ds_config),
            transformer=train_memory(
                weights, ds_config, ranks, ema, config.optim.ema_device == "cpu", self.machine.device_is_host
            ),
            text=text,
            small_bytes=weights.num_bytes * sum(self.outline.small) if encodes or not config.data.cache_text else 0,
            activations=self.measured(setting),
            encoding_bytes=self.outline.encoding_bytes(side, self.outline.batch_size(side)) if encodes else 0,
            sent_bytes=sent_bytes(weights, ds_config, ranks) + text_sent * config.train.gradient_accumulation_steps,
            checkpoint_bytes=checkpoint_bytes(weights, ds_config, ema),
        )

    def text(self) -> tuple[Memory, int]:
        """Of the engine of the text encoder, and what it receives in a micro step; it is gone where prompts are cached."""
        weights, config = self.outline.text, self.config
        if weights is None or config.data.cache_text:
            return Memory(), 0
        if not config.model.shard_text_encoder:
            return frozen_memory(weights, None, 1), 0
        ds_config = assemble.frozen_ds_config(config, weights.size, self.machine.ranks)
        ranks = self.machine.num_ranks
        return frozen_memory(weights, ds_config, ranks), weights.num_bytes * sum(weights.every) * (ranks - 1) // ranks

    def measured(self, setting: Setting) -> Pass:
        """The largest micro batch of the run."""
        outline = replace(self.outline, config=setting.applied(self.config))
        sizes, checkpointing = self.config.data.resolutions, setting.gradient_checkpointing
        passes = [outline.measure(side, outline.batch_size(side), checkpointing) for side in sizes]
        return max(passes, key=lambda one: one.peak_bytes).shared(self.config.zero.sequence_parallel)

    def plan(self, variants: list[str]) -> Plan:
        """Under each of these DeepSpeed configs and the run's own.  Raises UserError where the run's own cannot be."""
        own = Setting.of(self.config)
        rows, refused, others = [self.row(own)], {}, []
        for path in progress.bar(variants, desc="plan", unit="config", leave=False):
            if path == own.deepspeed_config:
                continue
            try:
                rows.append(self.row(replace(own, deepspeed_config=path)))
            except UserError as error:
                refused[path] = str(error)
        if all(row.lacks(self.machine) for row in rows):
            others = [self.row(smaller) for row in rows for smaller in smaller_ones(row.setting)]
        return Plan(self.outline, self.machine, own, rows, refused, others)


def smaller_ones(setting: Setting) -> list[Setting]:
    """The same global batch with less memory: gradient checkpointing, and then single images."""
    checkpointing = replace(setting, gradient_checkpointing=True)
    images = setting.train_batch_size * setting.gradient_accumulation_steps
    single = replace(checkpointing, train_batch_size=1, gradient_accumulation_steps=images)
    return [one for one in dict.fromkeys((checkpointing, single)) if one != setting]


def variants_in(folder: str) -> list[str]:
    """DeepSpeed configs for training in a folder.  Raises UserError where there is none."""
    paths = sorted(str(path) for path in Path(folder).glob("*.json") if not path.name.startswith("text_encoder"))
    if not paths:
        raise UserError(f"--ds_configs {folder}: no DeepSpeed configs (*.json) there")
    return paths
