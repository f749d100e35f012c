"""A run that is killed again and again, and what it comes to.

    python -m tests.benchmarks.kills [--kills 50] [--seed 0] [--folder out/benchmarks/kills]

SIGKILL hits one rank, or the launcher and all ranks, at a random instant; every second time while a checkpoint is being
written.  Then the run is started again with --resume_from_checkpoint latest.  At its end its weights must equal, bit for bit,
those of a run that nobody disturbed.
"""

import argparse
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from ds_flux import consolidate
from tests.distributed import ROOT, environment, launch_command

TIMEOUT_S = 300


def survive(argv: list[str], output_dir: Path, num_kills: int, seed: int) -> Counter[str]:
    """Start a training run until it has been killed so often and has then ended by itself; returns what was killed when."""
    chance, found = random.Random(seed), Counter[str]()
    log = output_dir.with_suffix(".log")
    while True:
        command = launch_command(2, "ds_flux", "train", *argv, "--resume_from_checkpoint", "latest")
        with log.open("a") as file:
            process = psutil.Popen(command, cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True)
        is_last = sum(found.values()) >= num_kills
        try:
            if is_last:
                assert process.wait(TIMEOUT_S) == 0, log.read_text()[-3000:]
                return found
            when = ["in a save", "at any time"][sum(found.values()) % 2]
            if wait_until(process, output_dir, when, chance):
                found[f"{kill(process, chance)}, {when}"] += 1
            else:
                assert process.wait(TIMEOUT_S) == 0, log.read_text()[-3000:]
                shutil.rmtree(output_dir)  # it ended before it was hit: once more from the start
        finally:
            everyone = [process, *process.children(recursive=True)] if process.is_running() else []
            for one in everyone:
                one.kill()
            psutil.wait_procs(everyone)


def wait_until(process: psutil.Popen, output_dir: Path, when: str, chance: random.Random) -> bool:
    """Until the instant to strike; whether the run still goes on."""
    before = newest_step(output_dir)
    is_reached: Callable[[], bool] = {
        "in a save": lambda: any(output_dir.glob("checkpoint-*.partial")),
        "at any time": lambda: newest_step(output_dir) > before,
    }[when]
    while process.poll() is None:
        if is_reached():
            time.sleep(chance.random() * (0.05 if when == "in a save" else 1.0))
            return process.poll() is None
        time.sleep(0.002)
    return False


def newest_step(output_dir: Path) -> int:
    """Of the checkpoints that have a name."""
    return max((int(path.name.split("-")[1]) for path in output_dir.glob("checkpoint-*") if path.suffix == ""), default=0)


def kill(process: psutil.Popen, chance: random.Random) -> str:
    """SIGKILL to one rank, after which the launcher ends the others, or to all processes at once."""
    launched = process.children(recursive=True)
    ranks = [one for one in launched if "--local_rank" in " ".join(one.cmdline())]
    if ranks and chance.random() < 0.5:
        chance.choice(ranks).kill()
        process.wait(TIMEOUT_S)
        return "a rank"
    for one in (process, *launched):
        one.kill()
    return "the launcher and all ranks"


def weights(output_dir: Path, step: int) -> bytes:
    """Of the last checkpoint, consolidated."""
    assert consolidate.main([str(output_dir / f"checkpoint-{step}"), str(output_dir / "whole")]) == 0
    return (output_dir / "whole/diffusion_pytorch_model.safetensors").read_bytes()


def main() -> None:
    """Print what was killed, and whether the weights are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks/kills"))
    args = parser.parse_args()
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["ds-flux", "demo", "--output_dir", str(folder / "demo"), "--autoencoder_steps", "20"], check=True)
    num_steps = 2 * args.kills + 4
    flags = ["--config", str(folder / "demo/run.yaml"), "--deepspeed_config", "ds_configs/zero3.json"]
    flags += ["--max_train_steps", str(num_steps), "--checkpointing_steps", "2", "--checkpoints_total_limit", "3"]
    for name, num in (("undisturbed", 0), ("killed", args.kills)):
        found = survive([*flags, "--output_dir", str(folder / name)], folder / name, num, args.seed)
    print("\n".join(f"{count:4} x {what}" for what, count in found.items()))
    equal = weights(folder / "undisturbed", num_steps) == weights(folder / "killed", num_steps)
    print("the weights are " + ("equal, bit for bit" if equal else "NOT EQUAL"))


if __name__ == "__main__":
    main()
