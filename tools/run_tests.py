"""Run the test suite: the tests on a real Slurm, which mostly wait for it, beside all others.

    python tools/run_tests.py [arguments of pytest]

Their output comes after that of the others. Exit status: 0 when both parts passed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run both parts at once, and show what they print one after the other."""
    with tempfile.TemporaryFile("w+") as output:
        slurm = subprocess.Popen(
            [*PYTEST, "-m", "slurm", *arguments], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            others = subprocess.run([*PYTEST, "-m", "not slurm", *arguments]).returncode
            print("\nThe tests on a real Slurm:", flush=True)
            status = slurm.wait()
        finally:
            if slurm.poll() is None:
                slurm.terminate()
                slurm.wait()
            output.seek(0)
            print(output.read(), flush=True)
    return status or others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
