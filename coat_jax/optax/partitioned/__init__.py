"""Steps that update the parameters in parts, so that less is on the device at once."""
