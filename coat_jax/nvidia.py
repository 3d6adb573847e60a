"""Asks nvidia-smi about the GPUs: JAX would start CUDA on them."""

import subprocess

PATIENCE = 30  # seconds for nvidia-smi, which may hang where the driver does


def query_gpus(field: str) -> list[str]:
    """Returns a field of `nvidia-smi --help-query-gpu` for each GPU; nothing if it fails."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines()]
