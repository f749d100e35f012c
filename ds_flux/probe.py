"""What one machine is like, as one line of JSON: `ds-flux doctor` runs this on every node.

    python -m ds_flux.probe facts '{"output_dir": "out", "models": ["/models/flux"], "master_port": 29500}'
    python -m ds_flux.probe ops '["cpu_adam"]'
    deepspeed --hostfile H --no_local_rank --module ds_flux.probe network '{"num_bytes": 16777216, "output_dir": "out"}'

A package that is missing is a fact as well: each is looked at by itself.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ds_flux import __version__

MARK = "ds_flux.probe: "
"""begins the line with the answer; libraries print others"""
PACKAGES = ("torch", "deepspeed", "diffusers", "transformers", "peft", "datasets")
HEAD_BYTES = 1 << 16
NUM_TIMES, NUM_WARM = 5, 2


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that takes a moment only.

    Args:
        request: output_dir; models, folders or hub ids; master_port, or None where rank 0 is not here.
    """
    return {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
        "code": {"version": __version__, "digest": digest_of_code(), "folder": str(Path(__file__).parent)},
        "accelerator": accelerator(),
        "memory_gib": memory_gib(),
        "disk": disk(Path(request["output_dir"])),
        "port": None if request["master_port"] is None else port(request["master_port"]),
        "compiler": shutil.which(os.environ.get("CXX", "c++")),
        "ninja": shutil.which("ninja"),
        "models": {name: model_files(name) for name in request["models"]},
    }


def version_of(package: str) -> str | None:
    """As it is installed, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def digest_of_code() -> str:
    """Of the sources of this package."""
    digest, root = hashlib.blake2b(digest_size=8), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def accelerator() -> dict[str, Any]:
    """What DeepSpeed would run on; on a CPU as many processes as there are cores."""
    try:
        from deepspeed.accelerator import get_accelerator

        found = get_accelerator()
        name = found.device_name()
        count = len(os.sched_getaffinity(0)) if name == "cpu" else found.device_count()
        memory = [] if name == "cpu" else [found.total_memory(index) / 2**30 for index in range(count)]
    except Exception as error:  # noqa: BLE001  (a driver may fail in any way)
        return {"name": None, "num": 0, "memory_gib": [], "error": in_one_line(error)}
    return {"name": name, "num": count, "memory_gib": memory, "error": None}


def memory_gib() -> float:
    """Of the host, what is available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def disk(folder: Path) -> dict[str, Any]:
    """Where a folder lies, or would lie: what is free, and why it cannot be written, if so."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    beside = there / f".ds_flux-probe-{socket.gethostname()}-{os.getpid()}"
    try:
        beside.touch()
        beside.unlink()
        error = None
    except OSError as raised:
        error = raised.strerror
    return {"free_gib": shutil.disk_usage(there).free / 2**30, "error": error}


def port(number: int) -> str | None:
    """Why nobody can listen on it, if so."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", number))
            probe.listen()
        except OSError as error:
            return error.strerror
    return None


def model_files(name: str) -> dict[str, str] | None:
    """{file: its size and a digest of its beginning} of a model; None where it is not on this machine."""
    folder = Path(name) if Path(name).is_dir() else cached(name)
    if folder is None:
        return None
    paths = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and not path.relative_to(folder).parts[0].startswith(".")
    ]
    return {str(path.relative_to(folder)): size_and_head(path) for path in paths}


def cached(hub_id: str) -> Path | None:
    """Where a model of the hub was downloaded to."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, local_files_only=True))
    except Exception:  # noqa: BLE001  (no such package, id or download)
        return None


def size_and_head(path: Path) -> str:
    """Cheap, and yet it differs between two models: weight files begin with names and shapes, and end with values."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(max(0, size - HEAD_BYTES))
            return f"{size} bytes, {hashlib.blake2b(head + file.read(), digest_size=6).hexdigest()}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def ops(names: list[str]) -> dict[str, str | None]:
    """Build and load DeepSpeed's kernels; {name: what is wrong with it, or None}."""
    return {name: op(name) for name in names}


def op(name: str) -> str | None:
    """Why a kernel cannot be had, if so."""
    try:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        builder = ALL_OPS[name]
        if not builder.is_compatible(verbose=False):
            return f"DeepSpeed finds {name} incompatible with this machine"
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001  (compilers fail in many ways)
        return in_one_line(error)
    return None


def network(request: dict[str, Any]) -> dict[str, Any]:
    """Time an all-reduce over all processes of a launch, and see whether they share a folder.  A collective.

    Args:
        request: num_bytes to reduce; output_dir.
    """
    import torch

    from ds_flux import disks, runtime

    runtime.init(timeout_s=60)
    num_bytes = request["num_bytes"]
    values = torch.ones(num_bytes // 4, device=runtime.device())
    taken_s = []
    for _ in range(NUM_WARM + NUM_TIMES):
        runtime.barrier()
        began_s = time.perf_counter()
        torch.distributed.all_reduce(values)
        values.sum().item()  # the device has done it
        taken_s.append(time.perf_counter() - began_s)
    size, seconds = runtime.world_size(), sorted(taken_s[NUM_WARM:])[NUM_TIMES // 2]
    is_shared = disks.look(Path(request["output_dir"])).is_shared
    runtime.shutdown()
    # each process sends and receives this much at least, whatever the algorithm
    moved = 2 * (size - 1) / size * num_bytes
    return {"num": size, "seconds": seconds, "gb_per_s": moved / seconds / 1e9, "is_shared": is_shared}


def in_one_line(error: Exception) -> str:
    """What is wrong, in short."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main(argv: list[str]) -> int:
    """Print the answer."""
    action = {"facts": facts, "ops": ops, "network": network}[argv[0]]
    answer = action(json.loads(argv[1]))  # type: ignore[operator]
    if int(os.environ.get("RANK", 0)) == 0:
        print(MARK + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
