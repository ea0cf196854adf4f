# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Split received bytes into runs of plain sends, in C: the compiled counterpart of sends.py and SendRows.

    bytes of a connection -> cut -> Frame | PlainPull | SendRun -> join -> columns of a batch
                                                                -> answers, as bytes

A send is plain if its header has the usual form, and only its topic, its queue and its delay still have to be checked.
A batch (SEND_BATCH_MESSAGE) is plain if each of its records is plain and it names a queue. Its messages are then rows
of the run, with one answer. Between the runs, in the order of the bytes, are plain pulls (plain_pulls.pyx), and Frames
for everything else, which the reference handles. So nothing is refused here: a frame with any doubt (another form of
JSON, an unusual number, a repeated field, a text near its limit) is not plain.

The columns and answers equal those of the reference (tests/edges/remoting/codec/test_implementation.py).
"""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp

from timeball.edges.remoting.codec.c_text cimport Text, is_ascii, put, read32, same
from timeball.edges.remoting.codec.plain_pulls cimport read_pull
from timeball.edges.remoting.codec.send_headers cimport (
    NEVER, names_delay, plan_plain, read_binary, read_json, read_properties, read_record,
)

from timeball.model.message import RETRY_PREFIX, decode_properties
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import MessageFlag
from timeball.edges.remoting.codec.frame import BINARY, HEADER_BYTES_MAX, JSON, Frame, length_error

cdef enum:
    ROWS_MAX = 1024  # of a run. A batch at its end may exceed it by the number of its messages
    BODY_BYTES_MAX = 65535  # a larger body is not part of a run: it is counted while it is pending (connection.py)

cdef int32_t TRANSACTION_BITS = MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT
cdef Py_ssize_t HEADER_MAX = HEADER_BYTES_MAX
cdef bytes _retry = RETRY_PREFIX.encode()
cdef Text RETRY = Text(_retry, len(_retry))


cdef class SendRun:
    """Consecutive plain sends of one connection. Iterates over their SendRows. See implementation.SendRun."""

    def __dealloc__(self):
        free(self.rows)
        free(self.text.data)

    def __len__(self):
        return self.count

    cdef Row* next_row(self) except NULL:
        """Return the row after the last one. The caller fills it, and then increments `count`."""
        if self.count == self.capacity:
            capacity = 4 * self.capacity or 4
            rows = <Row*> realloc(self.rows, capacity * sizeof(Row))
            if rows == NULL:
                raise MemoryError
            self.rows, self.capacity = rows, capacity
        return self.rows + self.count

    cdef bint add(self, const char* data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form) except -1:
        """Add the frame from `at` to `end` in `data`, whose body begins at `body_at`. `form` is its serialisation.

        Returns False, without adding a row, if the frame is not a plain send or a plain batch.
        """
        cdef Row* row
        cdef Text topic, header
        header.at, header.size = data + at + 8, body_at - at - 8
        if end - body_at > BODY_BYTES_MAX or header.size > HEADER_MAX:
            return False
        row = self.next_row()
        row.frame_at, row.payload_at, row.payload_bytes = at, body_at, end - body_at
        row.body_at, row.body_bytes, row.parts = body_at, end - body_at, 1
        row.tag_bytes = row.keys_bytes = row.key_bytes = row.text_bytes = row.queue_id = -1
        row.flag = row.sys_flag = row.times = row.level = row.opaque = 0
        row.born_ms, row.due_ms = 0, NEVER
        row.is_one_way = row.is_batch = False
        row.delays = 0
        row.is_binary = form == BINARY
        topic.size = 0
        if form == JSON:
            if not read_json(row, &self.text, header, &topic):
                return False
        elif form != BINARY or not read_binary(row, &self.text, header, &topic):
            return False
        if topic.size == 0 or row.text_bytes < 0 or row.sys_flag & TRANSACTION_BITS:
            return False
        if topic.size >= RETRY.size and memcmp(topic.at, RETRY.at, RETRY.size) == 0:
            return False
        if row.is_batch:
            return self.add_batch(data, body_at, end, topic)
        if not read_properties(row, &self.text):
            return False
        self.add_topic(row, topic)
        self.needs_time |= row.born_ms == 0 or row.delays != 0
        self.text.size += row.text_bytes
        self.size_bytes += row.body_bytes + row.text_bytes
        self.count += 1
        return True

    cdef bint add_batch(self, const char* data, Py_ssize_t at, Py_ssize_t end, Text topic) except -1:
        """Add the records of a batch, whose header is in the next row. If one is not plain, none is added."""
        cdef Row head = self.rows[self.count]
        cdef Row* row
        cdef Py_ssize_t first = self.count, text_bytes = self.text.size, size_bytes = self.size_bytes
        cdef Text properties = Text(self.text.data + text_bytes, head.text_bytes)
        # The properties of the batch itself are not used, but the reference refuses a delay in them, or invalid text.
        if head.queue_id < 0 or not is_ascii(properties) or names_delay(properties):
            return False
        while at < end:
            row = self.next_row()
            row[0] = head
            if not read_record(row, &self.text, data, &at, end):
                self.count, self.text.size, self.size_bytes = first, text_bytes, size_bytes
                return False
            row.parts = 0
            self.needs_time |= row.born_ms == 0 or row.delays != 0
            self.text.size += row.text_bytes
            self.size_bytes += row.body_bytes + row.text_bytes
            self.count += 1
        if self.count == first:
            return False
        self.add_topic(&head, topic)
        for row in self.rows[first:self.count]:
            row.topic = head.topic
        self.rows[first].parts = self.count - first
        return True

    cdef void add_topic(self, Row* row, Text topic) noexcept:
        """Set the topic of a row to its index in `names`, and raise the greatest queue id of that topic."""
        cdef int at = 0
        while at < self.topics and not same(topic, self.names[at].at, self.names[at].size):
            at += 1
        if at == self.topics:
            self.names[at], self.greatest[at] = topic, -1
            self.topics += 1
        row.topic = at
        self.greatest[at] = max(self.greatest[at], row.queue_id)

    # -- after splitting ---------------------------------------------------------------------------------------------

    cdef int close(self, bytes data, Py_ssize_t end) except -1:
        """Complete the run, which ends at `end` in `data`, and keep the bytes that it needs."""
        cdef int32_t begin = self.rows[0].frame_at
        cdef Py_ssize_t at
        self.destinations = [
            (self.names[at].at[:self.names[at].size].decode(), self.greatest[at]) for at in range(self.topics)
        ]
        # Copy the topic names into the text, so that they do not depend on `data`. The text does not move after that.
        for at in range(self.topics):
            put(&self.text, self.names[at].at, self.names[at].size)
        cdef const char* name = self.text.data + self.text.size
        for at in range(self.topics - 1, -1, -1):
            name -= self.names[at].size
            self.names[at].at = name
        # A few sends must not keep a read of megabytes in memory until they are durable.
        if 2 * (end - begin) < len(data):
            data = data[begin:end]
            for at in range(self.count):
                self.rows[at].frame_at -= begin
                self.rows[at].payload_at -= begin
                self.rows[at].body_at -= begin
            end -= begin
        self.data, self.end = data, end
        return 0

    def plan(self, bytes born_host, int64_t now_ms, int64_t delay_ms_max, frozenset user_names):
        """Complete the rows with born host, time and delays. See implementation.SendRun. Raises InvalidDelay."""
        cdef Row* row
        self.born_host = born_host
        for row in self.rows[:self.count]:
            if row.born_ms == 0:
                row.born_ms = now_ms
            if row.delays and not plan_plain(row, &self.text, now_ms, delay_ms_max):
                properties = decode_properties(self.value(row, row.text_at, row.text_bytes))
                row.level, due_ms = delays.plan(properties, now_ms, delay_ms_max, user_names)
                row.due_ms = NEVER if due_ms is None else due_ms

    cdef object value(self, Row* row, int32_t at, int32_t size):
        """Return a text from the properties, or None if it is missing."""
        return None if size < 0 else self.text.data[at:at + size].decode()

    def __iter__(self):
        result = []
        cdef Row* row
        host = self.born_host.decode()
        for row in self.rows[:self.count]:
            result.append((
                self.destinations[row.topic][0], self.data[row.body_at:row.body_at + row.body_bytes],
                self.value(row, row.tag_at, row.tag_bytes), self.value(row, row.keys_at, row.keys_bytes),
                self.value(row, row.key_at, row.key_bytes), self.value(row, row.text_at, row.text_bytes),
                row.queue_id, row.born_ms, host, row.flag, row.sys_flag, row.times,
                None if row.due_ms == NEVER else row.due_ms, row.level or None,
            ))
        return iter(result)

    def frames(self):
        """Return the frames of the run."""
        result = []
        cdef Row* row
        for row in self.rows[:self.count]:
            if row.parts:
                body = self.data[row.payload_at:row.payload_at + row.payload_bytes]
                form = BINARY if row.is_binary else JSON
                result.append(Frame(form, self.data[row.frame_at + 8:row.payload_at], body))
        return result

    def requests(self):
        """Return opaque and serialisation of each request that is not one-way."""
        cdef Row* row
        return [
            (row.opaque, BINARY if row.is_binary else JSON)
            for row in self.rows[:self.count]
            if row.parts and not row.is_one_way
        ]


# ---- frames ----------------------------------------------------------------------------------------------------------


def cut(bytes data, Py_ssize_t frame_bytes_max):
    """Split bytes into frames, plain pulls and runs, in their order. See frame.Cut. Raises BadFrame.

    A run ends at a frame that is not a plain send, or when it has ROWS_MAX rows or TOPICS_MAX topics.
    """
    cdef const char* begin = data
    cdef Py_ssize_t at = 0, size = len(data), awaited_bytes = 8, body_at, end
    cdef int32_t length
    cdef uint32_t type_and_header_bytes, header_bytes
    cdef SendRun run = SendRun()
    cdef list result = []
    while size - at >= 8:
        length, type_and_header_bytes = <int32_t> read32(begin + at), read32(begin + at + 4)
        header_bytes = type_and_header_bytes & 0xFFFFFF
        if not 4 <= length <= frame_bytes_max or <int64_t> header_bytes > length - 4:
            raise length_error(length, header_bytes, frame_bytes_max)
        end = at + 4 + length
        if end > size:
            awaited_bytes = end - at
            break
        body_at = at + 8 + header_bytes
        if not run.add(begin, at, body_at, end, type_and_header_bytes >> 24):
            if run.count:
                run.close(data, at)
                result.append(run)
                run = SendRun()
            pull = read_pull(data, at + 8, body_at, end, type_and_header_bytes >> 24)
            result.append(pull or Frame(type_and_header_bytes >> 24, data[at + 8:body_at], data[body_at:end]))
        elif run.count >= ROWS_MAX or run.topics == TOPICS_MAX:
            run.close(data, end)
            result.append(run)
            run = SendRun()
        at = end
    if run.count:
        run.close(data, at)
        result.append(run)
    return result, at, awaited_bytes
