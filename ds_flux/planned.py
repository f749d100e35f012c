"""The plan of a run that is starting, in a line, and beside it at the end what was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from ds_flux import outline, runtime
from ds_flux.config import Config
from ds_flux.metrics import host_memory_gib
from ds_flux.plan import GIB, Machine, Planner, Row, Setting, variants_in

LESS = 0.85  # of what a run takes that ran out of memory


@dataclass(frozen=True)
class Planned:
    """What rank 0 expects of a rank; `start` before anything is built."""

    row: Row | None
    trouble: str
    """why there is no plan"""
    start_gib: float
    """host memory of the process before it has anything of the run"""

    @staticmethod
    def start(config: Config) -> "Planned":
        """Plan the run on the processes that there are; whatever goes wrong with it does not end the run."""
        if runtime.env_rank():
            return Planned(None, "", 0.0)
        try:
            shapes = outline.draw(config)
            row = Planner(config, shapes, machine_here()).row(Setting.of(config))
            return Planned(row, "", host_memory_gib())
        except Exception as error:  # noqa: BLE001  (a plan is not worth a run)
            return Planned(None, " ".join(str(error).split())[:200], 0.0)

    def say(self) -> None:
        """The line at the start."""
        if self.row is None:
            runtime.log(f"no plan of memory: {self.trouble}")
            return
        runtime.log(
            f"planned for each process: {in_words(*self.expected(self.row))}, and {self.row.sent_bytes / GIB:.3g} GiB received "
            f"and {self.flops(self.row):.3g}e12 floating-point operations in a step"
        )

    def facts(self) -> str:
        """What is expected of a process, as JSON, for the run's folder."""
        device_gib, host_gib = self.expected(self.row) if self.row else (None, None)
        return json.dumps({"device_gib": device_gib, "host_gib": host_gib})

    def compare(self, peak_host_gib: float, peak_device_gib: float) -> None:
        """The line at the end.

        Args:
            peak_host_gib: of the process that has most, all of it; what it had at its start is taken off.
        """
        if self.row is not None:
            measured = in_words(peak_device_gib, peak_host_gib - self.start_gib)
            runtime.log(f"at the peak: {measured}; planned: {in_words(*self.expected(self.row))}")

    @staticmethod
    def expected(row: Row) -> tuple[float, float]:
        """GiB on the accelerator and in host memory; all of it is host memory where the device is the CPU."""
        device, host = row.device_bytes / GIB, row.host_bytes / GIB
        return (0.0, device + host) if runtime.device().type == "cpu" else (device, host)

    @staticmethod
    def flops(row: Row) -> float:
        """Of a process in an optimizer step, in 1e12."""
        return row.activations.num_flops * row.setting.gradient_accumulation_steps / 1e12


def machine_here(gpu_bytes: float = float("inf"), host_bytes: float = float("inf")) -> Machine:
    """The processes that there are, with what memory they may take."""
    return Machine(
        num_nodes=max(1, runtime.env_world_size() // runtime.env_local_world_size()),
        gpus_per_node=runtime.env_local_world_size(),
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        nvme_bytes=0.0,
        device_is_host=runtime.device().type == "cpu",
    )


def advice(config: Config) -> str:
    """What would take less memory, for a run that has run out of it: the plan's recommendation for much less than it takes.

    Never fails: there may be no plan, and then it says what may help in general.
    """
    general = "lower --train_batch_size or --resolution, add --gradient_checkpointing, or take a DeepSpeed config with offload"
    try:
        own = Setting.of(config)
        planner = Planner(config, outline.draw(config), machine_here())
        row = planner.row(own)
        gpus = planner.machine.gpus_per_node
        host_bytes = runtime.host_memory_bytes()
        if planner.machine.device_is_host:
            host_bytes = min(host_bytes, LESS * gpus * (row.device_bytes + row.host_bytes))
        planner.machine = machine_here(LESS * row.device_bytes, host_bytes)
        plan = planner.plan(variants_in(str(Path(own.deepspeed_config).parent)))
        better = plan.recommended or plan.nearest
    except Exception:  # noqa: BLE001  (the error itself must be told)
        return general
    if better.device_bytes + better.host_bytes >= row.device_bytes + row.host_bytes:
        return general
    flags = " ".join(better.setting.flags(own))
    return f"planned were {in_words(*Planned.expected(row))}; {flags} would take {in_words(*Planned.expected(better))}"


def in_words(device_gib: float, host_gib: float) -> str:
    """Both, or host memory alone."""
    host = f"{host_gib:.3g} GiB of host memory"
    return f"{device_gib:.3g} GiB on the accelerator and {host}" if device_gib else host
