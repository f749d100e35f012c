"""Trials of a run with other settings: short runs of their own, through the real launcher, and the file that remembers them."""

import csv
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_flux.config import Config
from ds_flux.manifest import write_atomically
from ds_flux.plan import Machine, Setting
from ds_flux.runtime import free_port, log
from ds_flux.sections import LogConfig, ValidationConfig

ERROR = re.compile(r"\b\w+(Error|Exception): ")  # the last line of a traceback
TAIL = 300  # characters of what a failed trial said


@dataclass(frozen=True)
class Candidate:
    """Settings to try."""

    setting: Setting
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    """what the DeepSpeed config's zero_optimization section has instead"""

    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        config = json.loads(Path(self.setting.deepspeed_config).read_text())
        config.setdefault("zero_optimization", {}).update(self.zero)
        return config

    def key(self, num_steps: int) -> str:
        """What a trial of it is found by again."""
        return json.dumps([asdict(self.setting), self.zero, num_steps], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a trial."""

    key: str
    deepspeed_config: str
    gradient_checkpointing: bool
    train_batch_size: int
    gradient_accumulation_steps: int
    zero: dict[str, Any]
    num_steps: int
    status: str
    """ok, out of memory, over the bound, timed out, or failed"""
    images_per_s: float = 0.0
    peak_gib: float = 0.0
    """of the process that has most: on its accelerator, or in host memory where there is none"""
    wall_s: float = 0.0
    said: str = ""
    """the end of what a failed trial said"""

    @property
    def words(self) -> str:
        """As a line tells it."""
        micro = f"{self.gradient_accumulation_steps} x {self.train_batch_size} images"
        checkpointing = " with gradient checkpointing" if self.gradient_checkpointing else ""
        came_to = f"{self.images_per_s:.3g} images/s with {self.peak_gib:.3g} GiB" if self.status == "ok" else self.status
        settings = f"{self.deepspeed_config}{f' {self.zero}' if self.zero else ''}, {micro}{checkpointing}"
        return f"{settings}, {self.num_steps} steps: {came_to}, in {self.wall_s:.0f} s"


class Trials:
    """Runs trials, and keeps their results in a file: what is there already is not run again."""

    def __init__(self, config: Config, machine: Machine, folder: Path, hostfile: str | None, limit_s: int, bound_gib: float):
        self.config, self.machine, self.folder = config, machine, folder
        self.hostfile, self.limit_s, self.bound_gib = hostfile, limit_s, bound_gib
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "trials.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.results = {result.key: result for result in (Result(**json.loads(line)) for line in lines)}
        data = config.data if config.data.cache_dir else replace(config.data, cache_dir=f"{config.run.output_dir}/cache")
        # a trial neither measures nor shows what it learns, and has a line of figures for each step
        config = replace(config, data=data, validation=ValidationConfig(), log=LogConfig())
        (folder / "run.yaml").write_text(config.to_yaml())

    def speed(self, candidate: Candidate, num_steps: int) -> float:
        """Images per second; 0 where the trial failed."""
        key = candidate.key(num_steps)
        if key not in self.results:
            self.results[key] = self.run(candidate, num_steps)
            lines = [json.dumps(asdict(result)) + "\n" for result in self.results.values()]
            write_atomically(self.path, "".join(lines))
            log(f"trial {len(self.results)}: {self.results[key].words}")
        result = self.results[key]
        return result.images_per_s if result.status == "ok" else 0.0

    def run(self, candidate: Candidate, num_steps: int) -> Result:
        """One trial, in a throw-away folder."""
        folder, path = self.folder / "trial", self.folder / "trial.json"
        shutil.rmtree(folder, ignore_errors=True)
        path.write_text(json.dumps(candidate.ds_config()))
        began_s = time.monotonic()
        status, said = self.launch(self.command(candidate, path, folder, num_steps))
        result = Result(
            key=candidate.key(num_steps),
            **asdict(candidate.setting),
            zero=candidate.zero,
            num_steps=num_steps,
            status=status,
            wall_s=round(time.monotonic() - began_s, 1),
            said="" if status == "ok" else " ".join(said.split())[-TAIL:],
        )
        lines = folder / "logs/metrics.jsonl"
        rows = [json.loads(line) for line in lines.read_text().splitlines()] if status == "ok" else []
        shutil.rmtree(folder, ignore_errors=True)
        return self.judged(result, rows) if rows else result

    def judged(self, result: Result, rows: list[dict[str, float]]) -> Result:
        """With its figures: the median of all steps but the first, and the peak."""
        speed = statistics.median(row["images_per_s"] for row in rows[1:] or rows)
        peak_gib = rows[-1]["peak_device_memory_gib"] or rows[-1]["peak_host_memory_gib"]
        status = "over the bound" if peak_gib > self.bound_gib else "ok"
        return replace(result, images_per_s=round(speed, 4), peak_gib=round(peak_gib, 4), status=status)

    def command(self, candidate: Candidate, ds_config: Path, output_dir: Path, num_steps: int) -> list[str]:
        """Of one trial."""
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(self.machine.gpus_per_node)]
        launcher += ["--hostfile", self.hostfile, "--num_nodes", str(self.machine.num_nodes)] if self.hostfile else []
        own = {
            **asdict(candidate.setting), "deepspeed_config": ds_config, "output_dir": output_dir, "max_train_steps": num_steps,
            "save_nothing": True, "resume_from_checkpoint": None,
        }  # fmt: skip
        flags = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in own.items() if value]
        flags += [f"--{name}=false" for name, value in own.items() if value is False]
        launch = ["--master_port", str(free_port()), "--module", "ds_flux", "train", "--config", str(self.folder / "run.yaml")]
        return [*launcher, *launch, *flags]

    def launch(self, command: list[str]) -> tuple[str, str]:
        """How it ended, and what it said; whatever it is, none of its processes stays."""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, errors="replace"
        )
        try:
            said, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            return "timed out", f"no end after {self.limit_s} s"
        finally:
            end(process)
        if process.returncode == 0:
            return "ok", said
        lines = said.splitlines()
        errors = [one for one in lines if "ds-flux: error:" in one] or [one for one in lines if ERROR.search(one)] or [said]
        return "out of memory" if "ran out of memory" in said else "failed", errors[0]

    def write_table(self) -> Path:
        """All trials as CSV."""
        path = self.folder / "trials.csv"
        names = [name for name in Result.__annotations__ if name != "key"]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(asdict(result) for result in self.results.values())
        return path


def end(process: subprocess.Popen) -> None:
    """End what is left of a trial: the launcher's process group, and its ranks, which the launcher ends on SIGTERM."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
