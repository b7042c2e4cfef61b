from dlrover.errors import causes


class LibraryError(Exception):
    """An error that keeps its cause in an attribute of its own."""

    def __init__(self, inner: Exception) -> None:
        super().__init__()
        self.inner = inner


def test_causes_of_an_error_end_where_they_are_a_circle() -> None:
    first, second, third = ValueError("first"), LibraryError(OSError("inner")), KeyError("third")
    third.__cause__, second.inner.__context__ = second, first
    first.__cause__ = third
    assert list(causes(third, "inner")) == [third, second, second.inner, first]
    assert list(causes(third)) == [third, second]
    assert list(causes(None)) == []
