# cython: language_level=3
"""The C types of hpack_decoder.py. Without them the compiled module would be as slow as the interpreted one."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t

cdef Py_ssize_t TABLE_BYTES_MAX, FIELD_BYTES, STATIC
cdef int FAILS
cdef list STATIC_TABLE
cdef frozenset PSEUDO_HEADERS
cdef bytes NEXT, SYMBOLS, EMITS, ENDS

cdef class HpackDecoder:
    cdef list _table
    cdef Py_ssize_t _table_bytes, _table_bytes_max, _list_bytes_max
    cdef bytes _data
    cdef Py_ssize_t _at, _end, _text_bytes
    cdef readonly bint is_malformed

    cpdef tuple decode(self, bytes data)

    @cython.locals(
        headers=dict, total_bytes=Py_ssize_t, field_bytes=Py_ssize_t, first=uint8_t, index=Py_ssize_t, name=str,
        has_regular_field=bint,
    )
    cdef tuple _read_block(self)

    @cython.locals(at=Py_ssize_t)
    cdef tuple _field(self, Py_ssize_t index)

    cdef object _insert(self, object name, object value, Py_ssize_t field_bytes)

    cdef object _resize(self, Py_ssize_t bytes_max)

    @cython.locals(evicted=Py_ssize_t)
    cdef object _evict(self)

    @cython.locals(prefix_max=Py_ssize_t, value=Py_ssize_t, shift=int, byte=uint8_t)
    cdef Py_ssize_t _read_number(self, int bits) except -1

    @cython.locals(is_huffman=bint, size=Py_ssize_t, begin=Py_ssize_t)
    cdef object _read_text(self)

    @cython.locals(
        data=cython.p_const_uchar, following=cython.p_const_uchar, symbols=cython.p_const_uchar,
        emits=cython.p_const_uchar, buffer=bytearray, out=cython.p_uchar, size=Py_ssize_t, state=uint32_t,
        step=uint32_t, seen=int, byte=uint8_t, at=Py_ssize_t,
    )
    cdef object _decode_huffman(self, Py_ssize_t begin)
