"""Laws that do not hold yet: expected to fail, by name, each with what is known of it."""

import pytest

OPEN = {
    "test_stochastic_rounding_has_no_bias": "the tolerance in k holds a slowly sinking minimum up",
    "spoils_its_own_element_and_no_other[inf]": "an infinity saturates amax and drowns its group",
    "spoils_its_own_element_and_no_other[-inf]": "an infinity saturates amax and drowns its group",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in OPEN.items():
            if "tests/optax" in str(item.path) and name in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
