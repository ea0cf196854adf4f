# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Runs of plain sends, cut out, read and answered in C: the compiled twin of what sends.py and SendRows do one by one.

    bytes of a connection -> cut -> Frame | PlainPull | SendRun -> join -> columns of a batch
                                                                -> answers, as bytes

A send is plain when producers write it so and only its topic, its queue and its delay are left to decide about; a batch
when each of its records is, and it names its queue: then its messages are rows of the run, with one answer. A plain
pull (plain_pulls.pyx) stands in its place between the runs, and so does all else, as a Frame that goes the way of the
reference. So nothing is refused here: each doubt
(another spelling of JSON, an unusual number, a field that is there twice, a text near its limit) makes a frame not plain.

The columns and answers are those that the reference makes (tests/edges/remoting/codec/test_implementation.py).
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
from timeball.edges.remoting.codec.frame import BINARY, HEADER_BYTES_MAX, JSON, Frame, refusal

cdef enum:
    ROWS_MAX = 1024  # of a run; a batch may take it beyond, by as many as its body has room for
    BODY_BYTES_MAX = 65535  # a larger one counts by itself while it is under way (connection.py)

cdef int32_t TRANSACTION_BITS = MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT
cdef Py_ssize_t HEADER_MAX = HEADER_BYTES_MAX
cdef bytes _retry = RETRY_PREFIX.encode()
cdef Text RETRY = Text(_retry, len(_retry))


cdef class SendRun:
    """Plain sends that stand side by side in the bytes of one connection. Iterates as the rows of SEND_NAMES."""

    def __dealloc__(self):
        free(self.rows)
        free(self.text.data)

    def __len__(self):
        return self.count

    cdef Row* next_row(self) except NULL:
        if self.count == self.room:
            room = 4 * self.room or 4
            rows = <Row*> realloc(self.rows, room * sizeof(Row))
            if rows == NULL:
                raise MemoryError
            self.rows, self.room = rows, room
        return self.rows + self.count

    cdef bint add(self, const char* data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form) except -1:
        """Add the frame from `at` to `end` of `data`, if it is a plain send or a batch of them."""
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
        """Add the records of a batch, whose header is in the next row; none of them when one is not plain."""
        cdef Row head = self.rows[self.count]
        cdef Row* row
        cdef Py_ssize_t first = self.count, text_bytes = self.text.size, size_bytes = self.size_bytes
        cdef Text properties = Text(self.text.data + text_bytes, head.text_bytes)
        # The properties of the whole must be a text. No more is made of them, but a delay in them is refused.
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
        cdef int at = 0
        while at < self.topics and not same(topic, self.names[at].at, self.names[at].size):
            at += 1
        if at == self.topics:
            self.names[at], self.greatest[at] = topic, -1
            self.topics += 1
        row.topic = at
        self.greatest[at] = max(self.greatest[at], row.queue_id)

    # -- when it has been cut out ------------------------------------------------------------------------------------

    cdef int close(self, bytes data, Py_ssize_t end) except -1:
        """Keep what the run needs of the bytes that it was cut out of, up to `end`."""
        cdef int32_t begin = self.rows[0].frame_at
        cdef Py_ssize_t at
        self.destinations = [
            (self.names[at].at[:self.names[at].size].decode(), self.greatest[at]) for at in range(self.topics)
        ]
        # The names too: the bytes that they stand in need not stay. The text has its last place only then.
        for at in range(self.topics):
            put(&self.text, self.names[at].at, self.names[at].size)
        cdef const char* name = self.text.data + self.text.size
        for at in range(self.topics - 1, -1, -1):
            name -= self.names[at].size
            self.names[at].at = name
        # A few sends must not hold a read of megabytes until they are durable.
        if 2 * (end - begin) < len(data):
            data = data[begin:end]
            for at in range(self.count):
                self.rows[at].frame_at -= begin
                self.rows[at].payload_at -= begin
                self.rows[at].body_at -= begin
            end -= begin
        self.data, self.end = data, end
        return 0

    def plan(self, bytes born_host, int64_t now_ms, int64_t delay_ms_max, str timing_zone, frozenset user_names):
        """Complete the rows by what the edge knows, and by their delays; raises InvalidDelay."""
        cdef Row* row
        self.born_host = born_host
        for row in self.rows[:self.count]:
            if row.born_ms == 0:
                row.born_ms = now_ms
            if row.delays and not plan_plain(row, &self.text, now_ms, delay_ms_max):
                found = decode_properties(self.value(row, row.text_at, row.text_bytes))
                row.level, due_ms = delays.plan(found, now_ms, delay_ms_max, timing_zone, user_names)
                row.due_ms = NEVER if due_ms is None else due_ms

    cdef object value(self, Row* row, int32_t at, int32_t size):
        """Return a text of the properties, None for one that is not there."""
        return None if size < 0 else self.text.data[at:at + size].decode()

    def __iter__(self):
        found = []
        cdef Row* row
        host = self.born_host.decode()
        for row in self.rows[:self.count]:
            found.append((
                self.destinations[row.topic][0], self.data[row.body_at:row.body_at + row.body_bytes],
                self.value(row, row.tag_at, row.tag_bytes), self.value(row, row.keys_at, row.keys_bytes),
                self.value(row, row.key_at, row.key_bytes), self.value(row, row.text_at, row.text_bytes),
                row.queue_id, row.born_ms, host, row.flag, row.sys_flag, row.times,
                None if row.due_ms == NEVER else row.due_ms, row.level or None,
            ))
        return iter(found)

    def frames(self):
        """Return the frames that the run was made of."""
        found = []
        cdef Row* row
        for row in self.rows[:self.count]:
            if row.parts:
                body = self.data[row.payload_at:row.payload_at + row.payload_bytes]
                form = BINARY if row.is_binary else JSON
                found.append(Frame(form, self.data[row.frame_at + 8:row.payload_at], body))
        return found

    def requests(self):
        """Return number and serialisation of each request that waits for an answer."""
        cdef Row* row
        return [
            (row.opaque, BINARY if row.is_binary else JSON)
            for row in self.rows[:self.count]
            if row.parts and not row.is_one_way
        ]


# ---- frames ----------------------------------------------------------------------------------------------------------


def cut(bytes data, Py_ssize_t frame_bytes_max):
    """Cut frames, plain pulls and runs out of these bytes.

    Returns them, where the half frame at the end begins, and its size as far as it is known; raises BadFrame.
    """
    cdef const char* begin = data
    cdef Py_ssize_t at = 0, size = len(data), awaited_bytes = 8, body_at, end
    cdef int32_t length
    cdef uint32_t word, header_bytes
    cdef SendRun run = SendRun()
    cdef list found = []
    while size - at >= 8:
        length, word = <int32_t> read32(begin + at), read32(begin + at + 4)
        header_bytes = word & 0xFFFFFF
        if not 4 <= length <= frame_bytes_max or <int64_t> header_bytes > length - 4:
            raise refusal(length, header_bytes, frame_bytes_max)
        end = at + 4 + length
        if end > size:
            awaited_bytes = end - at
            break
        body_at = at + 8 + header_bytes
        if not run.add(begin, at, body_at, end, word >> 24):
            if run.count:
                run.close(data, at)
                found.append(run)
                run = SendRun()
            pull = read_pull(data, at + 8, body_at, end, word >> 24)
            found.append(pull or Frame(word >> 24, data[at + 8:body_at], data[body_at:end]))
        elif run.count >= ROWS_MAX or run.topics == TOPICS_MAX:
            run.close(data, end)
            found.append(run)
            run = SendRun()
        at = end
    if run.count:
        run.close(data, at)
        found.append(run)
    return found, at, awaited_bytes
