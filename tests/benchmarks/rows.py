"""Memory of a rank by the number of rows: what the data take beside the models.

    python -m tests.benchmarks.rows [--folder out/benchmarks/rows] [--rows 1000 100000]

Each figure is a process of its own that opens the data as a run does, makes the schedule of two epochs and takes batches from
its first epoch; anonymous memory at its end.
"""

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
KINDS = ("table", "buckets", "folder", "stream", "cached")
BATCH, NUM_STEPS = 16, 20


def write(folder: Path, num_rows: int) -> None:
    """The same small picture in every row: as a table, as archives, as a folder, and as a cache."""
    import datasets
    import torch

    from ds_flux.data.cache import LatentCache
    from ds_flux.data.store import Store
    from tests.tars import jpg, write_tar

    picture = jpg((9, 99, 199))
    folder.mkdir(parents=True)
    per_file = num_rows // 10
    for number in range(10):
        table = datasets.Dataset.from_dict({"jpg": [picture] * per_file, "txt": [f"a picture {number}"] * per_file})
        table.to_parquet(folder / f"{number}.parquet")
        files = [
            (f"{number}-{row}.{end}", content) for row in range(per_file) for end, content in (("jpg", picture), ("txt", b"a"))
        ]
        write_tar(folder / f"{number}.tar", files)
    images = folder / "images"
    images.mkdir()
    for row in range(num_rows):
        (images / f"{row:07d}.jpg").write_bytes(picture)
    cache = LatentCache(Store(folder / "cache"))
    with cache.store.writer("benchmark") as writer:
        for row in range(num_rows):
            cache.write(writer, (row, 0), "0" * 32, [torch.zeros(16, 2, 2)], None, None)


def take(kind: str, folder: Path, num_rows: int) -> None:
    """Open one kind of data and print the process's memory."""
    from ds_flux.config import DataConfig
    from ds_flux.data.cache import LatentCache
    from ds_flux.data.images import Batches, SampleDataset
    from ds_flux.data.schedule import Schedule, one_shape
    from ds_flux.data.shapes import Shapes, look_at_sizes
    from ds_flux.data.sources import open_source
    from ds_flux.data.store import Store
    from ds_flux.data.stream import StreamSchedule, open_stream
    from tests.pairs import rules_of

    files = {"data_files": str(folder / ("*.tar" if kind == "stream" else "*.parquet")), "caption_column": "txt"}
    source = {"instance_data_dir": str(folder / "images"), "instance_prompt": "a"} if kind == "folder" else files
    config = DataConfig(
        **source, image_column="jpg", resolution=32, streaming=kind == "stream", use_aspect_ratio_buckets=kind == "buckets"
    )
    rules = rules_of(config, 16)
    plan = dict(seed=0, micro_batch_size=BATCH, gradient_accumulation_steps=1, dp_size=1, dp_rank=0)
    if kind == "stream":
        data, schedule = (stream := open_stream(config, 0, ())), StreamSchedule(**plan, stream=stream)
        shapes = Shapes(rules.buckets, [], [], [], 0)
    else:
        data = open_source(config)
        shapes = Shapes(rules.buckets, *look_at_sizes(data, config, rules)[:2], [], 0)
        shape_of = one_shape if shapes.are_one else partial(shapes.of, config=config, seed=0, encoder="text_encoder")
        schedule = Schedule(**plan, num_samples=num_rows, shape_of=shape_of)
    cache = LatentCache(Store(folder / "cache")) if kind == "cached" else None
    samples = SampleDataset(data, config, 0, rules, partial(shapes.sizes, seed=0), cache)
    for _ in Batches(samples, schedule.micro_batches(0, NUM_STEPS)):
        pass
    lines = Path("/proc/self/status").read_text().splitlines()
    print(int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024)


def main() -> None:
    """A table of MiB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks/rows"))
    parser.add_argument("--rows", type=int, nargs=2, default=[1000, 100_000])
    parser.add_argument("--kind", choices=KINDS)
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.kind:
        take(args.kind, folder, args.rows[0])
        return
    shutil.rmtree(folder, ignore_errors=True)
    for num_rows in args.rows:
        write(folder / str(num_rows), num_rows)
    print(f"{'':10}" + "".join(f"{num_rows:>12,}" for num_rows in args.rows) + f"{'bytes a row':>14}")
    for kind in KINDS:
        mib = []
        for num_rows in args.rows:
            command = [sys.executable, "-m", "tests.benchmarks.rows", "--kind", kind, "--folder", str(folder / str(num_rows))]
            done = subprocess.run([*command, "--rows", str(num_rows), "0"], capture_output=True, text=True, check=True)
            mib.append(float(done.stdout.split()[-1]))
        per_row = (mib[1] - mib[0]) * 2**20 / (args.rows[1] - args.rows[0])
        print(f"{kind:10}" + "".join(f"{one:12.0f}" for one in mib) + f"{per_row:14.0f}")


if __name__ == "__main__":
    main()
