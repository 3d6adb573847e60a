"""Laws of the AdamW step that hold for every implementation: its test modules inherit them."""

from adam_cases import (
    check_a_lost_second_moment,
    check_an_element_comes_to_rest,
    check_enormous_gradients,
    check_non_finite_gradients,
    check_rounded_corrections,
    check_rounded_parameters,
)
from correction_cases import check_join, check_split


class StepLaws:
    """The laws of one step."""

    implementation = "triton"

    def test_parameters_are_rounded_right_on_average_by_their_own_key(self) -> None:
        check_rounded_parameters(self.implementation)

    def test_corrections_are_rounded_right_on_average_by_their_own_key(self) -> None:
        check_rounded_corrections(self.implementation)

    def test_a_gradient_that_is_not_finite_makes_its_own_parameter_nan(self) -> None:
        check_non_finite_gradients(self.implementation)

    def test_an_element_without_gradient_comes_to_rest(self) -> None:
        check_an_element_comes_to_rest(self.implementation)

    def test_a_second_moment_that_is_lost_is_replaced_by_the_smallest_one(self) -> None:
        check_a_lost_second_moment(self.implementation)

    def test_a_gradient_whose_square_overflows_moves_nothing_further_than_the_bound(self) -> None:
        check_enormous_gradients(self.implementation)


class KernelLaws(StepLaws):
    """Those, and the laws of the kernels for corrections."""

    def test_params_are_joined_with_corrections_bit_for_bit(self) -> None:
        check_join()

    def test_params_are_split_into_bf16_and_corrections_bit_for_bit(self) -> None:
        check_split()
