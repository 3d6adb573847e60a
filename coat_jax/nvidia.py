"""What NVIDIA's driver says of the GPUs, asked of nvidia-smi: JAX would start CUDA on them."""

import shutil
import subprocess

PATIENCE = 30  # seconds for nvidia-smi, which may hang where the driver does


def ask(field: str) -> list[str]:
    """The value of one of nvidia-smi's fields for each GPU of the machine; empty if it fails.

    Args:
        field: a name that `nvidia-smi --help-query-gpu` lists, such as "compute_cap".
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", check=False, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if answer.returncode else [line.strip() for line in answer.stdout.splitlines()]
