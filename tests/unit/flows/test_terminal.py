import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, logging, os, subprocess, sys
from pathlib import Path
from flows.terminal import captured
libc = ctypes.CDLL(None)
log = Path(sys.argv[1])
libc.printf(b"c before\\n")
print("before")
try:
    with captured(log) as console:
        print("python out")
        print("python err", file=sys.stderr)
        os.write(1, b"descriptor\\n")
        libc.printf(b"c stdio\\n")
        subprocess.run([sys.executable, "-c", "import sys; print('child'); print('child err', file=sys.stderr)"])
        logging.getLogger("prefect.something").warning("logged")
        console.print("the display")
        raise ValueError("ended badly")
except ValueError:
    print("after", file=sys.stderr)
print("last", flush=True)
"""


@pytest.fixture
def captured(tmp_path: Path) -> tuple[str, str, str]:
    """What went to standard output, standard error and the log."""
    log = tmp_path / "run" / "almanac.log"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(log)], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr, log.read_text()


def test_libraries_write_to_the_log_and_the_display_to_the_terminal(captured: tuple[str, str, str]) -> None:
    out, err, log = captured
    # Mutation: redirecting only sys.stdout lets the descriptor, C and the child through.
    assert out.splitlines() == ["c before", "before", "the display", "last"]
    assert err == "after\n"
    for text in ("python out", "python err", "descriptor", "c stdio", "child", "child err", "WARNING prefect.something: logged"):
        assert f"{text}\n" in log


def test_what_is_said_at_exit_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "almanac.log"
    script = (
        "import atexit, sys; from pathlib import Path; from flows.terminal import captured, silence_exit\n"
        "atexit.register(lambda: print('a library says goodbye'))\n"
        "with captured(Path(sys.argv[1])): pass\n"
        "print('result'); silence_exit()"
    )
    done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    assert "goodbye" in log.read_text()


def test_a_log_on_a_full_disk_gives_the_terminal_back() -> None:
    script = (
        "import sys; from pathlib import Path; from flows.terminal import captured\n"
        "try:\n"
        "    with captured(Path('/dev/full')):\n"
        "        print('lost')\n"
        "except OSError as error:\n"
        "    print(error.strerror)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    # Mutation: a flush that raises on the way out leaves descriptors 1 and 2 with the log.
    assert (done.returncode, done.stdout) == (0, "No space left on device\n")
