"""What FP8 costs a model that sees: tower, projector and decoder, by what is in FP8."""
