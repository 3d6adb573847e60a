"""Eight devices on the CPU, and property tests that try the same examples on every run.

Both variables must be set before JAX starts its backend; one that is set already is kept.
"""

import os

from hypothesis import Phase, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

settings.register_profile(
    "laws",
    derandomize=True,
    deadline=None,
    max_examples=10,
    # All but `explain`, which traces every line and takes seconds for each failure.
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
)
settings.load_profile("laws")
