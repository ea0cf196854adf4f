"""Compile the text of a subscription to a filter, and cache compiled filters."""

from __future__ import annotations

from timeball.broker.filters import tags
from timeball.broker.filters.tags import ALL, EVERYTHING, Filter
from timeball.model import limits
from timeball.model.errors import InvalidFilter

TAG, SQL92 = "TAG", "SQL92"
# The limit for the texts of one cache: about 8 MB of filters.
CHARACTERS_MAX = 256 * 1024
OVERHEAD_CHARACTERS = 64  # added to the length of each text, so that short texts count too


def compile_filter(text: str | None, expression_type: str | None = TAG, *, bit_mask: bool = False) -> Filter:
    """Compile the text of a subscription. Raises InvalidFilter, and no other error.

    text               tags separated by `||`, or an SQL expression. As tags, None, "" and `*` mean all messages
    expression_type    "TAG" (also None and "") or "SQL92"
    bit_mask           True if the topic's filter type is MULTI_TAG
    """
    # First, because a client's text may be of any size.
    _check_text(text or "")
    # RocketMQ's clients omit the type for tags.
    if expression_type in (None, "", TAG):
        tag_set = tags.parse(text)
        if tag_set is None:
            return EVERYTHING
        return tags.TagMaskFilter(tag_set) if bit_mask else tags.TagFilter(tag_set)
    if expression_type == SQL92:
        # Imported here, so that a start takes less time (edges/edges.py): building the SQL parser takes 40 ms.
        from timeball.broker.filters.sql_filter import SqlFilter

        return SqlFilter(text or "")
    raise InvalidFilter(f"expression type {expression_type[:80]!r}: it is {TAG} or {SQL92}")


def normalized_text(text: str, expression_type: str) -> str:
    """Normalize the text of a subscription to the form of `Filter.text`, even if it cannot be compiled."""
    if expression_type == SQL92:
        return text.strip()
    try:
        tag_set = tags.parse(text)
    except InvalidFilter:
        return text[: limits.FILTER_BYTES_MAX]
    return ALL if tag_set is None else tags.joined(tag_set)


def _check_text(text: str) -> None:
    """Raise InvalidFilter for a text with more than FILTER_BYTES_MAX bytes, or that UTF-8 cannot encode."""
    try:
        # A text with too many characters is not encoded, so that a huge text costs nothing.
        size = len(text) if len(text) > limits.FILTER_BYTES_MAX else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidFilter(
            f"character {error.start + 1} is half of a surrogate pair, which is no text",
            position=error.start + 1,
        ) from None
    if size > limits.FILTER_BYTES_MAX:
        raise InvalidFilter(
            f"the filter has more than {limits.FILTER_BYTES_MAX} bytes (FILTER_BYTES_MAX)",
            limit="FILTER_BYTES_MAX",
        )


class FilterCache:
    """A cache of compiled filters, because consumers use the same few texts. Belongs to the event loop.

    A filter takes about thirty times the memory of its text, so the sum of the texts is limited. If a client always
    sends new texts, other clients' filters are compiled again now and then, but the memory does not grow.
    """

    def __init__(self) -> None:
        self._filters: dict[tuple[str, str, bool], Filter] = {}
        self.characters = 0

    def get(self, text: str, expression_type: str, *, bit_mask: bool) -> Filter:
        """Find or compile a filter. The arguments and errors are those of `compile_filter`."""
        key = (text, expression_type, bit_mask)
        filter_ = self._filters.get(key)
        if filter_ is None:
            # An invalid text is not cached: it raises each time, and costs only its sender.
            filter_ = compile_filter(text, expression_type, bit_mask=bit_mask)
            if self.characters >= CHARACTERS_MAX:
                # Clear all: the next pulls compile the filters in use again. Tracking their use would slow down every
                # pull.
                self._filters.clear()
                self.characters = 0
            self._filters[key] = filter_
            self.characters += len(text) + OVERHEAD_CHARACTERS
        return filter_
