"""An image as people have it -> upright RGB of eight bits; or a plain reason why not."""

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

Size = tuple[int, int]  # width, height
Colour = tuple[int, int, int]

ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC = 0x0112, 258, 262  # tags of EXIF and TIFF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FULL_SCALES = {"I": (255, 65535), "F": (1, 255, 65535)}  # white, where the file does not say what it is
MARGIN = 0.01  # what resampling adds to a full scale
DARKEST = 1 / 16  # an image whose brightest pixel is below this share of white rather has another full scale
LATE_CHUNKS = (b"eXIf", b"iTXt", b"zTXt", b"tEXt")


class BadSample(Exception):
    """A sample that cannot be used.  Its text is the reason, in one line, without the sample's name."""


def open_image(value: Any, max_pixels: int) -> Image.Image:
    """An image of a cell: bytes, a path, both in a dict, or an image.  Reads the header only.

    Raises:
        BadSample: there is none, it is no image, or it has no pixels or too many.
    """
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, Image.Image):
        return value
    if value is None or not isinstance(value, str | bytes | Path):
        raise BadSample("there is no image" if value is None else f"a {type(value).__name__} is no image")
    with plain_reasons(max_pixels):
        if not (len(value) if isinstance(value, bytes) else Path(value).stat().st_size):
            raise BadSample("the file is empty")
        image = Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)
    check_size(image.size, max_pixels)
    return image


def decode(image: Image.Image, background: Colour, max_pixels: int) -> Image.Image:
    """The first frame, turned as the camera says, in RGB over the background.  Colour profiles are not applied.

    Raises:
        BadSample: it has no pixels or too many (the header tells, before anything is decoded), it is damaged, or what its
            values mean cannot be told.
    """
    size = image.size
    check_size(size, max_pixels)
    if image.format == "EPS":
        raise BadSample("PostScript is a program, and is not run")  # PIL would call Ghostscript
    with plain_reasons(max_pixels):
        image.load()
        if image.size != size:
            raise BadSample(f"its header says {size[0]} x {size[1]} and it holds {image.size[0]} x {image.size[1]} pixels")
        turn = TURNS.get(orientation(image))
        image = in_rgb(in_eight_bits(image), background)
        return image if turn is None else image.transpose(turn)


def upright_size(image: Image.Image) -> Size:
    """The size that `decode` gives, from the file's header alone."""
    return image.size[::-1] if orientation(image) in (5, 6, 7, 8) else image.size


def check_size(size: Size, max_pixels: int) -> None:
    """Raises BadSample."""
    if min(size) < 1:
        raise BadSample(f"it has no pixels ({size[0]} x {size[1]})")
    if size[0] * size[1] > max_pixels:
        raise BadSample(f"{size[0]} x {size[1]} pixels are more than --max_image_pixels {max_pixels}")


@contextmanager
def plain_reasons(max_pixels: int) -> Iterator[None]:
    """Whatever PIL raises inside is a BadSample.

    PIL's own bound is set to ours: it also holds where one header hides behind another, as in icons.
    """
    bound, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # odd metadata: would be said again at each visit
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except BadSample:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise BadSample(f"it has more than --max_image_pixels {max_pixels} pixels") from None
    except Exception as error:  # of damaged files PIL raises anything: struct.error, IndexError, MemoryError, ...
        raise BadSample(reason_of(error)) from error
    finally:
        Image.MAX_IMAGE_PIXELS = bound


def reason_of(error: Exception) -> str:
    """An exception of PIL or of the file system in plain words."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, UnidentifiedImageError):
        return "it is no image, or damaged at its beginning"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"damaged or truncated: {' '.join(str(error).split()) or type(error).__name__}"


def orientation(image: Image.Image) -> int:
    """How the camera was held: 1 to 8, as EXIF counts; 1: upright, or what it says is unreadable."""
    if image.format == "TIFF":
        return 1  # PIL turns these when it loads them, and its size is the turned one from the beginning
    try:
        exif = image.getexif() if is_told_late(image) else Image.Image.getexif(image)
        return exif.get(ORIENTATION, 1)
    except Exception:  # a damaged EXIF block (SyntaxError, struct.error, ...) does not spoil the picture
        return 1


def is_told_late(image: Image.Image) -> bool:
    """Whether a PNG's orientation may stand behind its pixels, so that PIL has to decode them to find it.

    Without this look at the chunks' names it would decode every PNG that has none.
    """
    file, is_behind = image.fp if image.format == "PNG" else None, False
    if file is None:
        return False
    place = file.tell()
    file.seek(8)
    try:
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            if is_behind and name in LATE_CHUNKS:
                return True
            is_behind = is_behind or name == b"IDAT"
            file.seek(length + 4, io.SEEK_CUR)
    finally:
        file.seek(place)
    return False


def in_eight_bits(image: Image.Image) -> Image.Image:
    """Grey of more than eight bits, which PIL would clip, scaled to L (LA with a transparent value); others as they are.

    Raises:
        BadSample: what white is cannot be told.
    """
    if image.mode not in FULL_SCALES and not image.mode.startswith("I;16"):
        return image
    tags = image.tag_v2 if image.format == "TIFF" else {}
    values = np.asarray(image).astype(np.float32)
    if image.mode in FULL_SCALES:
        white = likely_white(values, FULL_SCALES[image.mode])
    else:
        white = 2 ** tags.get(BITS_PER_SAMPLE, (16,))[0] - 1  # TIFF has 12 bits as well
    shares = values / white if tags.get(PHOTOMETRIC, 1) else 1 - values / white  # 0: white is zero
    grey = Image.fromarray(np.rint(shares.clip(0, 1) * 255).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def likely_white(values: np.ndarray, scales: tuple[int, ...]) -> int:
    """The smallest of the usual full scales that holds the values.  Raises BadSample where there is none, or doubt."""
    low, high = float(values.min()), float(values.max())
    for number, white in enumerate(scales):
        if -MARGIN * white <= low and high <= (1 + MARGIN) * white and (number == 0 or high >= DARKEST * white):
            return white
    expected = " or ".join(f"0 to {white}" for white in scales)
    raise BadSample(f"its values are {low:g} to {high:g}: expected {expected}")


def in_rgb(image: Image.Image, background: Colour) -> Image.Image:
    """Any mode of eight bits -> RGB; what is transparent shows the background."""
    if image.mode == "LAB":  # not among PIL's own conversions
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
