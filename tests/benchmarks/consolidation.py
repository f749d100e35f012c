"""Time and memory of `ds-flux consolidate`, beside DeepSpeed's zero_to_fp32 and a bare dd of as many bytes.

    python -m tests.benchmarks.consolidation [--gigabytes 1 4] [--repeats 3] [--folder out/benchmarks]

Both write fp32 safetensors of the same checkpoint (ZeRO-3, two ranks, DeepSpeed's layout with both Adam moments, random
numbers), start-up included; the results are compared bit for bit.  Memory is the peak of RssAnon, the operating system's
count of what is not a mapped file, looked up every 5 ms.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors import safe_open

from ds_flux.manifest import Manifest

NUM_RANKS = 2


def write_checkpoint(folder: Path, num_bytes: int) -> None:
    """A checkpoint of `num_bytes` of fp32 weights, in matrices like those of FLUX.1's blocks."""
    shapes = OrderedDict()
    left = num_bytes // 4
    while left > 0:
        rows = min(12288, math.ceil(left / 3072)) if len(shapes) % 3 == 2 else min(3072, math.ceil(left / 3072))
        shapes[f"blocks.{len(shapes)}.weight"] = torch.Size((rows, 3072))
        shapes[f"blocks.{len(shapes)}.bias"] = torch.Size((3071,))
        left -= rows * 3072 + 3071
    flat_numel = sum(math.ceil(shape.numel() / NUM_RANKS) for shape in shapes.values())
    folder.mkdir(parents=True)
    for rank in range(NUM_RANKS):
        model = {
            "module": {}, "buffer_names": [], "param_shapes": [shapes], "frozen_param_shapes": None, "shared_params": {},
            "frozen_param_fragments": None, "ds_version": "0.19.8", "ds_config": {}, "dp_world_size": NUM_RANKS,
        }  # fmt: skip
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat, exp_avg, exp_avg_sq = (torch.rand(flat_numel) for _ in range(3))
        optimizer = {
            "zero_stage": ZeroStageEnum.weights, "partition_count": NUM_RANKS, "fp32_flat_groups": [flat],
            "optimizer_state_dict": {"state": {0: {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}, "param_groups": []},
        }  # fmt: skip
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    manifest = Manifest(
        step=1, family="", transformer_class="", transformer_config={}, base_fingerprint="", lora=None, zero_stage=3,
        world_size=NUM_RANKS, data={}, files={path.name: path.stat().st_size for path in folder.iterdir()},
    )  # fmt: skip
    (folder / "ds_flux.json").write_text(json.dumps(vars(manifest)))


def run(command: list[str]) -> tuple[float, float]:
    """Wall seconds and the peak of RssAnon in MB."""
    began, peak_kb = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
        peak_kb = max([peak_kb, *(int(line.split()[1]) for line in lines)])
        time.sleep(0.005)
    assert process.returncode == 0, process.stderr.read().decode()[-2000:]
    return time.perf_counter() - began, peak_kb / 1000


def same_tensors(ours: Path, theirs: Path) -> bool:
    """Whether two folders of safetensors hold the same tensors, bit for bit."""

    def files(folder: Path) -> dict[str, Path]:
        found = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    a, b = files(ours), files(theirs)
    if a.keys() != b.keys():
        return False
    for name in a:
        with safe_open(a[name], "pt") as left, safe_open(b[name], "pt") as right:
            if not torch.equal(left.get_tensor(name), right.get_tensor(name)):
                return False
    return True


def main() -> None:
    """Alternate the tools; print every run and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    for gigabytes in options.gigabytes:
        folder = options.folder.resolve() / f"consolidation-{gigabytes:g}"
        shutil.rmtree(folder, ignore_errors=True)
        write_checkpoint(folder / "checkpoint-1", int(gigabytes * 10**9))
        (folder / "latest").write_text("checkpoint-1")
        outputs = {name: folder / name for name in ("ours", "zero_to_fp32", "dd")}
        zero_to_fp32 = "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as f; import sys;"
        commands = {
            "ours": [sys.executable, "-m", "ds_flux", "consolidate", str(folder), str(outputs["ours"]), "--dtype", "fp32",
                     "--max_shard_size", "5GB"],
            "zero_to_fp32": [sys.executable, "-c", f"{zero_to_fp32} f(sys.argv[1], sys.argv[2], safe_serialization=True)",
                             str(folder), str(outputs["zero_to_fp32"])],
            "dd": ["dd", "if=/dev/zero", f"of={outputs['dd']}", "bs=4M", f"count={int(gigabytes * 238)}", "conv=fsync"],
        }  # fmt: skip
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for repeat in range(options.repeats):
            for name, command in commands.items():
                shutil.rmtree(outputs[name], ignore_errors=True)
                outputs["dd"].unlink(missing_ok=True)
                subprocess.run(["sync"], check=True)
                results[name].append(run(command))
                print(
                    f"{gigabytes:g} GB {repeat} {name:12} {results[name][-1][0]:6.2f} s {results[name][-1][1]:7.0f} MB",
                    flush=True,
                )
        assert same_tensors(outputs["ours"], outputs["zero_to_fp32"])
        best = {name: min(seconds for seconds, _ in rows) for name, rows in results.items()}
        peak = {name: max(megabytes for _, megabytes in rows) for name, rows in results.items()}
        pairs = [ours / theirs for (ours, _), (theirs, _) in zip(results["ours"], results["zero_to_fp32"])]
        print(
            f"{gigabytes:g} GB: equal bit for bit; wall against zero_to_fp32: median of pairs {statistics.median(pairs):.2f}, "
            f"best to best {best['ours'] / best['zero_to_fp32']:.2f}; best to best of dd {best['ours'] / best['dd']:.2f}; "
            f"peak RssAnon {peak['ours']:.0f} MB against {peak['zero_to_fp32']:.0f} MB",
            flush=True,
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
