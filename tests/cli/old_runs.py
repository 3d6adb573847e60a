"""Runs as earlier versions left them."""

from coat_jax import manifest


def forget_config(checkpoint):
    """Takes the config out of a checkpoint, so that its run's config.json is read."""
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "record.json").write_text('{"step": 0, "loss": null, "extra": {}}')
    manifest.write(checkpoint)
