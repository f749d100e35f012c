"""Images and captions as people have them: what comes out, or the reason why nothing does."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from ds_flux.config import DataConfig
from ds_flux.data.decode import BadSample, decode, open_image, upright_size
from tests.pairs import dataset_of

LIMIT = 100_000
GREEN, RED, BLUE, BLACK, WHITE = (0, 255, 0), (255, 0, 0), (0, 0, 255), (0, 0, 0), (255, 255, 255)
SIZE = (16, 8)
Halves = tuple[tuple[int, int, int], tuple[int, int, int]]


# ---------------------------------------------------------------------------------------------------------------------
# files: each function writes a picture of two halves


def halves(mode: str, left: Any, right: Any) -> Image.Image:
    image = Image.new(mode, SIZE, left)
    image.paste(right, (SIZE[0] // 2, 0, *SIZE))
    return image


def saved(mode: str, left: Any, right: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: halves(mode, left, right).save(path, **options)


def stored(left: float, right: float, kind: str) -> Callable[[Path], None]:
    values = np.full(SIZE[::-1], left, dtype=kind)
    values[:, SIZE[0] // 2 :] = right
    return lambda path: Image.fromarray(values).save(path)


def palette(path: Path, **options: Any) -> None:
    image = halves("P", 0, 1)
    image.putpalette([*RED, *BLUE])
    image.save(path, **options)


def frames(mode: str, kind: str) -> Callable[[Path], None]:
    first, second = halves("RGB", RED, BLUE), halves("RGB", GREEN, GREEN)
    return lambda path: first.convert(mode).save(path, kind, save_all=True, append_images=[second.convert(mode)])


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(size: tuple[int, int], bits: int, kind: int, rows: bytes, before: bytes = b"", behind: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", *size, bits, kind, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + pixels + behind + chunk(b"IEND", b"")


def png_rows(left: bytes, right: bytes) -> bytes:
    return (b"\0" + left * (SIZE[0] // 2) + right * (SIZE[0] // 2)) * SIZE[1]


def tiff(data: bytes, bits: int, photometric: int) -> bytes:
    """One strip, one channel; what PIL does not write itself."""
    tags = {256: SIZE[0], 257: SIZE[1], 258: bits, 259: 1, 262: photometric, 273: 0, 277: 1, 278: SIZE[1], 279: len(data)}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4) + data


def twelve_bits(left: int, right: int) -> bytes:
    def pairs(value: int) -> bytes:
        return (value << 12 | value).to_bytes(3, "big") * (SIZE[0] // 4)

    return (pairs(left) + pairs(right)) * SIZE[1]


def of_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data)


def cut(mode: str, kind: str, share: float) -> Callable[[Path], None]:
    """The beginning of a file of noise."""

    def write(path: Path) -> None:
        file = io.BytesIO()
        Image.effect_noise((64, 64), 90).convert(mode).save(file, kind)
        path.write_bytes(file.getvalue()[: int(len(file.getvalue()) * share)])

    return write


def lab(path: Path) -> None:
    """sRGB's red is L 54.3, a 80.8, b 69.9 under D50; then white."""
    image = Image.merge("LAB", [halves("L", 138, 255), halves("L", 128 + 81, 128), halves("L", 128 + 70, 128)])
    image.save(path)


def icon_with_a_larger_image_inside(path: Path) -> None:
    inside = png((1000, 1000), 8, 0, (b"\0" + bytes(1000)) * 1000)
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inside), 22)
    path.write_bytes(struct.pack("<HHH", 0, 1, 1) + entry + inside)


def with_damaged_exif(path: Path) -> None:
    halves("RGB", RED, BLUE).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\x07" * 9)


GREYS: Halves = ((64, 64, 64), (191, 191, 191))
RED_BLUE: Halves = (RED, BLUE)
KINDS: dict[str, tuple[str, Callable[[Path], None], Halves | str]] = {
    # name: (ending, writer, colours of both halves over green, or the reason)
    "rgb": ("png", saved("RGB", RED, BLUE), RED_BLUE),
    "jpeg": ("jpg", saved("RGB", RED, BLUE, quality=95, subsampling=0), RED_BLUE),
    "grey": ("png", saved("L", 64, 191), GREYS),
    "grey jpeg": ("jpg", saved("L", 64, 191), GREYS),
    "grey and alpha": ("png", saved("LA", (64, 255), (0, 0)), ((64, 64, 64), GREEN)),
    "grey with a transparent value": ("png", saved("L", 64, 191, transparency=191), ((64, 64, 64), GREEN)),
    "one bit": ("png", saved("1", 0, 1), (BLACK, WHITE)),
    "one bit, white transparent": ("png", saved("1", 0, 1, transparency=1), (BLACK, GREEN)),
    "one bit fax": ("tif", saved("1", 0, 1, compression="group4"), (BLACK, WHITE)),
    "two bits": ("png", of_bytes(png(SIZE, 2, 0, (b"\0" + b"\x55\x55" + b"\xaa\xaa") * 8)), ((85,) * 3, (170,) * 3)),
    "16 bits": ("png", stored(64 * 257, 191 * 257, "uint16"), GREYS),
    "16 bits with a transparent value": (
        "png",
        of_bytes(png(SIZE, 16, 0, png_rows(b"\x40\x40", b"\xbf\xbf"), before=chunk(b"tRNS", b"\xbf\xbf"))),
        ((64, 64, 64), GREEN),
    ),
    "16 bits and alpha": ("png", of_bytes(png(SIZE, 16, 4, png_rows(b"\x40\x40\xff\xff", bytes(4)))), ((64, 64, 64), GREEN)),
    "16 bits of colour": ("png", of_bytes(png(SIZE, 16, 2, png_rows(b"\xff\xff\0\0\0\0", b"\0\0\0\0\xff\xff"))), RED_BLUE),
    "16 bits tiff": ("tif", stored(64 * 257, 191 * 257, "uint16"), GREYS),
    "16 bits tiff, big end first": ("tif", lambda path: halves("I;16B", 64 * 257, 191 * 257).save(path), GREYS),
    "16 bits tiff, white is zero": ("tif", of_bytes(tiff(halves("I;16", 191 * 257, 64 * 257).tobytes(), 16, 0)), GREYS),
    "12 bits tiff": ("tif", of_bytes(tiff(twelve_bits(1028, 3068), 12, 1)), GREYS),
    "16 bits pgm": ("pgm", of_bytes(b"P5 2 1 65535\n" + struct.pack(">2H", 64 * 257, 191 * 257)), GREYS),
    "12 bits pgm": ("pgm", of_bytes(b"P5 2 1 4095\n" + struct.pack(">2H", 1028, 3068)), GREYS),
    "32 bits of 16": ("tif", stored(64 * 257, 191 * 257, "int32"), GREYS),
    "32 bits of 8": ("tif", stored(64, 191, "int32"), GREYS),
    "32 bits of 12": ("tif", stored(0, 4000, "int32"), "its values are 0 to 4000: expected 0 to 255 or 0 to 65535"),
    "32 bits below zero": ("tif", stored(-70, 90, "int32"), "its values are -70 to 90"),
    "float up to 1": ("tif", stored(64 / 255, 191 / 255, "float32"), GREYS),
    "float up to 255": ("tif", stored(64, 191, "float32"), GREYS),
    "float, resampled": ("tif", stored(-0.002, 1.002, "float32"), (BLACK, WHITE)),
    "float, more than white": ("tif", stored(0.5, 3.0, "float32"), "its values are 0.5 to 3: expected 0 to 1 or"),
    "float, not a number": ("tif", stored(0.5, float("nan"), "float32"), "its values are nan to nan"),
    "palette": ("png", palette, RED_BLUE),
    "palette, one transparent": ("png", lambda path: palette(path, transparency=1), (RED, GREEN)),
    "palette, half transparent": ("png", lambda path: palette(path, transparency=b"\xff\x80"), (RED, (0, 127, 128))),
    "palette bmp": ("bmp", palette, RED_BLUE),
    "gif": ("gif", palette, RED_BLUE),
    "gif, one transparent": ("gif", lambda path: palette(path, transparency=0), (GREEN, BLUE)),
    "rgba": ("png", saved("RGBA", (*RED, 255), (*RED, 0)), (RED, GREEN)),
    "rgba, half": ("webp", saved("RGBA", (*RED, 255), (*RED, 128), lossless=True), (RED, (128, 127, 0))),
    "rgba tiff": ("tif", saved("RGBA", (*RED, 255), (*RED, 0)), (RED, GREEN)),
    "rgba tga": ("tga", saved("RGBA", (*RED, 255), (*RED, 0)), (RED, GREEN)),
    "rgb with a transparent colour": ("png", saved("RGB", RED, BLUE, transparency=BLUE), (RED, GREEN)),
    "cmyk jpeg": ("jpg", saved("CMYK", (0, 255, 255, 0), (0, 0, 0, 0), quality=95), (RED, WHITE)),
    "cmyk tiff": ("tif", saved("CMYK", (255, 255, 0, 0), (0, 0, 0, 255)), (BLUE, BLACK)),
    "ycbcr": ("tif", saved("YCbCr", (76, 85, 255), (29, 255, 107)), ((254, 0, 0), (0, 0, 254))),
    "lab": ("tif", lab, ((255, 0, 0), WHITE)),
    "animated gif": ("gif", frames("RGB", "GIF"), RED_BLUE),
    "animated png": ("png", frames("RGB", "PNG"), RED_BLUE),
    "animated webp": ("webp", lambda path: frames("RGB", "WEBP")(path), RED_BLUE),
    "two pages": ("tif", frames("RGB", "TIFF"), RED_BLUE),
    "two jpegs in one": ("jpg", frames("RGB", "MPO"), RED_BLUE),
    "avif": ("avif", saved("RGB", RED, BLUE, quality=95, subsampling="4:4:4"), RED_BLUE),
    "jpeg 2000": ("jp2", saved("RGB", RED, BLUE), RED_BLUE),
    "icon": ("ico", lambda path: Image.new("RGBA", (16, 16), RED).save(path, sizes=[(16, 16)]), (RED, RED)),
    "wrong ending": ("jpg", lambda path: halves("RGB", RED, BLUE).save(path, "PNG"), RED_BLUE),
    "damaged exif": ("jpg", with_damaged_exif, RED_BLUE),
    "empty": ("png", of_bytes(b""), "the file is empty"),
    "text": ("png", of_bytes(b"no image"), "it is no image"),
    "html": ("jpg", of_bytes(b"<html>404</html>" * 99), "it is no image"),
    "truncated jpeg": ("jpg", cut("RGB", "JPEG", 0.5), "damaged or truncated: image file is truncated"),
    "truncated png": ("png", cut("RGB", "PNG", 0.5), "damaged or truncated: "),
    "truncated png header": ("png", of_bytes(b"\x89PNG\r\n\x1a\n" + bytes(7)), "damaged"),
    "truncated gif": ("gif", cut("P", "GIF", 0.5), "damaged or truncated: "),
    "truncated webp": ("webp", cut("RGB", "WEBP", 0.5), "damaged"),
    "truncated tiff": ("tif", cut("RGB", "TIFF", 0.9), "damaged"),
    "flipped bits": ("png", of_bytes(png(SIZE, 8, 2, b"").replace(b"IDAT", b"IDAU")), "damaged"),
    "zero width": ("png", of_bytes(png((0, 8), 8, 2, b"")), "it is no image"),
    "larger than allowed": ("png", saved("RGB", RED, BLUE), "more than --max_image_pixels 100 pixels"),
    "a bomb": ("png", of_bytes(png((60000, 60000), 8, 2, b"")), "more than --max_image_pixels 100000"),
    "a bomb in an icon": ("ico", icon_with_a_larger_image_inside, "more than --max_image_pixels 100000"),
    "postscript": ("eps", saved("RGB", RED, BLUE), "PostScript is a program, and is not run"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_files(tmp_path: Path, name: str) -> None:
    ending, write, expected = KINDS[name]
    path = tmp_path / f"image.{ending}"
    write(path)
    limit = 100 if name == "larger than allowed" else LIMIT
    if isinstance(expected, str):
        with pytest.raises(BadSample) as reason:
            decode(open_image(path, limit), GREEN, limit)
        assert expected in str(reason.value) and "\n" not in str(reason.value)
        return
    for value in (path, str(path), path.read_bytes(), {"bytes": path.read_bytes(), "path": None}):
        image = decode(open_image(value, limit), GREEN, limit)
        assert (image.mode, image.size) == ("RGB", upright_size(open_image(value, limit)))
        found = image.getpixel((0, 0)), image.getpixel((image.width - 1, image.height - 1))
        tolerance = 6 if name == "lab" or ending in ("jpg", "avif", "webp") else 2
        assert np.abs(np.subtract(found, expected)).max() <= tolerance, found


@pytest.mark.parametrize(
    "image, expected",
    [
        (halves("PA", (0, 255), (0, 0)), None),
        (halves("La", (64, 255), (0, 0)), ((64, 64, 64), GREEN)),
        (halves("RGBa", (64, 0, 0, 64), (0, 0, 0, 0)), ((255 * 64 // 255, 191, 0), GREEN)),
        (halves("HSV", (0, 255, 255), (170, 255, 255)), (RED, BLUE)),
        (halves("RGBX", (*RED, 0), (*BLUE, 0)), RED_BLUE),
        (halves("I", 64 * 257, 191 * 257), GREYS),
        (halves("F", 64 / 255, 191 / 255), GREYS),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_modes_that_files_rarely_have(image: Image.Image, expected: Halves | None) -> None:
    if expected is None:
        image.putpalette([*RED, *BLUE])
        expected = (RED, GREEN)
    found = decode(image, GREEN, LIMIT)
    assert np.abs(np.subtract([found.getpixel((0, 0)), found.getpixel((15, 7))], expected)).max() <= 2


@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("ending", ["jpg", "png", "png behind", "webp", "tif", "deflated tif", "avif"])
def test_every_turn_of_the_camera(tmp_path: Path, ending: str, turn: int) -> None:
    """0 and 9 have no meaning."""
    if ending == "deflated tif" and turn in (0, 9):
        pytest.skip("libtiff does not write these")
    corners = Image.new("RGB", (40, 24), RED)
    corners.paste(BLUE, (20, 0, 40, 12))
    corners.paste(WHITE, (0, 12, 20, 24))
    exif = Image.Exif()
    exif[0x0112] = turn
    path = tmp_path / f"turned.{ending.split()[-1].replace('behind', 'png')}"
    options: dict[str, Any] = {"quality": 95} if ending in ("jpg", "webp", "avif") else {}
    if ending == "deflated tif":
        options["compression"] = "tiff_adobe_deflate"
    corners.save(path, exif=exif, **options)
    if ending == "png behind":
        told = chunk(b"eXIf", exif.tobytes()[6:])
        rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(corners))
        path.write_bytes(png(corners.size, 8, 2, rows, behind=told))
    meant = corners.copy()
    meant.getexif()[0x0112] = turn
    meant = ImageOps.exif_transpose(meant)
    image = open_image(path, LIMIT)
    assert upright_size(image) == meant.size
    assert np.abs(np.asarray(decode(image, GREEN, LIMIT), float) - np.asarray(meant, float)).mean() < 12


@pytest.mark.parametrize("size, reason", [((0, 8), "it has no pixels .0 x 8."), ((400, 400), "400 x 400 pixels are more than")])
def test_sizes_of_images_that_others_opened(size: tuple[int, int], reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        decode(Image.new("RGB", size), GREEN, LIMIT)


def test_a_png_is_not_decoded_for_its_size(tmp_path: Path) -> None:
    halves("RGB", RED, BLUE).save(tmp_path / "plain.png")
    image = open_image(tmp_path / "plain.png", LIMIT)
    assert upright_size(image) == SIZE and image.tile, "nothing is loaded"
    assert decode(image, GREEN, LIMIT).getpixel((0, 0)) == RED


@pytest.mark.parametrize(
    "value, reason",
    [
        (None, "there is no image"),
        ({"bytes": None, "path": None}, "there is no image"),
        (3, "a int is no image"),
        ("./nowhere.png", "there is no such file"),
        ({"bytes": b"", "path": "x.png"}, "the file is empty"),
        (".", "Is a directory"),
    ],
)
def test_cells_without_an_image(value: Any, reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        open_image(value, LIMIT)


def test_pils_own_bound_is_as_it_was(tmp_path: Path) -> None:
    bound = Image.MAX_IMAGE_PIXELS
    (tmp_path / "bomb.png").write_bytes(png((60000, 60000), 8, 2, b""))
    with pytest.raises(BadSample):
        open_image(tmp_path / "bomb.png", LIMIT)
    assert bound == Image.MAX_IMAGE_PIXELS
    assert open_image(tmp_path / "bomb.png", 60000**2).size == (60000, 60000), "ours is the only bound"


def folder_of(path: Path, num_images: int = 1, **captions: str) -> Path:
    for number in range(num_images):
        halves("RGBA", (*RED, 255), (*RED, 0)).save(path / f"{number}.png")
    for name, text in captions.items():
        (path / name.replace("__", "0.")).write_text(text)
    return path


def test_the_background_reaches_the_pixels(tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, __txt="a"))
    for colour, expected in (("white", [1, 1, 1]), ("#0000ff", [-1, -1, 1])):
        config = DataConfig(instance_data_dir=folder, resolution=16, center_crop=True, alpha_background=colour)
        pixels = dataset_of(config, 0)[(0, 0)].images[0]
        assert pixels[:, 8, -1].tolist() == pytest.approx(expected, abs=0.02)


def test_a_bad_sample_is_a_value_with_name_and_reason(tmp_path: Path) -> None:
    config = DataConfig(instance_data_dir=str(folder_of(tmp_path, 2, __txt="a")), instance_prompt="p", resolution=16)
    (tmp_path / "0.txt").write_bytes("é".encode("latin-1"))
    cut("RGB", "PNG", 0.5)(tmp_path / "1.png")
    samples = dataset_of(config, 0)
    for sample, reason in (0, "0.png cannot be used: 0.txt is not UTF-8"), (1, "1.png cannot be used: damaged or truncated"):
        bad = samples[(sample, 0)]
        assert bad.bad and reason in str(bad.bad)
