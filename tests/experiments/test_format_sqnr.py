"""The theory of `experiments.format_sqnr`: densities are densities, and known results come out."""

import math

import numpy as np
import pytest

from coat_jax.numerics.quantizer import format_named
from experiments.format_sqnr import (
    DISTRIBUTIONS,
    FORMATS,
    NODES,
    WEIGHTS,
    best_range,
    codes_of,
)

# Of van Baalen et al. (arXiv 2303.17951), who have formats without NaN and infinity.
PUBLISHED = {"INT8": 6.75, "E2M5": 7.09, "E3M4": 6.24, "E4M3:none": 5.24, "E5M2:none": 4.25}
BEYOND = 1e4  # so large that no density below is above zero


def integral(of, power, end=math.inf):
    """Of x^power times the density up to an end, over both sides."""
    edges = np.minimum(np.concatenate([[0.0], 2.0 ** np.arange(-20, 60)]), min(of.end, end))
    low, high = edges[:-1, None], edges[1:, None]
    x = (high + low) / 2 + (high - low) / 2 * NODES
    return 2 * np.sum((high - low) / 2 * WEIGHTS * x**power * of.density(x))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_densities_integrate_to_one_and_are_those_of_the_samples(name):
    of = DISTRIBUTIONS[name]
    assert integral(of, 0) == pytest.approx(1, abs=1e-6)
    assert integral(of, 2) == pytest.approx(of.variance, rel=1e-4)
    deviation = np.sqrt(of.variance)
    x = of.sample(np.random.default_rng(0), 200_000)
    assert np.mean(np.abs(x) < deviation) == pytest.approx(integral(of, 0, deviation), abs=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_normal_numbers_are_right_to_what_was_published(name):
    _, found = best_range(format_named(name), DISTRIBUTIONS["normal"])
    assert found == pytest.approx(PUBLISHED[name], abs=0.02)


def moments_of_uniform(x):
    """The integrals of the density, x times it and x^2 times it from 0 to x."""
    x = min(x, 1.0)
    return x / 2, x**2 / 4, x**3 / 6


def moments_of_laplace(x):
    """Likewise."""
    left = math.exp(-x) / 2
    return 0.5 - left, 0.5 - (x + 1) * left, 1 - (x**2 + 2 * x + 2) * left


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("name", "moments"), [("uniform", moments_of_uniform), ("Laplace", moments_of_laplace)]
)
def test_quadrature_is_the_closed_form_where_there_is_one(fmt, name, moments):
    """The error of a code c is m2 - 2 c m1 + c^2 m0, by the moments of what is rounded to it."""
    of = DISTRIBUTIONS[name]
    limit, bits = best_range(format_named(fmt), of)
    codes = limit * codes_of(format_named(fmt))
    edges = [0.0, *(codes[1:] + codes[:-1]) / 2, BEYOND]
    m0, m1, m2 = np.diff([moments(edge) for edge in edges], axis=0).T
    error = 2 * np.sum(m2 - 2 * codes * m1 + codes**2 * m0)
    assert bits == pytest.approx(0.5 * math.log2(of.variance / error), abs=1e-9)
