"""Where the threads of this process stand, for a controller that waits in vain."""

import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import ray

INNERMOST = 4
"""Frames that are always shown."""
_OWN = str(Path(__file__).parents[1])
_RAY = str(Path(ray.__file__).parent)
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_STANDARD = (sysconfig.get_path("stdlib"),)


def text() -> str:
    """One paragraph for each thread that is in anything but Ray's and Python's own code, the calling one left out; outermost frame first.

    Of libraries, only the frame through which they were entered and the innermost ones are shown.
    """
    found = []
    for identity, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        if identity != threading.get_ident() and not all(_is_plumbing(one) for one in frames):
            found.append("\n".join(["  a thread:", *_shortened(frames)]))
    return "\n".join(found) or "  no thread in anything but Ray's own code"


def _shortened(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    lines: list[str] = []
    left_out = 0
    for position, frame in enumerate(frames):
        entered = position > 0 and not _is_library(frames[position - 1])
        if not _is_library(frame) or entered or position >= len(frames) - INNERMOST:
            if left_out:
                lines.append(f"    ... {left_out} more of libraries")
            lines.append(_line(frame))
            left_out = 0
        else:
            left_out += 1
    return lines


def _line(frame: traceback.FrameSummary) -> str:
    path = frame.filename
    for directory in (*_LIBRARIES, *sys.path):
        if directory and path.startswith(f"{directory}/"):
            path = path[len(directory) + 1 :]
            break
    source = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"    {path}:{frame.lineno} in {frame.name}: {source}"


def _is_library(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((*_LIBRARIES, *_STANDARD)) and not frame.filename.startswith(_OWN)


def _is_plumbing(frame: traceback.FrameSummary) -> bool:
    """Ray's, or the standard library's, or without a file."""
    path = frame.filename
    return path.startswith((_RAY, "<")) or (path.startswith(_STANDARD) and not path.startswith(_LIBRARIES))
