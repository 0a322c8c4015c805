"""`snakemake --lint`, less the lints that this project argues against; exit status 1 when something is left.

Left out: "Specify a conda environment or container for each rule". Every rule runs in the one environment that
requirements.lock pins with hashes, and engines live in environments of their own, named in the model registry.
"""

import subprocess
import sys

ARGUED = ("Specify a conda environment or container for each rule",)

run = subprocess.run([sys.executable, "-m", "snakemake", "--lint"], capture_output=True, text=True)
if "Traceback" in run.stderr or (run.returncode and "Lints for" not in run.stdout + run.stderr):
    sys.exit(run.stdout + run.stderr)
place, left = "", []
for line in (run.stdout + run.stderr).splitlines():
    if line.startswith("Lints for "):
        place = line.removeprefix("Lints for ").rstrip(":")
    elif line.startswith("    * ") and not any(title in line for title in ARGUED):
        left.append(f"{place}: {line.strip('* :')}")
print("\n".join(left) or "snakemake --lint: nothing left")
sys.exit(bool(left))
