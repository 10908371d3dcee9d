"""How numbers are shown."""

import pytest

from specgen.experiments.study_tables import _ACCURACY
from specgen.report import display


@pytest.mark.parametrize(
    ("show", "text"),
    [
        (display.count, "0"),
        (display.plain, "0.00"),
        (display.rate, "0.0"),
        (display.percent, "0.0 %"),
        (display.hundredths, "0.0"),
        (display.ratio, "0.00x"),
    ],
)
def test_nothing_is_below_nothing(show: display.Show, text: str) -> None:
    """The end of an interval that rounds to zero has no sign."""
    assert show(-1e-9) == show(0.0) == text
    assert show(-1.0).startswith("-1")


def test_nor_is_it_as_a_difference() -> None:
    show = next(column.show for column in _ACCURACY if column.name == "difference")
    assert [show(share) for share in (-1e-9, 0.0, -0.01, 0.01)] == ["+0.0", "+0.0", "-1.0", "+1.0"]
