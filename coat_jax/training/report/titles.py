"""Titles of telemetry's statistics in `coat plot`; it imports nothing, so that --help is fast."""

TITLES = {
    "underflow": "Share of non-zero values that became zero",
    "subnormal": "Share of values with a subnormal code",
    "saturated": "Share of values beyond the largest code",
    "headroom": "Binades between the largest value and what the scale allows",
    "error": "Relative error",
    "zero": "Share of moments stored as zero",
    "floor": "Share of moments at the smallest code",
    "k": "Exponent of dynamic range expansion",
}
