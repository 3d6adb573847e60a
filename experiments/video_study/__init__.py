"""What FP8, sparse attention and both cost a model of videos."""
