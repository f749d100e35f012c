"""Webdataset archives made on the spot."""

import io
import tarfile
from pathlib import Path

from PIL import Image

from ds_flux import demo

Files = list[tuple[str, bytes]]  # (name, content), in their order


def write_tar(path: Path, files: Files) -> Path:
    """An archive of these files."""
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def jpg(color: tuple[int, int, int], size: tuple[int, int] = (40, 32)) -> bytes:
    """A picture in which every crop is another."""
    file = io.BytesIO()
    slope = Image.linear_gradient("L").rotate(90).resize(size)
    Image.merge("RGB", [slope.point(lambda value, top=top: value * top // 255) for top in color]).save(file, "JPEG")
    return file.getvalue()


def rows(first: int, num: int) -> Files:
    """Pictures with captions that the demo's tokenizers know."""
    files = []
    for number in range(first, first + num):
        files.append((f"{number:06d}.jpg", jpg((number * 9 % 256, 120, number * 31 % 256))))
        files.append((f"{number:06d}.txt", f"a handwritten {demo.DIGITS[number % 10]}".encode()))
    return files


def write_shards(folder: Path, num_shards: int, num_rows: int) -> str:
    """`num_rows` rows in each of several archives; returns what --data_files takes."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        write_tar(folder / f"shard-{shard:03d}.tar", rows(shard * num_rows, num_rows))
    return str(folder / "*.tar")
