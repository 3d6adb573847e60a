"""Programs of `experiments.rotation` call a function with every operand, and ways are compared."""

import jax.numpy as jnp

from experiments import rotation


def test_a_program_calls_with_one_operand_after_another():
    operands = [jnp.float32(i) for i in range(3)]
    program = rotation.repeat(jnp.add, jnp.float32(10), operands, size=int(8e7))
    assert program.calls == 5
    assert program.compiled(*program.arguments) == [10, 11, 12, 10, 11]


def test_operands_do_not_fit_into_the_cache_unless_they_are_tiny():
    assert rotation.operands_needed(int(100e6)) == 3
    assert rotation.operands_needed(1000) == rotation.MOST_CALLS


def test_codes_of_four_bits_share_a_byte():
    codes = jnp.zeros((2, 128), jnp.int4)
    assert rotation.nbytes((codes, jnp.zeros(2, jnp.bfloat16))) == 128 + 4


def test_ways_are_ranked_by_their_times_beside_the_best_of_each_case():
    times = {"a": {"x": 2.0, "y": 2.0}, "b": {"x": 1.0, "y": 16.0}}
    cases = [
        {"of": of, "way": way, "us": us, "bytes": 1}
        for of, ways in times.items()
        for way, us in ways.items()
    ]
    _, first, second = rotation.ranking(cases)
    assert first.split() == ["x", "1.000"]
    assert second.split() == ["y", "4.000"]


def test_a_line_has_a_rate_and_the_speed_beside_the_first():
    cases = [{"way": way, "us": us, "bytes": 20e6} for way, us in (("BF16", 20.0), ("INT4", 5.0))]
    line = list(rotation.lines(cases))[1]
    assert line.split() == ["INT4", "5.0", "us", "4.00", "TB/s", "4.00"]
