"""Episodes as MP4, by PyAV or imageio-ffmpeg, whichever is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from somaspeed_patch.rl.collect import Film

log = logging.getLogger(__name__)

RATE = 20  # of LIBERO's control: a second of the video is a second of the episode
_CODECS = ("libx264", "libopenh264", "mpeg4")
_LONGEST = 80  # characters of the task's text in a file's name

Pictures = Sequence[NDArray[np.uint8]]


def why_not() -> str | None:
    """Why no video can be written here, in words."""
    if importlib.util.find_spec("av") or importlib.util.find_spec("imageio_ffmpeg"):
        return None
    return "videos need PyAV or imageio-ffmpeg: pip install av"


def name_of(film: Film) -> str:
    """slot_0-episode_1-success-pick_up_the_bowl.mp4."""
    words = re.sub(r"[^a-z0-9]+", "_", film.instruction.lower()).strip("_")[:_LONGEST]
    outcome = "success" if film.success else "failure"
    return "-".join(filter(None, (f"slot_{film.slot}", f"episode_{film.episode}", outcome, words))) + ".mp4"


def write(films: Sequence[Film], folder: Path) -> list[Path]:
    """One file an episode, a frame after the reset and after every step; what was written."""
    written = []
    for film in films:
        if not film.pictures:
            log.warning("no video of slot %d: its environment gives no images", film.slot)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name_of(film)
        try:
            encode(film.pictures, file)
        except (OSError, RuntimeError) as error:
            file.unlink(missing_ok=True)
            log.warning("video %s could not be written: %s", file, error)
            continue
        written.append(file)
    return written


def encode(pictures: Pictures, file: Path) -> None:
    """Write [H, W, 3] uint8 each; odd sizes get one more row or column, which h264 needs.

    Raises: RuntimeError: nothing that encodes is installed. OSError: the file cannot be written.
    """
    even = [_even(each) for each in pictures]
    if importlib.util.find_spec("av"):
        _by_av(even, file)
    elif importlib.util.find_spec("imageio_ffmpeg"):
        _by_ffmpeg(even, file)
    else:
        raise RuntimeError(why_not())


def _even(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _by_av(pictures: Pictures, file: Path) -> None:
    import av

    codec = next(name for name in _CODECS if name in av.codecs_available)
    with av.open(str(file), "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(RATE))
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _by_ffmpeg(pictures: Pictures, file: Path) -> None:
    ffmpeg: Any = importlib.import_module("imageio_ffmpeg")
    height, width = pictures[0].shape[:2]
    writer = ffmpeg.write_frames(str(file), (width, height), fps=RATE, macro_block_size=2)
    writer.send(None)
    try:
        for picture in pictures:
            writer.send(np.ascontiguousarray(picture))
    finally:
        writer.close()
