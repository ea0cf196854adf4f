# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Evaluate the conditions of an SQL filter in C, row by row: the compiled counterpart of `Condition.truth`.

One pass over the properties of a row, in the buffers of the Arrow columns, finds the properties of the filter. Then the
condition is evaluated from left to right, until its outcome is certain. No Python object and no array is created for a
condition, so a row of a small batch costs as little as one of a large batch. Plain numbers are read here. `as_long` and
`as_double` read all other texts, and decide whether they are numbers.

A `Program` contains the condition as an array of nodes: each node, then the nodes of its parts (`Node.end`).
sql_conditions.py is the reference: it describes the conditions, their outcomes and the properties.
"""

from cpython.bytearray cimport PyByteArray_AsString, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AsString
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.string cimport memchr, memcmp, memcpy

from timeball.broker.filters import sql_conditions as conditions
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END

cdef extern from "<string.h>":
    const void* memmem(const void* text, size_t size, const void* search, size_t search_size)

cdef enum:
    FALSE = 0  # the outcomes, as in sql_conditions.py
    TRUE = 1
    NULL_ = 2
    ERROR = 3
    UNREAD = 0  # the state of a number that has not been read yet: a state is never FALSE
    CONSTANT = -1  # instead of the index of a property
    LONG_DIGITS_MAX = 18  # an integer with at most so many digits is read here: it fits into 64 bits
    DOUBLE_DIGITS_MAX = 15  # a decimal number with at most so many digits is read here: without rounding
    # After this many bytes of properties (some milliseconds at most), other threads get the interpreter lock if they
    # wait for it. The evaluation of a node counts as NODE_BYTES.
    WORK_BYTES_MAX = 256 * 1024
    NODE_BYTES = 16

cdef enum Kind:
    ALWAYS, EVERY, SOME, NOT, SAME, HAS_NO_OUTCOME, IS_TRUE_TEXT, IS_NULL, SAME_TEXT, SAME_PROPERTY, ONE_OF, CONTAINS
    STARTSWITH, ENDSWITH, HAS_NO_TEXT, ORDERED

cdef enum Sign:
    EQUAL, GREATER, GREATER_EQUAL, LESS, LESS_EQUAL

assert (conditions.FALSE, conditions.TRUE, conditions.NULL, conditions.ERROR) == (FALSE, TRUE, NULL_, ERROR)
cdef char END = ord(PROPERTY_END), NAME_END = ord(PROPERTY_NAME_END)
cdef dict SIGNS = {"=": EQUAL, ">": GREATER, ">=": GREATER_EQUAL, "<": LESS, "<=": LESS_EQUAL}
cdef dict SEARCHES = {"CONTAINS": CONTAINS, "STARTSWITH": STARTSWITH, "ENDSWITH": ENDSWITH}
# The powers of ten up to 10 ** DOUBLE_DIGITS_MAX. Each is a double without rounding.
cdef double POWERS[DOUBLE_DIGITS_MAX + 1]
cdef int _power
POWERS[0] = 1
for _power in range(DOUBLE_DIGITS_MAX):
    POWERS[_power + 1] = 10 * POWERS[_power]


cdef struct Text:
    const char* at  # NULL: the message does not have the property
    Py_ssize_t size


cdef struct Property:
    Py_ssize_t own_column  # index in the columns of a batch. 0 is the text of all properties, so this one has none
    Text value  # in the current row, as the next four
    uint8_t long_state, double_state  # UNREAD, TRUE or ERROR
    int64_t whole  # the value as an integer, if `long_state` is TRUE
    double decimal  # the value as a double, if `double_state` is TRUE


cdef struct Operand:
    Py_ssize_t property  # its index, or CONSTANT
    int64_t whole  # of a constant, if it is an integer
    double decimal  # of a constant


cdef struct Node:
    Kind kind
    Py_ssize_t end  # index of the first node after the parts of this one, which follow it
    uint8_t outcome  # of ALWAYS
    Sign sign  # of ORDERED, as the next three
    bint is_decimal
    Operand left
    Operand right  # also the second property of SAME_PROPERTY
    Py_ssize_t first_text, text_count  # the strings with which a property is compared, in `Program.texts`


cdef struct Column:  # the buffers of an Arrow column of strings
    const uint8_t* valid  # validity bitmap. NULL: no value is missing
    const int32_t* ends  # ends[n] and ends[n + 1]: begin and end of value n in `data`
    const char* data
    Py_ssize_t offset  # number of values before the first row


cdef class Program:
    """A condition on the properties `names`, prepared for evaluation. Immutable, and safe in any thread."""

    cdef list text_bytes  # owns the bytes to which `texts` points
    cdef list columns  # names of the columns to read: all properties, then the own columns of properties
    cdef Node* nodes
    cdef Property* properties  # as they are before the first row
    cdef Text* texts  # strings of the nodes, then the name of each property with the byte that ends it
    cdef Py_ssize_t node_count, property_count, string_count  # string_count: of the nodes

    def __init__(self, condition, names):
        """Prepare a condition (sql_conditions.py) on the properties `names` (a set of str)."""
        cdef Py_ssize_t at
        cdef Node* node
        # Sorted, so that a filter with a thousand names does not compare each entry of a message with all of them.
        names = sorted(names, key=lambda name: _by_size(name.encode()))
        heads = [(name + PROPERTY_NAME_END).encode() for name in names]
        index_of = {name: number for number, name in enumerate(names)}
        nodes, texts = [], []
        _add_nodes(condition, index_of, nodes, texts)
        self.node_count, self.property_count, self.string_count = len(nodes), len(heads), len(texts)
        texts += heads
        self.text_bytes, self.columns = texts, ["properties"]
        self.nodes = <Node*> PyMem_Malloc(len(nodes) * sizeof(Node))
        self.properties = <Property*> PyMem_Malloc(len(heads) * sizeof(Property))
        self.texts = <Text*> PyMem_Malloc(len(texts) * sizeof(Text))
        if self.nodes == NULL or self.properties == NULL or self.texts == NULL:
            raise MemoryError
        for at, text in enumerate(texts):
            self.texts[at] = Text(PyBytes_AsString(text), len(<bytes> text))
        for at, name in enumerate(names):
            self.properties[at].own_column = 0
            if name in conditions.OWN_COLUMNS:
                self.properties[at].own_column = len(self.columns)
                self.columns.append(conditions.OWN_COLUMNS[name])
        for at, fields in enumerate(nodes):
            node = self.nodes + at
            node.kind, node.end, node.outcome, node.sign, node.is_decimal = fields[:5]
            node.left, node.right = _operand(fields[5]), _operand(fields[6])
            node.first_text, node.text_count = fields[7:]

    def __dealloc__(self):
        PyMem_Free(self.nodes)
        PyMem_Free(self.properties)
        PyMem_Free(self.texts)

    def matches(self, rows):
        """Evaluate the condition for rows (LOG_SCHEMA or READ_SCHEMA). Returns a byte for each: 1 for TRUE, or 0."""
        cdef Py_ssize_t row, at, count = rows.num_rows, work_bytes = 0
        cdef Text* heads = self.texts + self.string_count
        # Not in the program, because another thread may use it meanwhile, as during a call of `as_long`.
        cdef Property* properties = <Property*> PyMem_Malloc(self.property_count * sizeof(Property))
        cdef Column* columns = <Column*> PyMem_Malloc(len(self.columns) * sizeof(Column))
        result = PyByteArray_FromStringAndSize(NULL, count)
        cdef char* out = PyByteArray_AsString(result)
        try:
            if properties == NULL or columns == NULL:
                raise MemoryError
            memcpy(properties, self.properties, self.property_count * sizeof(Property))
            for at, name in enumerate(self.columns):
                _read_column(rows.column(name), columns + at)
            for row in range(count):
                work_bytes += NODE_BYTES * self.node_count
                work_bytes += _find_values(properties, heads, self.property_count, columns, row)
                out[row] = self.outcome(0, properties) == TRUE
                if work_bytes > WORK_BYTES_MAX:
                    work_bytes = 0
                    with nogil:  # lets other threads take the interpreter lock (WORK_BYTES_MAX)
                        pass
        finally:
            PyMem_Free(properties)
            PyMem_Free(columns)
        return result

    cdef int outcome(self, Py_ssize_t at, Property* properties) except -1:
        """Evaluate the node at index `at` for the current row. Returns its outcome."""
        cdef Node* node = self.nodes + at
        cdef int outcome, right
        cdef Text value
        cdef Kind kind = node.kind
        if kind == ALWAYS:
            return node.outcome
        if kind == ORDERED:
            return self.order(node, properties)
        if kind <= HAS_NO_OUTCOME:  # a condition that consists of conditions: these come first in `Kind`
            outcome = self.outcome(at + 1, properties)
            if kind == NOT:
                return 1 - outcome if outcome <= TRUE else outcome
            if kind == HAS_NO_OUTCOME:
                return ERROR if outcome == ERROR else outcome == NULL_
            at = self.nodes[at + 1].end
            if kind == SAME:
                right = self.outcome(at, properties)
                if outcome <= TRUE and right <= TRUE:
                    return outcome == right
                return ERROR if outcome == ERROR or right == ERROR else NULL_
            # The next part is evaluated only if the parts to its left have not decided.
            while at < node.end and outcome != ERROR and outcome != (FALSE if kind == EVERY else TRUE):
                right = self.outcome(at, properties)
                if right != (TRUE if kind == EVERY else FALSE):
                    outcome = right
                at = self.nodes[at].end
            return outcome
        value = properties[node.left.property].value
        if kind == IS_NULL:
            return value.at == NULL
        if value.at == NULL:
            return NULL_
        if kind == HAS_NO_TEXT:
            return FALSE
        if kind == IS_TRUE_TEXT:
            return _is_true_text(value)
        if kind == SAME_PROPERTY:
            if properties[node.right.property].value.at == NULL:
                return NULL_
            return _compare_texts(value, properties[node.right.property].value) == 0
        if kind == ONE_OF:
            return _find(self.texts + node.first_text, node.text_count, value) >= 0
        return _matches_text(kind, value, self.texts[node.first_text])

    cdef int order(self, Node* node, Property* properties) except -1:
        """Evaluate an ORDERED node for the current row. Returns its outcome."""
        cdef int left = _read_number(&node.left, properties, node.is_decimal)
        cdef int right = _read_number(&node.right, properties, node.is_decimal)
        cdef int order
        # A comparison with a missing property is NULL, even if the other side is not a number.
        if left != TRUE or right != TRUE:
            return NULL_ if left == NULL_ or right == NULL_ else ERROR
        if node.is_decimal:
            order = _order_doubles(_double(&node.left, properties), _double(&node.right, properties))
        else:
            order = _order_longs(_long(&node.left, properties), _long(&node.right, properties))
        if node.sign == EQUAL:
            return order == 0
        if node.sign == GREATER:
            return order > 0
        if node.sign == GREATER_EQUAL:
            return order >= 0
        return order < 0 if node.sign == LESS else order <= 0


# ---- building --------------------------------------------------------------------------------------------------------


def _add_nodes(condition, dict index_of, list nodes, list texts):
    """Add a condition and its parts to `nodes`, as tuples of the fields of `Node`, and its strings to `texts`.

    `index_of`: the index of each property, by name. An operand is a tuple as for `_operand`.
    """
    at = len(nodes)
    nodes.append(None)  # keeps the place of this node before its parts. Set below, when its end is known
    outcome, sign, is_decimal, left, right, first_text = FALSE, EQUAL, False, 0, 0, len(texts)
    node_type = type(condition)
    if node_type in PARTS:
        kind, names = PARTS[node_type]
        parts = condition.parts if names is None else [getattr(condition, name) for name in names]
        for part in parts:
            _add_nodes(part, index_of, nodes, texts)
        first_text = len(texts)
    elif node_type is conditions.Always:
        kind, outcome = ALWAYS, condition.outcome
    elif node_type is conditions.Ordered:
        kind, sign, is_decimal = ORDERED, SIGNS[condition.sign], condition.decimal
        left, right = (
            (index_of[side.name], 0) if isinstance(side, conditions.Property) else (CONSTANT, side)
            for side in (condition.left, condition.right)
        )
    else:
        left = index_of[condition.name], 0
        if node_type is conditions.SameText:
            kind = SAME_TEXT
            if isinstance(condition.other, conditions.Property):
                kind, right = SAME_PROPERTY, (index_of[condition.other.name], 0)
            else:
                texts.append(condition.other.encode())
        elif node_type is conditions.OneOf:
            kind = ONE_OF
            texts += sorted([item.encode() for item in condition.items], key=_by_size)
        elif node_type is conditions.HasText:
            kind = SEARCHES[condition.how]
            texts.append(condition.search.encode())
        else:
            kind = SIMPLE[node_type]
    nodes[at] = (
        kind, len(nodes), outcome, sign, is_decimal, left or (0, 0), right or (0, 0), first_text,
        len(texts) - first_text,
    )


def _by_size(bytes text):
    """Build the sort key of a text for the order of `_compare_texts`."""
    return len(text), text


# Conditions that consist of conditions: their kind, and the names of the fields with their parts. None: the field
# `parts` is a tuple of them.
cdef dict PARTS = {
    conditions.Every: (EVERY, None), conditions.Some: (SOME, None), conditions.Not: (NOT, ["part"]),
    conditions.Same: (SAME, ["left", "right"]), conditions.HasNoOutcome: (HAS_NO_OUTCOME, ["part"]),
}
# Conditions on one property, without a string.
cdef dict SIMPLE = {
    conditions.IsNull: IS_NULL, conditions.IsTrueText: IS_TRUE_TEXT, conditions.HasNoText: HAS_NO_TEXT,
}


cdef Operand _operand(tuple fields) except *:
    """Convert an operand: the index of a property and 0, or CONSTANT and a number."""
    cdef Operand result
    index, number = fields
    result.property, result.decimal = index, number
    result.whole = number if isinstance(number, int) else 0
    return result


# ---- the values of a row ---------------------------------------------------------------------------------------------


cdef int _read_column(array, Column* column) except -1:
    """Find the buffers of an Arrow array of strings. The array must live as long as `column` is used."""
    valid, ends, data = array.buffers()
    column.valid = <const uint8_t*> _address(valid) if array.null_count else NULL
    column.ends, column.data = <const int32_t*> _address(ends), <const char*> _address(data)
    column.offset = array.offset
    if column.data == NULL:
        column.data = b""  # a column of empty texts has no bytes, but its values are not missing
    return 0


cdef uintptr_t _address(buffer) except? 0:
    return 0 if buffer is None else buffer.address


cdef inline Text _value(Column* column, Py_ssize_t row) noexcept:
    """Find the value of a column in a row. `at` is NULL for a missing value."""
    cdef Text result
    result.at, result.size = NULL, 0
    row += column.offset
    if column.valid == NULL or column.valid[row >> 3] >> (row & 7) & 1:
        result.at, result.size = column.data + column.ends[row], column.ends[row + 1] - column.ends[row]
    return result


cdef Py_ssize_t _find_values(
    Property* properties, Text* heads, Py_ssize_t count, Column* columns, Py_ssize_t row
) noexcept:
    """Set the values of all properties for a row. Returns the number of bytes that were searched.

    `heads`: the name of each property with the byte that ends it, sorted. `columns[0]`: the text of all properties.
    """
    cdef Py_ssize_t at, size, missing = 0
    cdef Property* item
    cdef Text text
    cdef const char* entry
    cdef const char* end
    cdef const char* entry_end
    cdef const char* name_end
    for at in range(count):
        item = properties + at
        item.long_state = item.double_state = UNREAD
        item.value.at = NULL
        if item.own_column:
            item.value = _value(columns + item.own_column, row)
        missing += item.value.at == NULL
    text = _value(columns, row)
    if text.at == NULL or not missing:
        return 0
    entry, end = text.at, text.at + text.size
    while entry < end:
        entry_end = <const char*> memchr(entry, END, end - entry)
        if entry_end == NULL:
            entry_end = end
        name_end = <const char*> memchr(entry, NAME_END, entry_end - entry)
        if name_end != NULL:
            size = name_end + 1 - entry
            at = _find(heads, count, Text(entry, size))
            # A value from the own column stays. If a name occurs twice, the last value counts.
            if at >= 0 and not (
                properties[at].own_column and _value(columns + properties[at].own_column, row).at != NULL
            ):
                properties[at].value = Text(entry + size, entry_end - entry - size)
        entry = entry_end + 1
    return text.size


# ---- comparisons -----------------------------------------------------------------------------------------------------


cdef inline int _compare_texts(Text left, Text right) noexcept:
    """Compare two texts by their sizes, then by their bytes. Returns a number below, equal to or above 0."""
    if left.size != right.size:
        return -1 if left.size < right.size else 1
    return memcmp(left.at, right.at, left.size)


cdef inline Py_ssize_t _find(Text* texts, Py_ssize_t count, Text text) noexcept:
    """Find the index of a text in sorted texts, or -1."""
    cdef Py_ssize_t middle, low = 0, high = count
    cdef int order
    while low < high:
        middle = (low + high) // 2
        order = _compare_texts(text, texts[middle])
        if order == 0:
            return middle
        if order < 0:
            high = middle
        else:
            low = middle + 1
    return -1


cdef inline bint _matches_text(Kind kind, Text value, Text text) noexcept:
    """Check whether a value equals a string (SAME_TEXT), or contains, begins or ends with it."""
    if value.size < text.size:
        return False
    if kind == CONTAINS:
        return memmem(value.at, value.size, text.at, text.size) != NULL
    if kind == SAME_TEXT and value.size != text.size:
        return False
    return not memcmp(value.at + (value.size - text.size if kind == ENDSWITH else 0), text.at, text.size)


cdef inline bint _is_true_text(Text value) noexcept:
    cdef int at
    if value.size != 4:
        return False
    for at in range(4):
        if value.at[at] | 0x20 != b"true"[at]:
            return False
    return True


cdef inline int _order_longs(int64_t left, int64_t right) noexcept:
    return (left > right) - (left < right)


cdef inline int _order_doubles(double left, double right) noexcept:
    return (left > right) - (left < right)


cdef inline int64_t _long(Operand* operand, Property* properties) noexcept:
    return operand.whole if operand.property == CONSTANT else properties[operand.property].whole


cdef inline double _double(Operand* operand, Property* properties) noexcept:
    return operand.decimal if operand.property == CONSTANT else properties[operand.property].decimal


# ---- numbers ---------------------------------------------------------------------------------------------------------


cdef int _read_number(Operand* operand, Property* properties, bint is_decimal) except -1:
    """Read the number of an operand, once for each row. Returns TRUE, NULL_ (no property) or ERROR (no number)."""
    cdef Property* item
    if operand.property == CONSTANT:
        return TRUE
    item = properties + operand.property
    if item.value.at == NULL:
        return NULL_
    if is_decimal:
        if item.double_state == UNREAD:
            item.double_state = TRUE if _read_double(item) else ERROR
        return item.double_state
    if item.long_state == UNREAD:
        item.long_state = TRUE if _read_long(item) else ERROR
    return item.long_state


cdef Py_ssize_t _read_digits(Text text, Py_ssize_t digits_max, int64_t* number, Py_ssize_t* point) noexcept:
    """Read a plain number: a minus or none, then at most `digits_max` digits, with at most one point among them.

    Returns the number of digits, or 0 for any other text. Sets `number` to the number without the point, and `point` to
    the number of digits after the point (-1: there is no point).
    """
    cdef const char* at = text.at
    cdef const char* end = at + text.size
    cdef Py_ssize_t digits = 0
    cdef bint is_minus = text.size > 0 and at[0] == c"-"
    number[0], point[0] = 0, -1
    at += is_minus
    if end - at > digits_max + 1:
        return 0
    while at < end:
        if c"0" <= at[0] <= c"9":
            number[0] = 10 * number[0] + (at[0] - c"0")
            digits += 1
            point[0] += point[0] >= 0
        elif at[0] == c"." and point[0] < 0:
            point[0] = 0
        else:
            return 0
        at += 1
    if is_minus:
        number[0] = -number[0]
    return digits if digits <= digits_max else 0


cdef bint _read_long(Property* item) except -1:
    """Read the value of a property as an integer into `whole`. Returns False if it is none."""
    cdef Py_ssize_t point
    if _read_digits(item.value, LONG_DIGITS_MAX, &item.whole, &point) and point < 0:
        return True
    number = conditions.as_long(PyUnicode_DecodeUTF8(item.value.at, item.value.size, NULL))
    if number is None:
        return False
    item.whole = number
    return True


cdef bint _read_double(Property* item) except -1:
    """Read the value of a property as a double into `decimal`. Returns False if it is no number."""
    cdef Py_ssize_t point
    cdef int64_t digits
    if _read_digits(item.value, DOUBLE_DIGITS_MAX, &digits, &point):
        # One division of two exact doubles is rounded once, so the result is the double nearest to the text.
        item.decimal = <double> digits / POWERS[max(point, 0)]
        return True
    number = conditions.as_double(PyUnicode_DecodeUTF8(item.value.at, item.value.size, NULL))
    if number is None:
        return False
    item.decimal = number
    return True
